"""A fixture that records which lowerings the calls of a test use."""

from __future__ import annotations

import pytest

from tilewright.ops.qkv import lowering


@pytest.fixture
def chosen(monkeypatch):
    """Lists the names of the lowerings that calls of the attention ops use, in order."""
    names, steps = [], lowering.choice_steps

    def noted(call, choice, target):
        names.append(choice.name)
        return steps(call, choice, target)

    monkeypatch.setattr(lowering, "choice_steps", noted)
    return names
