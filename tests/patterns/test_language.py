"""What an attempt answers where a pattern gives up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import fx

from tilewright.patterns.dataflow import Value
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Miss, Stage, as_advice, attempt, reject


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
