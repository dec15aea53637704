"""Tests every reason not to fuse. Each test runs a tiny model with one fault, and the same model
without the fault.

For the faulty model, `qkv_cache` must give a miss with the code, the stage and a message that names
the culprit. The model must still give exactly the results of eager, including caches. The other
model must be fused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import assert_as_eager
from tests.compiler import broken_order as order
from tests.compiler import broken_paths as paths
from tests.compiler.steps import (
    HKV,
    D,
    Layer,
    T,
    caches_of,
    caches_of_the_tokens_alone,
    caches_on_one_storage,
    column_major_activation,
    cos_sin,
    longer_v_pages,
    make_args,
    normed,
    one_cache_twice,
    one_wide_head_each,
    plain,
    rms_norm,
    rotate,
    rotated,
    store,
)
from tests.found import misses_of, patterns_in
from tests.models import qkv_idioms
from tilewright.compiler import lower, reports
from tilewright.patterns import effects, language
from tilewright.patterns.language import CODES, Match, Result, Stage

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hazard:
    """A reason not to fuse.

    culprit: the text that the message must contain.
    mended: the same step without the fault.
    instead: the pattern that still matches the write by itself.
    """

    code: str
    stage: Stage
    culprit: str
    broken: Callable[..., Any]
    mended: Callable[..., Any] = plain
    instead: str | None = "cache_store"
    broken_args: Callable[[], tuple[Any, ...]] = make_args
    mended_args: Callable[[], tuple[Any, ...]] = make_args
    layer: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


A, X, KP, VP, QP, G, H = list(Stage)[:7]


def activation(change):
    """Makes steps that change an activation in place. In one step another view of the activation
    sees the change, and in the other step none does."""
    return order.activation_changed(change), order.activation_changed(change, seen=False)


HAZARDS = {
    "fresh_cache": Hazard("FRESH_CACHE", A, "allocates", paths.fresh_cache, instead=None),
    "accumulated": Hazard("ACCUMULATED_WRITE", A, "accumulates", paths.accumulated, instead=None),
    "moved_cache": Hazard("MOVED_CACHE", A, "old tokens too", paths.moved_cache, instead=None),
    "whole_cache": Hazard(
        "SLICE_WRITE",
        A,
        "which dimension has the slots",
        paths.whole_cache,
        instead=None,
        broken_args=caches_of_the_tokens_alone,
    ),
    "lone_key": Hazard("LONE_WRITE", A, "no other write goes to the same slots", paths.lone_key),
    "other_slots_for_v": Hazard(
        "LONE_WRITE", A, "no other write goes to the same slots", paths.other_slots_for_v
    ),
    "random_slots": Hazard(
        "LONE_WRITE", A, "no other write goes to the same slots", paths.random_slots
    ),
    "one_cache_twice": Hazard(
        "LONE_WRITE", A, "no other write goes to the same slots", plain, broken_args=one_cache_twice
    ),
    "features_apart": Hazard("LAYOUT", KP, "runs of consecutive features", paths.features_apart),
    "one_wide_head": Hazard(
        "CACHE_LAYOUT",
        KP,
        "1 heads of 32, but the K projection computes 2 of 16",
        paths.one_wide_head,
        rotated,
        broken_args=one_wide_head_each,
    ),
    "reinterpreted": Hazard(
        "CACHE_LAYOUT", A, "reinterpreting view", paths.reinterpreted, instead=None
    ),
    "only_later_tokens": Hazard("SLOT_INDEX", KP, "every token once", paths.only_later_tokens),
    "slot_by_head": Hazard("SLOT_INDEX", A, "from head to head", paths.slot_by_head, instead=None),
    "pages_of_other_size": Hazard(
        "SLOT_INDEX",
        G,
        "different slots",
        paths.pages_of_other_size,
        paths.pages_of_other_size,
        broken_args=longer_v_pages,
    ),
    "detour_k": Hazard("CAST", KP, "float8_e4m3fn to float32", paths.detour_k),
    "detour_before_rope": Hazard(
        "CAST", KP, "float8_e4m3fn to float32", paths.detour_before_rope, rotated
    ),
    "detour_v": Hazard("CAST", VP, "float8_e4m3fn to float32", paths.detour_v),
    "narrower_cache": Hazard(
        "CAST",
        KP,
        "float32 to bfloat16",
        paths.narrower_cache,
        broken_args=caches_of(torch.bfloat16),
    ),
    "gelu_k": Hazard("K_PATH", KP, "aten.gelu", paths.gelu_k),
    "projected_by_a_custom_op": Hazard(
        "K_PATH", KP, "tilewright_tests::quantised_linear", paths.projected_by_a_custom_op
    ),
    "relu_k_in_place": Hazard("K_PATH", KP, "found aten.relu", paths.relu_k_in_place),
    "bias_scaled": Hazard("K_PATH", KP, "aten.add", paths.bias_scaled),
    "norm_of_the_first_token": Hazard(
        "K_PATH", KP, "aten.mul", paths.norm_of_the_first_token, paths.one_eps
    ),
    "norm_with_scaled_eps": Hazard(
        "K_PATH", KP, "aten.mul", paths.norm_with_scaled_eps, paths.one_eps
    ),
    "bias_in_place": Hazard("ESCAPES", H, "also used by store", paths.bias_in_place, paths.bias),
    "gelu_v": Hazard("V_PATH", VP, "aten.gelu", paths.gelu_v),
    "rotated_v": Hazard("V_PATH", VP, "both writes are rotated", paths.rotated_v, rotated),
    "query_of_something_else": Hazard("Q_PATH", QP, "no query", paths.query_of_something_else),
    "query_rotated_otherwise": Hazard(
        "Q_PATH", QP, "is not a query", paths.query_rotated_otherwise, rotated
    ),
    "query_of_two": Hazard("Q_PATH", QP, "2 candidates", paths.query_of_two),
    "norm_over_half_heads": Hazard(
        "NORM_WIDTH", KP, "runs over 8 features", paths.norm_over_half_heads, paths.one_eps
    ),
    "norm_twice": Hazard("NORM_AFTER_ROPE", KP, "normalised twice", paths.norm_twice, normed),
    "rotated_last_half": Hazard("ROPE_STYLE", KP, "first ones", paths.rotated_last_half, rotated),
    "rotated_by_head": Hazard(
        "ROPE_TABLE", KP, "differ between heads", paths.rotated_by_head, rotated
    ),
    "values_of_something_else": Hazard(
        "ACTIVATION", X, "V projects aten.add", paths.values_of_something_else
    ),
    "float64": Hazard(
        "DTYPE",
        G,
        "have float64; expected one of bfloat16, float16, float32",
        plain,
        instead=None,
        broken_args=caches_of(torch.float64, torch.float64),
        dtype=torch.float64,
    ),
    "autocast": Hazard(
        "DTYPE",
        G,
        "have bfloat16, float32",
        paths.under_autocast,
        instead="cache_store",
        broken_args=caches_of(torch.bfloat16),
    ),
    "three_query_heads": Hazard(
        "HEADS", G, "3 query, 2 key heads", rotated, rotated, layer={"num_heads": 3}
    ),
    "read_between": Hazard("CACHE_READ", H, "sum", order.read_between),
    "cloned_between": Hazard("CACHE_READ", H, "clone", order.copied_between(lambda c: c.clone())),
    "made_contiguous_between": Hazard(
        "CACHE_READ",
        H,
        "contiguous",
        order.copied_between(lambda c: c.mT.contiguous()),
    ),
    "reshaped_between": Hazard(
        "CACHE_READ",
        H,
        "reshape",
        order.copied_between(lambda c: c.mT.reshape(6, -1)),
    ),
    "repeated_between": Hazard(
        "CACHE_READ",
        H,
        "repeat_interleave",
        order.copied_between(lambda c: c.repeat_interleave(2, dim=2)),
    ),
    "read_by_an_op_that_returns_nothing": Hazard(
        "CACHE_READ", H, "attend", order.read_by_an_op_that_returns_nothing
    ),
    "zeroed_between": Hazard(
        "CACHE_WRITE", H, "written again", order.zeroed_between, order.zeroed_before_and_after
    ),
    "scale_in_the_cache": Hazard(
        "CACHE_ALIAS",
        H,
        "norm_weight lies in the cache's own memory",
        order.scale_in_the_cache,
        order.scale_outside_the_cache,
    ),
    "overlapping_caches": Hazard(
        "CACHE_OVERLAP",
        H,
        "one storage",
        plain,
        broken_args=caches_on_one_storage(256),
        mended_args=caches_on_one_storage(6 * 8 * HKV * D),
    ),
    "slots_moved_between": Hazard(
        "INPUT_MUTATED",
        H,
        "slot_mapping",
        order.slots_moved_between,
        order.slots_moved_before,
    ),
    "activation_scaled": Hazard("INPUT_MUTATED", H, "x is", *activation(lambda h: h.mul_(2))),
    "activation_row_scaled": Hazard(
        "INPUT_MUTATED", H, "x is", *activation(lambda h: h[0].mul_(2))
    ),
    "activation_rectified": Hazard(
        "INPUT_MUTATED", H, "x is", *activation(lambda h: F.relu(h, inplace=True))
    ),
    "activation_squashed": Hazard(
        "INPUT_MUTATED",
        H,
        "x is",
        *activation(lambda h: F.hardtanh(h, -0.1, 0.1, True)),
    ),
    "key_returned": Hazard("ESCAPES", H, "the graph's output", order.key_returned),
    "key_used": Hazard("ESCAPES", H, "aten.sum", order.key_used),
    "key_used_by_an_op_that_returns_nothing": Hazard(
        "ESCAPES", H, "store", order.key_used_by_an_op_that_returns_nothing
    ),
    "query_used_first": Hazard(
        "ORDER",
        H,
        "used by aten.sum before the cache is written (steps.py:",
        order.query_used_first,
    ),
    "query_norm_after": Hazard(
        "ORDER",
        H,
        "q_norm_weight is computed only after the cache is written",
        order.query_norm_after,
        order.query_norm_before,
    ),
    "column_major_activation": Hazard(
        "UNSUPPORTED",
        Stage.CAPABILITY,
        "x: expected a contiguous last dimension (stride 1), got strides [1, 5]",
        plain,
        broken_args=column_major_activation,
    ),
    "no_weight": Hazard("UNSUPPORTED", G, "without a weight", paths.no_weight, paths.one_eps),
    "two_eps": Hazard("UNSUPPORTED", G, "normalised differently", paths.two_eps, paths.one_eps),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_a_broken_edge_is_named_and_leaves_the_model_as_it_was(name):
    """The results must be equal bit by bit. This holds even if `cache_store` matches, since it only
    copies its inputs."""
    hazard = HAZARDS[name]
    layer = Layer(hazard.broken, **hazard.layer).to(hazard.dtype)
    assert_as_eager(layer, hazard.broken_args, exactly=True)
    (report,) = reports()
    miss = next(m for m in misses_of(report, "qkv") if m.code == hazard.code)
    assert miss.stage == hazard.stage
    assert hazard.culprit in miss.message
    assert miss.nodes
    assert re.match(r"(broken_\w+|steps|test_hazards)\.py:\d+", miss.source)
    used = set(patterns_in(report, "qkv"))
    assert used == ({hazard.instead} if hazard.instead else set())


#: Maps a step without a fault to the name of a hazard. Many hazards share such a step.
MENDED = {(hazard.mended, hazard.mended_args): name for name, hazard in HAZARDS.items()}


@pytest.mark.parametrize(("step", "make"), MENDED, ids=MENDED.values())
def test_the_mended_edge_matches(step, make):
    assert_as_eager(Layer(step), make, exactly=False)
    (report,) = reports()
    assert patterns_in(report, "qkv") == ["qkv_cache"], [str(m) for m in misses_of(report, "qkv")]
    assert misses_of(report, "qkv") == []


# --- hazards that take more than a step -----------------------------------------------------------


@dataclass(frozen=True)
class Projection:
    """A pattern that matches the first linear of a graph, which the built-in patterns would also
    match."""

    name: str = "tests_projection"
    op: str = "tilewright_tests::none"

    def anchors(self, flow):
        return [next(v for v in flow.values if v.op == "aten.linear")]

    def match(self, anchor, flow):
        result = Result(anchor, effects.identity(anchor.shape))
        return Match(anchor, {}, (result,), (anchor,))


def test_a_site_that_another_match_absorbs_is_claimed():
    language.register(Projection())
    try:
        layer, args = Layer(rotated), make_args()
        lowered = lower(layer, args, patterns=["qkv_cache", "tests_projection"])
    finally:
        language.unregister("tests_projection")
    assert patterns_in(lowered, "qkv") == ["qkv_cache"]
    (miss,) = misses_of(lowered, "qkv", "tests_projection")
    assert (miss.code, miss.stage, miss.pattern) == ("CLAIMED", Stage.HAZARDS, "tests_projection")
    assert "qkv_cache at the top level already absorbs" in miss.message
    torch._dynamo.reset()
    assert misses_of(lower(layer, args, patterns=["qkv_cache"]), "qkv") == []


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_a_collective_inside_is_named(process_group):
    from torch.distributed._functional_collectives import all_reduce

    def reduced(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        store(k_cache, slots, all_reduce(k, "sum", "0"))
        store(v_cache, slots, v)
        return q * 2

    def reduced_after(m, *args):
        return all_reduce(plain(m, *args), "sum", "0")

    layer = Layer(reduced)
    lowered = lower(layer, make_args())
    (miss,) = misses_of(lowered, "qkv")
    assert (miss.code, miss.stage) == ("COLLECTIVE", Stage.K_PATH)
    assert "_c10d_functional" in miss.message
    assert patterns_in(lowered, "qkv") == ["cache_store"]
    assert_as_eager(layer, make_args, exactly=True)
    torch._dynamo.reset()
    assert patterns_in(lower(Layer(reduced_after), make_args()), "qkv") == ["qkv_cache"]


def test_a_projection_may_read_what_another_site_made():
    """The activation of the second site is the query of the first site, which the rewrite replaces
    by the op's output."""

    def twice(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        store(k_cache, slots, k)
        store(v_cache, slots, v)
        return plain(m, q.view(T, -1), k_cache, v_cache, slots + 1)

    layer = Layer(twice)
    assert_as_eager(layer, make_args, exactly=False)
    assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"] * 2


def test_norms_of_one_plus_weight_match():
    def gemma(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        table = cos_sin()
        q, k = (rotate(rms_norm(y, 1 + m.norm), *table) for y in (q, k))
        store(k_cache, slots, k)
        store(v_cache, slots, v)
        return q * 2

    layer = Layer(gemma)
    assert_as_eager(layer, make_args, exactly=False)
    assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"]


def test_every_code_has_a_test_that_reaches_it():
    """The check compares names: each code must occur in a test, as the code with which a model must
    miss."""
    tests = Path(__file__).resolve().parents[1]
    texts = [p.read_text() for p in tests.rglob("*.py") if p.parts[-2] != "tools"]
    assert {code for code in CODES if not any(f'"{code}"' in text for text in texts)} == set()


#: Maps a code to a plain model of tests.models that misses with it (None if the backend's tests
#: have such a model).
IDIOMS_MISSED = {
    "FUNCTIONAL_WRITE": "out_of_place",
    "OPAQUE_WRITE": "custom_op",
    "MASKED_WRITE": "masked",
    "GRAPH_BREAK": "masked",
    "GROWING_CACHE": None,
}


@pytest.mark.parametrize("code", [c for c, name in IDIOMS_MISSED.items() if name])
def test_idioms_reach_their_codes(code):
    module, args = qkv_idioms.build(IDIOMS_MISSED[code])
    captures = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=code == "MASKED_WRITE")
    with captures:
        lowered = lower(module, args)
    miss = next(m for m in misses_of(lowered, "qkv", "capture") if m.code == code)
    assert miss.stage in (Stage.ANCHORED, Stage.K_PATH)
    assert miss.message


def test_a_cache_that_grows_is_told_to_stop(caplog):
    def growing(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        past = [c.view(-1, HKV, D) for c in (k_cache, v_cache)]
        return q * 2, *(torch.cat(pair) for pair in zip(past, (k, v), strict=True))

    layer = Layer(growing)
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert_as_eager(layer, make_args, exactly=True)
    (miss,) = misses_of(reports()[-1], "qkv")
    assert (miss.code, miss.count, miss.stage) == ("GROWING_CACHE", 2, Stage.ANCHORED)
    assert "allocate the cache once" in miss.hint
    assert "GROWING_CACHE x2" in caplog.text
