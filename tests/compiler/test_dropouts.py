"""Tests a dropout that is off, which equals its input, also for in-place sums. A dropout that is on
stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.running import through
from tilewright.compiler import lower
from tilewright.compiler.rewrite.dropouts import count_dropouts, remove_idle_dropouts


def off(x):
    return F.dropout(x.relu(), 0.5, training=False)


def nothing_dropped(x):
    return torch.dropout(x.relu(), 0.0, True)


def in_place(x):
    y = F.dropout(x.relu(), p=0, inplace=True)
    y += 1
    return y


def of_an_input(x):
    """Changes the caller's tensor, as in eager."""
    F.dropout(x, 0.5, False).add_(1)
    return x * 2


def on(x):
    torch.manual_seed(0)
    return F.dropout(x.relu(), 0.5)


@pytest.mark.parametrize(
    ("step", "removed"),
    [(off, 1), (nothing_dropped, 1), (in_place, 1), (of_an_input, 1), (on, 0)],
)
def test_only_dropouts_that_are_off_are_removed(step, removed):
    found, counted = [], []

    def backend(gm, inputs):
        counted.append(count_dropouts(gm.graph))
        found.append(through(remove_idle_dropouts, gm))
        return gm.forward

    torch._dynamo.reset()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ours, eager = x.clone(), x.clone()
    torch.testing.assert_close(torch.compile(step, backend=backend)(ours), step(eager))
    torch.testing.assert_close(ours, eager)
    assert sum(found) == removed
    assert sum(counted) == (step is on)


def test_a_residual_added_in_place_behind_a_dropout_is_fused():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
            self.drop = torch.nn.Dropout(0.1)

        def forward(self, x, residual):
            y = self.drop(self.proj(x))
            y += residual
            return y

    block = Block().eval().requires_grad_(False)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert [site.pattern for site in lower(block, (x, x + 1)).matches] == ["linear_residual"]


CHANGES = {
    "turned": lambda y: y.transpose(0, 1).mul_(2),
    "flipped": lambda y: y.T.copy_(y.T.flip(0)),
    "flat": lambda y: y.view(-1).add_(1),
    "detached": lambda y: y.detach().mul_(2),
    "half": lambda y: y.chunk(2, -1)[0].mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_view_changed_in_place_behind_a_dropout_changes_its_input(change):
    """A change of a view after a dropout also changes the dropout's input. (The fake tensor of a
    dropout has separate memory. Without care, a sum would read the projection as it was before the
    change.)"""
    generator = torch.Generator().manual_seed(0)
    x, residual, w = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(3))

    def step(x, residual):
        y = F.dropout(F.linear(x, w), 0.1, training=False)
        CHANGES[change](y)
        return residual + y + F.linear(x, w)

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(step, backend="tilewright", options={"inner": "eager"})
        ours, exact = compiled(x, residual), step(x, residual)
    torch.testing.assert_close(ours, exact, rtol=0.05, atol=0.05)
