"""Models that are almost adapters of q, k and v. The part that each model changes must not be
fused.

module, args, expected = build_bent("scaled_columns")
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tests.models.lora_idioms import ROWS, WIDTHS, G, H, Layer, R, T, each


class Expected(NamedTuple):
    """The expected number of fused sites, and the expected codes of misses."""

    sites: int
    codes: tuple[str, ...] = ()


def delta(m, x, index, n, b_index=None):
    s = torch.einsum("th,trh->tr", x, m.a[n][index])
    return torch.einsum("tr,twr->tw", s, m.b[n][index if b_index is None else b_index])


def base(m, x, n):
    return F.linear(x, m.base[n])


BENT: dict = {}


def bent(sites, *codes):
    def add(step):
        BENT[step.__name__] = (step, Expected(sites, codes))
        return step

    return add


@bent(2)
def another_activation(m, x, index):
    """The adapter of k reads another tensor than the adapters of q and v, so it needs a shrink of
    its own."""
    xs = {"q": x, "k": x.sin(), "v": x}
    return tuple(base(m, x, n) + delta(m, xs[n], index, n) for n in WIDTHS)


@bent(2)
def another_index(m, x, index):
    at = {"q": index, "k": index, "v": index.flip(0)}
    return tuple(base(m, x, n) + delta(m, x, at[n], n) for n in WIDTHS)


@bent(0, "LORA_FORM")
@each
def two_indices(m, x, index, n):
    """Uses different adapters for A and for B."""
    return delta(m, x, index, n, index.flip(0))


@bent(0, "LORA_FORM")
@each
def more_in_one_table(m, x, index, n):
    """Has an adapter in A that B lacks."""
    at = index % (G - 1)
    s = torch.einsum("th,trh->tr", x, m.a[n][at])
    return torch.einsum("tr,twr->tw", s, m.b[n][: G - 1][at])


@bent(0, "LORA_FORM")
@each
def scale_of_another(m, x, index, n):
    return delta(m, x, index, n) * m.scales[index.flip(0)][:, None]


@bent(0, "LORA_FORM")
@each
def gated(m, x, index, n):
    """Multiplies the delta by a gate that is computed from the activation."""
    return delta(m, x, index, n) * x.mean(-1, keepdim=True).sigmoid()


@bent(0, "LORA_FORM")
@each
def scaled_twice(m, x, index, n):
    scale = m.scales[index][:, None]
    return delta(m, x, index, n) * scale * scale


@bent(0, "EXPERT_ACTIVATION", "LORA_FORM")
@each
def scaled_before_and_after(m, x, index, n):
    """Applies the adapter's factor twice: between A and B, and to the delta."""
    scale = m.scales[index][:, None]
    s = torch.einsum("th,trh->tr", x, m.a[n][index]) * scale
    return torch.einsum("tr,twr->tw", s, m.b[n][index]) * scale


@bent(0, "EXPERT_ACTIVATION", "LORA_FORM")
@each
def masked_before_and_after(m, x, index, n):
    """Masks rows without an adapter twice: between A and B, and in the delta by another mask."""
    s = torch.einsum("th,trh->tr", x, m.a[n][index]) * (index != 0)[:, None]
    return torch.einsum("tr,twr->tw", s, m.b[n][index]) * (index != 1)[:, None]


@bent(0, "EXPERT_COMBINE")
@each
def nonlinear(m, x, index, n):
    s = torch.einsum("th,trh->tr", x, m.a[n][index]).relu()
    return torch.einsum("tr,twr->tw", s, m.b[n][index])


@bent(0, "LORA_FORM")
@each
def shifted(m, x, index, n):
    return delta(m, x, index, n) + 0.5


@bent(0)
def after_rotation(m, x, index):
    """Adds the delta after the rotation. It is still fused, with q and k as their own bases."""
    return tuple(base(m, x, n).sin() * torch.tanh(delta(m, x, index, n)) for n in WIDTHS)


@bent(1)
def onto_what_is_rotated(m, x, index):
    """Adds the delta to the rotated value, which is then its base."""
    return tuple(base(m, x, n).sin() + delta(m, x, index, n) for n in WIDTHS)


@bent(0, "ESCAPES")
def read_elsewhere(m, x, index):
    found = delta(m, x, index, "q")
    return base(m, x, "q") + found, found * 3


@bent(0, "ESCAPES")
def shrunk_read_elsewhere(m, x, index):
    s = torch.einsum("th,trh->tr", x, m.a["q"][index])
    return base(m, x, "q") + torch.einsum("tr,twr->tw", s, m.b["q"][index]), s


@bent(1)
def table_read_elsewhere(m, x, index):
    """Selects rows of a table that another value reads, too, so that they stay in the graph."""
    table = m.a["q"][index]
    s = torch.einsum("th,trh->tr", x, table)
    return base(m, x, "q") + torch.einsum("tr,twr->tw", s, m.b["q"][index]), table.sum(-1)


