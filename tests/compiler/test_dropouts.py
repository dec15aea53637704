"""A dropout that is off is its input, also to sums in place; one that is on stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.running import through
from tilewright.compiler import lower
from tilewright.compiler.rewrite.dropouts import remove_idle_dropouts


def off(x):
    return F.dropout(x.relu(), 0.5, training=False)


def nothing_dropped(x):
    return torch.dropout(x.relu(), 0.0, True)


def in_place(x):
    y = F.dropout(x.relu(), p=0, inplace=True)
    y += 1
    return y


def of_an_input(x):
    """The caller's tensor changes, as in eager."""
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
    found = []

    def backend(gm, inputs):
        found.append(through(remove_idle_dropouts, gm))
        return gm.forward

    torch._dynamo.reset()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ours, eager = x.clone(), x.clone()
    torch.testing.assert_close(torch.compile(step, backend=backend)(ours), step(eager))
    torch.testing.assert_close(ours, eager)
    assert sum(found) == removed


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
