"""Tests the order in which patterns are tried, which the patterns state themselves, and the
properties that they state for all their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tilewright.patterns import effects, language
from tilewright.patterns.language import Match, Reject, Result, Stage, miss_at

#: For each pattern, the patterns that must come after it. It would otherwise lose anchors to them,
#: or they report its anchors with less information.
ORDER = (
    "cache_absent", "mla_latent_store", "qkv_cache", "mla_decode", "lora_qkv", "cache_store",
    "mla_prefill", "cache_attention", "moe", "moe_dense", "moe_router", "all_reduce_residual_norm",
    "linear_activation", "linear_residual", "grouped_gemm_nvfp4", "grouped_gemm",
    "scaled_linear",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A pattern that returns a given answer."""

    name: str
    asked_before: tuple[str, ...] = ()
    answer: Any = None
    optional: bool = False
    op: str = "an_op"

    def anchors(self, flow):
        return ()

    def match(self, anchor, flow):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(language, "_REGISTRY", {})


def test_the_package_s_patterns_keep_their_order():
    assert [p.name for p in language.registered() if p.name in ORDER] == list(ORDER)


def test_a_pattern_comes_before_those_that_it_names(alone):
    for name, others in (("a", ()), ("b", ()), ("c", ("a", "not registered")), ("d", ("c",))):
        language.register(Asked(name, others))
    assert [p.name for p in language.registered()] == ["d", "c", "a", "b"]
    assert [p.name for p in language.registered(["a", "d"])] == ["d", "a"]


def test_two_that_want_to_be_first_are_named(alone):
    for name, other in (("a", "b"), ("b", "a")):
        language.register(Asked(name, (other,)))
    with pytest.raises(ValueError, match=r"because each of \('a', 'b'\) must be tried"):
        language.registered()


@pytest.mark.parametrize("optional", [False, True])
def test_what_holds_for_all_answers_of_a_pattern(optional):
    made = language.attempt(Asked("a", answer=Match(None, {}), optional=optional), None, None)
    assert (made.pattern, made.op, made.needs_kernel) == ("a", "an_op", optional)
    assert made.miss_weight == ("advice" if optional else None)
    lost = Reject(miss_at("HEADS", Stage.GUARDS, "why"))
    for answer in (lost, effects.InexpressibleError("regrouped")):
        missed = language.attempt(Asked("a", answer=answer, optional=optional), None, None)
        assert missed.weight == ("advice" if optional else "lost")


@dataclass(frozen=True)
class Shaped:
    """Stands for a value that an output replaces. It has the facts that are checked."""

    shape: tuple[int, ...]


def test_rows_are_a_whole_output_in_the_value_s_own_shape():
    assert Result.of_rows(Shaped((6, 8)), (6, 8)).effect == effects.identity((6, 8))
    split = Result.of_rows(Shaped((2, 3, 8)), (6, 8), output=1)
    assert split.effect == effects.reshape(effects.identity((6, 8)), (2, 3, 8))
    assert split.output == 1
