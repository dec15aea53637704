"""Projections with low-rank adapters in the manner of public code bases, one function per style.

    module, args = build("rows_in_place")        # one of STYLES

A style is `step(m, x, ids) -> q, k, v`. x is [T, K], each result is [T, N], and ids [T] is the
adapter of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, ADAPTERS, RANK, HIDDEN, WIDTH = 6, 2, 8, 32, 32
#: The rows of each adapter, as Python lists.
ROWS = ([0, 2, 3], [1, 5])


def rows_in_place(m, x, ids):
    """Adds each adapter's rows to the result in place, as PEFT does with `adapter_names`."""
    found = []
    for n in range(3):
        result = F.linear(x, m.w[n])
        for g, rows in enumerate(ROWS):
            delta = F.linear(F.linear(x[rows], m.a[n][g]), m.b[n][g]) * 2.0
            result[rows] += delta.to(result.dtype)
        found.append(result)
    return found


def rows_by_mask(m, x, ids):
    """Adds each adapter's delta at the rows that a mask selects."""
    found = []
    for n in range(3):
        result = F.linear(x, m.w[n])
        for g in range(ADAPTERS):
            delta = F.linear(F.linear(x, m.a[n][g]), m.b[n][g]) * 2.0
            result = result + torch.where((ids == g)[:, None], delta, 0.0)
        found.append(result)
    return found


def one_stack(m, x, ids):
    """Multiplies by one stack of A for q, k and v with einsum, on a packed projection. The adapters
    are written by hand."""
    h = torch.einsum("tk,tprk->tpr", x, m.a_stack[ids])
    y = F.linear(x, m.packed).view(-1, 3, WIDTH) + torch.einsum("tpr,tpnr->tpn", h, m.b_stack[ids])
    return y.unbind(1)


def one_stack_in_turn(m, x, ids):
    """Computes a separate product for each of q, k and v, as the miss's hint advises."""
    parts = F.linear(x, m.packed).split(WIDTH, -1)
    found = []
    for n, part in enumerate(parts):
        h = torch.einsum("tk,trk->tr", x, m.a_stack[ids, n])
        found.append(part + torch.einsum("tr,twr->tw", h, m.b_stack[ids, n]))
    return found


def one_stack_views(m, x, ids):
    """Computes the same as `one_stack_in_turn`, but from views of the stacks."""
    parts = F.linear(x, m.packed).split(WIDTH, -1)
    found = []
    for n, part in enumerate(parts):
        h = torch.einsum("tk,trk->tr", x, m.a_stack[:, n][ids])
        found.append(part + torch.einsum("tr,twr->tw", h, m.b_stack[:, n][ids]))
    return found


def one_stack_crossed(m, x, ids):
    """Near miss: the delta of q uses the A of k."""
    h = torch.einsum("tk,tprk->tpr", x, m.a_stack[ids]).flip(1)
    y = F.linear(x, m.packed).view(-1, 3, WIDTH) + torch.einsum("tpr,tpnr->tpn", h, m.b_stack[ids])
    return y.unbind(1)


def picked_by_mapping(m, x, ids):
    """Near miss, which has no adapters (XLNet): a three-dimensional input selects the tokens of
    each target, and the weight of the next projection has a dimension of heads."""
    made = F.linear(x, m.w[0]).view(3, TOKENS // 3, 2, WIDTH // 2)
    taken = torch.einsum("mlb,mbnd->lbnd", m.mapping, made)
    out = torch.einsum("lbnd,hnd->lbh", taken, m.o)
    return (out + x[: out.shape[1]],)


@dataclass(frozen=True)
class Style:
    step: Callable[..., Any]


STYLES = {
    f.__name__: Style(f)
    for f in (
        rows_in_place,
        rows_by_mask,
        one_stack,
        one_stack_in_turn,
        one_stack_views,
        one_stack_crossed,
        picked_by_mapping,
    )
}


class Layer(nn.Module):
    def __init__(self, style: Style, normal: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.step = style.step

        def weight(*shape):
            return nn.Parameter(normal(*shape) * shape[-1] ** -0.5, requires_grad=False)

        def each(*shape):
            return nn.ParameterList(weight(*shape) for _ in range(3))

        self.w = each(WIDTH, HIDDEN)
        self.a, self.b = each(ADAPTERS, RANK, HIDDEN), each(ADAPTERS, WIDTH, RANK)
        self.packed = weight(3 * WIDTH, HIDDEN)
        self.a_stack = weight(ADAPTERS, 3, RANK, HIDDEN)
        self.b_stack = weight(ADAPTERS, 3, WIDTH, RANK)
        self.o = weight(HIDDEN, 2, WIDTH // 2)
        self.register_buffer("mapping", normal(3, 1, TOKENS // 3))

    def forward(self, x, ids):
        return tuple(y * 1.0 for y in self.step(self, x, ids))


def build(name, dtype=torch.bfloat16):
    """Returns (module, arguments). They are seeded, so that the same call gives the same
    numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    ids = torch.tensor([0, 1, 0, 0, 1, 1])
    return Layer(STYLES[name], normal).eval(), [normal(TOKENS, HIDDEN), ids]