@bent(0)
def some_rows(m, x, index):
    y = base(m, x, "q")
    return torch.cat((y[:2], y[2:] * 2 - delta(m, x[2:], index[2:], "q")))


@bent(1)
def first_rows_alone(m, x, index):
    y = base(m, x, "q")
    return torch.cat((y[:2] + delta(m, x[:2], index[:2], "q"), y[2:]))


@bent(0, "LORA_FORM")
def rows_in_another_order(m, x, index):
    return base(m, x, "q") + delta(m, x, index, "q").flip(0)


@bent(0)
def subtracted(m, x, index):
    return base(m, x, "q") - delta(m, x, index, "q")


@bent(0, "LORA_FORM")
def added_with_alpha(m, x, index):
    return torch.add(base(m, x, "q"), delta(m, x, index, "q"), alpha=2)


@bent(0)
def wide(m, x, index):
    """Has a rank as large as the outer sizes, which makes a product of two matrices and not an
    adapter."""
    inner = F.linear(x, m.base["q"])
    return base(m, x, "k") + F.linear(inner, m.base["k"])


@bent(0, "LORA_FORM")
def scaled_columns(m, x, index):
    """Scales the columns of a delta that has as many rows as columns."""
    rows, at = x.repeat(11, 1)[:64], index.repeat(11)[:64]
    return base(m, rows, "q") + delta(m, rows, at, "q") * m.scales[at]


@bent(0, "LORA_FORM")
def mask_of_columns(m, x, index):
    rows, at = x.repeat(11, 1)[:64], index.repeat(11)[:64]
    return base(m, rows, "q") + torch.where(at > 1, delta(m, rows, at, "q"), 0.0)


@bent(0, "LORA_FORM")
def other_value_where_masked(m, x, index):
    return base(m, x, "q") + torch.where((index > 1)[:, None], delta(m, x, index, "q"), 1.0)


@bent(0, "LORA_FORM")
def square_transposed(m, x, index):
    """Has a square B, and exchanges the dimensions of the result."""
    rows, at = x.repeat(11, 1)[:64], index.repeat(11)[:64]
    return base(m, rows, "q") + delta(m, rows, at, "q").T


@bent(0, "LORA_FORM")
def sequences_exchanged(m, x, index):
    """Orders rows by sequence for A, and by position for B."""
    x = torch.stack([x[:4], x[1:5], x[2:], x[:4] * 2])
    at = index[:4]
    s = torch.bmm(x, m.a["q"][at].mT)
    return base(m, x, "q") + torch.bmm(s.transpose(0, 1), m.b["q"][at].mT)


@bent(1)
def weight_changed_before(m, x, index):
    """Changes the activation after the adapters have read it and before the projections do."""
    x = x * 1.5
    y = base(m, x, "q") + delta(m, x, index, "q")
    x.mul_(2)
    return y, x


@bent(0, "INPUT_MUTATED")
def activation_changed_between(m, x, index):
    """Changes the activation in place. The change is read through another view, so it must stay in
    place."""
    x = x * 1.5
    name = x.view(-1)
    found = delta(m, x, index, "q")
    y = base(m, x, "q")
    x.mul_(2)
    return y + found, name


@bent(1)
def activation_changed_for_itself(m, x, index):
    x = x * 1.5
    found = delta(m, x, index, "q")
    y = base(m, x, "q")
    x.mul_(2)
    return y + found, x


@bent(0, "INPUT_MUTATED")
def index_changed_between(m, x, index):
    index = index * 1
    name = index[:2]
    found = delta(m, x, index, "q")
    y = base(m, x, "q")
    index.zero_()
    return y + found, index, name


@bent(0)
def dropped_out(m, x, index):
    """Applies dropout in train mode before A, with seeded random numbers."""
    torch.manual_seed(3)
    dropped = F.dropout(x, 0.5, training=True)
    s = torch.einsum("th,trh->tr", dropped, m.a["q"][index]).tanh()
    return base(m, x, "q") + s @ m.b["q"][0].T


def by_all(m, x, weights, n):
    """Applies all adapters to every row, with weights [T, G] before B."""
    s = torch.einsum("th,grh->tgr", x, m.a[n]) * weights.to(x.dtype).unsqueeze(-1)
    return torch.einsum("tgr,gwr->tw", s, m.b[n])


@bent(0, "LORA_FORM")
@each
def mixed(m, x, index, n):
    """Applies a mixture of all adapters instead of one."""
    return by_all(m, x, x[:, :G].softmax(-1), n)


@bent(1)
def index_cut_to_a_byte(m, x, index):
    """Selects adapters by their numbers modulo 256."""
    cut = (index + 256).to(torch.int8).long()
    return tuple(base(m, x, n) + delta(m, x, cut, n) for n in WIDTHS)


def build_bent(name):
    step, expected = BENT[name]
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    return Layer(step, torch.float32).eval(), (x, ROWS.clone()), expected


assert R < H
