"""Tests the result of an attempt in which a pattern gives up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import fx

from tilewright.patterns.dataflow import Value
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import (
    Match,
    Miss,
    Missed,
    PatternError,
    Place,
    Stage,
    anchor_nodes,
    as_advice,
    attempt,
    internal_miss,
    miss_at,
    reject,
)


@dataclass(frozen=True)
class GivesUp:
    """A pattern that refuses every anchor, either with a code or because no view expresses what it
    needs."""

    expressible: bool
    advice: bool
    name: str = "gives_up"
    op: str = "tilewright::paged_kv_store"

    def anchors(self, flow):
        return ()

    def match(self, anchor, flow):
        if not self.advice:
            return self.refuse(anchor)
        with as_advice(anchor):
            return self.refuse(anchor)

    def refuse(self, anchor):
        if not self.expressible:
            raise InexpressibleError("no view says it")
        reject("UNSUPPORTED", Stage.GUARDS, "no kernel for it", anchor)


@pytest.mark.parametrize(("expressible", "code"), [(True, "UNSUPPORTED"), (False, "LAYOUT")])
def test_misses_within_as_advice_are_advice_with_their_nodes(expressible, code):
    node = fx.Graph().placeholder("x")
    anchor = Value("input", (), (2,), torch.float32, torch.device("cpu"), node, 0)
    lost, advice = (attempt(GivesUp(expressible, a), anchor, None) for a in (False, True))
    assert isinstance(lost, Miss)
    assert isinstance(advice, Miss)
    assert (lost.code, lost.nodes, lost.weight) == (code, (node,), "lost")
    assert (advice.code, advice.nodes, advice.weight) == (code, (node,), "advice")
    assert (advice.stage, advice.message) == (lost.stage, lost.message)


def test_an_anchor_that_is_known_to_be_a_miss_is_answered_by_that():
    graph = fx.Graph()
    one, other = (
        Value("input", (), (2,), torch.float32, torch.device("cpu"), graph.placeholder(name), 0)
        for name in "xy"
    )
    known = miss_at("UNSUPPORTED", Stage.GUARDS, "seen before", one, hint="another way")
    missed = Missed(known, products=(other,))
    answer = attempt(GivesUp(True, False), missed, None)
    assert isinstance(answer, Miss)
    assert (answer.pattern, answer.message, answer.hint) == (
        "gives_up",
        "seen before",
        "another way",
    )
    assert anchor_nodes(missed) == (one.node, other.node)


def test_what_raised_is_named_and_a_pattern_s_own_fault_is_told_in_its_own_words():
    miss = internal_miss("mine", "to match", ZeroDivisionError("division by zero"))
    assert (miss.pattern, miss.code, miss.weight) == ("mine", "INTERNAL", "lost")
    assert miss.message == "pattern 'mine' failed to match: ZeroDivisionError: division by zero"
    assert internal_miss("mine", "to match", PatternError("it gave None")).message == "it gave None"


def test_a_miss_says_where_it_is_with_and_without_a_graph():
    kept = Miss("mine", "UNSUPPORTED", Stage.GUARDS, "no", (Place("x", "layers.0", "model.py:3"),))  # type: ignore[arg-type]
    assert (kept.scope, kept.source) == ("layers.0", "model.py:3")
    assert str(kept).startswith("layers.0 (model.py:3) guards, UNSUPPORTED: no.")
    nowhere = Miss("mine", "UNSUPPORTED", Stage.GUARDS, "no")
    assert (nowhere.scope, nowhere.source) == ("", "")
    assert str(nowhere).startswith("graph guards, UNSUPPORTED: no.")
    first = Miss("mine", "UNSUPPORTED", Stage.ANCHORED, "no")
    assert str(first).startswith("graph, UNSUPPORTED: no.")  # every attempt reaches this stage


def test_codes_and_weights_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="miss code 'UNHEARD' is not known"):
        miss_at("UNHEARD", Stage.GUARDS, "no")
    with pytest.raises(ValueError, match="weight: expected one of"):
        miss_at("UNSUPPORTED", Stage.GUARDS, "no", weight="heavy")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Answers(GivesUp):
    """A pattern that returns a given answer."""

    answer: object = None

    def match(self, anchor, flow):
        return self.answer


def test_answers_that_are_no_match_or_break_its_contract_are_the_pattern_s_fault():
    node = fx.Graph().placeholder("x")
    value = Value("input", (), (2,), torch.float32, torch.device("cpu"), node, 0)
    for answer, said in (
        (None, "match returned None"),
        (Match(value, {"x": value}), "argument 'x' is a Value"),
        (Match(value, {}, stores=(value,)), "stores are the in-place writes"),
    ):
        with pytest.raises(PatternError, match=f"pattern 'gives_up': {said}"):
            attempt(Answers(True, False, answer=answer), value, None)
    found = attempt(Answers(True, False, answer=Match(value, {"x": value.whole})), value, None)
    assert (found.pattern, found.op) == ("gives_up", "tilewright::paged_kv_store")
