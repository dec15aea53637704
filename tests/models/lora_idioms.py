"""Ways in which engines and models write several adapters on q, k and v, a function for each.

module, args = build("gather_einsum")          # one of IDIOMS
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

T, H, R, G = 6, 64, 8, 4
WIDTHS = {"q": 64, "k": 32, "v": 32}
ROWS = torch.tensor([2, 0, 3, 3, 1, 0])
SOME = torch.tensor([2, -1, 3, 3, -1, 0])  # rows without an adapter


class Layer(nn.Module):
    """A layer with base weights of q, k and v, A [G, R, H], B [G, W, R], and a factor for each
    adapter. `step` computes it."""

    def __init__(self, step, dtype=torch.bfloat16):
        super().__init__()
        self.step = step
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return nn.Parameter(values.to(dtype), requires_grad=False)

        self.base, self.a, self.b = (nn.ParameterDict() for _ in range(3))
        for name, width in WIDTHS.items():
            self.base[name] = random(width, H)
            self.a[name] = random(G, R, H)
            self.b[name] = random(G, width, R)
        self.a_rows = nn.Parameter(torch.cat([*self.a.values()], 1), requires_grad=False)
        self.a_planes = nn.Parameter(torch.stack([*self.a.values()], 1), requires_grad=False)
        self.scales = nn.Parameter(torch.tensor([0.5, 2.0, 1.0, 1.5]).to(dtype), False)

    def forward(self, x, index):
        return self.step(self, x, index)


def each(delta):
    """Returns the model in which each of q, k and v is base + delta(layer, x, index, name)."""

    def step(m, x, index):
        return tuple(F.linear(x, m.base[n]) + delta(m, x, index, n).to(x.dtype) for n in WIDTHS)

    step.__name__ = delta.__name__
    return step


def bases(m, x):
    return {n: F.linear(x, m.base[n]) for n in WIDTHS}


# --- one adapter for each row ---------------------------------------------------------------------


@each
def gather_einsum(m, x, index, n):
    s = torch.einsum("th,trh->tr", x, m.a[n][index])
    return torch.einsum("tr,twr->tw", s, m.b[n][index])


@each
def gather_einsum_scaled(m, x, index, n):
    s = torch.einsum("th,trh->tr", x, m.a[n][index])
    return torch.einsum("tr,twr->tw", s, m.b[n][index]) * m.scales[index].unsqueeze(-1)


@each
def gather_bmm(m, x, index, n):
    s = torch.bmm(m.a[n][index], x.unsqueeze(-1))
    return torch.bmm(m.b[n][index], s).squeeze(-1) * 2.0


@each
def select_matmul(m, x, index, n):
    s = x.unsqueeze(1) @ m.a[n].index_select(0, index).transpose(1, 2)
    return (s @ m.b[n].index_select(0, index).transpose(1, 2)).squeeze(1)


def by_row(stack, index):
    return index.long()[:, None, None].expand(-1, *stack.shape[1:])


def embedded_rows(stack, index):
    return F.embedding(index, stack.flatten(1)).view(-1, *stack.shape[1:])


@each
def embedded(m, x, index, n):
    s = torch.bmm(embedded_rows(m.a[n], index), x.unsqueeze(-1))
    return torch.bmm(embedded_rows(m.b[n], index), s).squeeze(-1)


@each
def gathered_rows(m, x, index, n):
    s = torch.bmm(m.a[n].gather(0, by_row(m.a[n], index)), x.unsqueeze(-1))
    return torch.bmm(m.b[n].gather(0, by_row(m.b[n], index)), s).squeeze(-1)


@each
def taken_along(m, x, index, n):
    at = index.long()[:, None, None]
    s = torch.bmm(m.a[n].take_along_dim(at, 0), x.unsqueeze(-1))
    return torch.bmm(m.b[n].take_along_dim(at, 0), s).squeeze(-1)


@each
def scaled_between(m, x, index, n):
    s = torch.einsum("th,trh->tr", x, m.a[n][index]) * m.scales[index][:, None]
    return torch.einsum("tr,twr->tw", s, m.b[n][index]) / 4


def stacked_split(m, x, index):
    s = torch.einsum("th,trh->tr", x, m.a_rows[index]).split(R, -1)
    y = bases(m, x)
    return tuple(
        y[n] + torch.einsum("tr,twr->tw", part, m.b[n][index])
        for n, part in zip(WIDTHS, s, strict=True)
    )


def stacked_weights_split(m, x, index):
    parts = m.a_rows[index].split(R, 1)
    y = bases(m, x)
    return tuple(
        y[n] + torch.bmm(m.b[n][index], torch.bmm(a, x.unsqueeze(-1))).squeeze(-1)
        for n, a in zip(WIDTHS, parts, strict=True)
    )


def stacked_unbind(m, x, index):
    s = torch.einsum("th,tsrh->tsr", x, m.a_planes[index]).unbind(1)
    y = bases(m, x)
    return tuple(
        y[n] + torch.einsum("tr,twr->tw", part, m.b[n][index])
        for n, part in zip(WIDTHS, s, strict=True)
    )


def stacked_matmul(m, x, index):
    s = m.a_planes[index] @ x[:, None, :, None]
    y = bases(m, x)
    return tuple(y[n] + (m.b[n][index] @ s[:, at]).squeeze(-1) for at, n in enumerate(WIDTHS))


def stacked_single(m, x, index):
    """Uses one adapter, with A of q, k and v in one matrix."""
    s = F.linear(x, m.a_rows[1]).split(R, -1)
    y = bases(m, x)
    return tuple(y[n] + 2.0 * F.linear(part, m.b[n][1]) for n, part in zip(WIDTHS, s, strict=True))


@each
def weights_before(m, x, index, n):
    """Selects the last adapter by a negative index."""
    index = torch.where(index == G - 1, -1, index)
    s = torch.einsum("th,trh->tr", x, m.a[n][index])
    return torch.einsum("tr,twr->tw", s, m.b[n][index])


# --- rows without an adapter ----------------------------------------------------------------------


@each
def none_where(m, x, index, n):
    safe = index.clamp(min=0)
    s = torch.einsum("th,trh->tr", x, m.a[n][safe])
    d = torch.einsum("tr,twr->tw", s, m.b[n][safe])
    return torch.where((index >= 0)[:, None], d, 0.0)


@each
def none_zeros(m, x, index, n):
    safe = torch.where(index < 0, 0, index)
    s = torch.bmm(m.a[n][safe], x.unsqueeze(-1))
    d = torch.bmm(m.b[n][safe], s).squeeze(-1) * m.scales[safe][:, None]
    return torch.where((index != -1).unsqueeze(-1), d, torch.zeros_like(d))


@each
def none_factor(m, x, index, n):
    safe = index.clamp(min=0)
    s = torch.einsum("th,trh->tr", x, m.a[n][safe])
    d = torch.einsum("tr,twr->tw", s, m.b[n][safe])
    return d * (index >= 0).to(d.dtype)[:, None]


# --- sequences ------------------------------------------------------------------------------------


@each
def sequences_bmm(m, x, index, n):
    """Multiplies x [B, S, H] with an adapter for each sequence."""
    s = torch.bmm(x, m.a[n][index].transpose(1, 2))
    return torch.bmm(s, m.b[n][index].transpose(1, 2)) * m.scales[index][:, None, None]


@each
def sequences_einsum(m, x, index, n):
    s = torch.einsum("bsh,brh->bsr", x, m.a[n][index])
    return torch.einsum("bsr,bwr->bsw", s, m.b[n][index])


@each
def sequences_none(m, x, index, n):
    safe = index.clamp(min=0)
    d = x @ m.a[n][safe].mT @ m.b[n][safe].mT
    return torch.where((index >= 0)[:, None, None], d, 0)


@each
def tokens_of_sequences(m, x, index, n):
    """Selects adapters by an index [B, S]."""
    s = torch.einsum("bsh,bsrh->bsr", x, m.a[n][index])
    return torch.einsum("bsr,bswr->bsw", s, m.b[n][index])


# --- rows sorted by adapter -----------------------------------------------------------------------


def ordered(index):
    ids, order = torch.sort(index, stable=True)
    ends = torch.searchsorted(ids, torch.arange(G), right=True).to(torch.int32)
    return order, ends


def by_groups(m, x, order, ends):
    rows, back = x[order], torch.argsort(order)
    y = bases(m, x)
    return tuple(
        y[n]
        + F.grouped_mm(
            F.grouped_mm(rows, m.a[n].transpose(1, 2), offs=ends), m.b[n].transpose(1, 2), offs=ends
        )[back]
        for n in WIDTHS
    )


def grouped(m, x, index):
    return by_groups(m, x, *ordered(index))


def grouped_stacked(m, x, index):
    order, ends = ordered(index)
    s = F.grouped_mm(x[order], m.a_rows.transpose(1, 2), offs=ends).split(R, -1)
    back = torch.argsort(order)
    y = bases(m, x)
    return tuple(
        y[n] + 2 * F.grouped_mm(part.contiguous(), m.b[n].transpose(1, 2), offs=ends)[back]
        for n, part in zip(WIDTHS, s, strict=True)
    )


def grouped_counted(m, x, index):
    order = torch.argsort(index)
    ends = F.one_hot(index, G).sum(0).cumsum(0).to(torch.int32)
    return by_groups(m, x, order, ends)


# --- one adapter after the other ------------------------------------------------------------------


def looped(m, x, index):
    y = bases(m, x)
    for g in range(G):
        rows = x * (index == g).to(x.dtype).unsqueeze(-1)
        for n in WIDTHS:
            y[n] = y[n] + F.linear(F.linear(rows, m.a[n][g]), m.b[n][g])
    return tuple(y.values())


@each
def one_hot(m, x, index, n):
    s = torch.einsum("th,grh->tgr", x, m.a[n])
    s = s * F.one_hot(index, G).to(x.dtype).unsqueeze(-1)
    return torch.einsum("tgr,gwr->tw", s, m.b[n])


def slice_add(m, x, index):
    """Adds deltas in place to the columns of a packed projection."""
    y = F.linear(x, torch.cat([*m.base.values()]))
    first = 0
    for n, width in WIDTHS.items():
        s = torch.einsum("th,trh->tr", x, m.a[n][index])
        y[:, first : first + width] += torch.einsum("tr,twr->tw", s, m.b[n][index])
        first += width
    return y


def in_place(m, x, index):
    y = bases(m, x)
    for n in WIDTHS:
        s = torch.einsum("th,trh->tr", x, m.a[n][index])
        y[n] += torch.einsum("tr,twr->tw", s, m.b[n][index])
    return tuple(y.values())


ROWS_ONCE = (T, H)
SEQUENCES = (3, 4, H)
BY_SEQUENCE = torch.tensor([2, 0, 3])

#: For each name: (step, shape of x, index).
IDIOMS = {
    step.__name__: (step, ROWS_ONCE, ROWS)
    for step in (
        gather_einsum, gather_einsum_scaled, gather_bmm, select_matmul, scaled_between,
        embedded, gathered_rows, taken_along,
        stacked_split, stacked_weights_split, stacked_unbind, stacked_matmul, stacked_single,
        weights_before, grouped, grouped_stacked, grouped_counted, looped, one_hot,
        slice_add, in_place,
    )
}  # fmt: skip
IDIOMS |= {step.__name__: (step, ROWS_ONCE, SOME) for step in (none_where, none_zeros, none_factor)}
IDIOMS |= {
    step.__name__: (step, SEQUENCES, BY_SEQUENCE) for step in (sequences_bmm, sequences_einsum)
}
IDIOMS["sequences_none"] = (sequences_none, SEQUENCES, torch.tensor([2, -1, 3]))
IDIOMS["tokens_of_sequences"] = (tokens_of_sequences, (2, 3, H), ROWS.view(2, 3))


def build(name, dtype=torch.bfloat16):
    step, shape, index = IDIOMS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return Layer(step, dtype).eval(), (x, index.clone())
