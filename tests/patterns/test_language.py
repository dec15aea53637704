"""What an attempt answers where a pattern gives up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import fx

from tilewright.patterns.dataflow import Value
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import (
    Miss,
    Missed,
    PatternError,
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
    """A pattern that refuses every anchor: by a code, or since no view says what it needs."""

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
