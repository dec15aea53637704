"""Small faithful mixtures of experts on `torch._grouped_mm`, with every spelling of the routing.

    module, args = build("histc")                          # one of IDIOMS
    module, args = build("histc", layout="interleaved")    # any MoeAxes field changed

The arguments are (x [T, H],). The router is a linear inside the model. The same name gives the same
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from tests.experts import dequantized
from tests.models import moe_dequant
from tilewright.ops.formats.expert_weight import ExpertWeight


@dataclass(frozen=True)
class MoeAxes:
    """The variants of a model.

    gemm: "grouped" sorts routes by expert; "batched" gathers a weight for each route, and "einsum"
        gathers one for each token and slot, both without sorting.
    ends, rows, order, combine: keys of ENDS, ROWS, ORDERS and COMBINES.
    layout: "halves", "interleaved" or "separate".
    stored: "NK" for [E, N, K], or "KN" for [E, K, N].
    weigh: "sorted" (rows times expert_weights[order]) or "tokens" (after the rows are back in
        order).
    quantised, quantised_down: a spelling in moe_dequant.SPELLINGS for the experts' weights, or ""
        for dense weights.
    elsewhere: the number of experts on other devices, which the router may choose, too. Their
        numbers begin at num_experts, and their rows are masked, as in Hugging Face's expert
        parallelism.
    """

    ends: str = "histc"
    rows: str = "divide"
    order: str = "sort"
    combine: str = "inverse_setitem"
    gemm: str = "grouped"
    layout: str = "halves"
    stored: str = "NK"
    activation: str = "silu"
    weigh: str = "sorted"
    bias: bool = False
    quantised: str = ""
    quantised_down: str | None = None
    num_tokens: int = 14
    hidden: int = 64
    inner: int = 32
    num_experts: int = 8
    num_slots: int = 2
    elsewhere: int = 0
    dtype: torch.dtype = torch.bfloat16


def histc(ids, ids_sorted, n):
    return torch.histc(ids_sorted.float(), bins=n, min=0, max=n - 1).cumsum(0, dtype=torch.int32)


def one_hot(ids, ids_sorted, n):
    return F.one_hot(ids, n).sum(0).cumsum(0).to(torch.int32)


def searched(ids, ids_sorted, n):
    experts = torch.arange(n, device=ids.device)
    return torch.searchsorted(ids_sorted, experts, right=True).to(torch.int32)


def scattered(ids, ids_sorted, n):
    counts = torch.zeros(n, dtype=torch.int32, device=ids.device)
    counts = counts.scatter_add(0, ids, torch.ones_like(ids, dtype=torch.int32))
    return counts.cumsum(0, dtype=torch.int32)


def scattered_in_place(ids, ids_sorted, n):
    counts = torch.zeros(n, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    return counts.cumsum(0, dtype=torch.int32)


def compared(ids, ids_sorted, n):
    hits = ids[:, None] == torch.arange(n, device=ids.device)[None, :]
    return hits.sum(0).cumsum(0).to(torch.int32)


def compared_with_a_row(ids, ids_sorted, n):
    hits = ids[:, None] == torch.arange(n, device=ids.device)
    return hits.float().sum(0).cumsum(0).to(torch.int32)


_COUNTS = (histc, one_hot, searched, scattered, scattered_in_place, compared, compared_with_a_row)
ENDS = {f.__name__: f for f in _COUNTS}


def sort(ids):
    return ids.sort()


def sort_stable(ids):
    return torch.sort(ids, stable=True)


def argsort(ids):
    order = ids.argsort()
    return ids[order], order


ORDERS = {f.__name__: f for f in (sort, sort_stable, argsort)}


def divide(order, tokens, slots):
    return order // slots


def div_floor(order, tokens, slots):
    return torch.div(order, slots, rounding_mode="floor")


def repeated(order, tokens, slots):
    return torch.arange(tokens, device=order.device).repeat_interleave(slots)[order]


def expanded(order, tokens, slots):
    return torch.arange(tokens, device=order.device)[:, None].expand(-1, slots).reshape(-1)[order]


ROWS = {f.__name__: f for f in (divide, div_floor, repeated, expanded)}


def inverse_setitem(y, order, rows, shape):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return y[inverse].view(*shape, -1)


def inverse_argsort(y, order, rows, shape):
    return y[order.argsort()].view(*shape, -1)


def stored(y, order, rows, shape):
    out = torch.empty_like(y)
    out[order] = y
    return out.view(*shape, -1)


def index_add(y, order, rows, shape):
    return torch.zeros(shape[0], y.shape[1], dtype=y.dtype, device=y.device).index_add(0, rows, y)


def index_add_(y, order, rows, shape):
    return torch.zeros(shape[0], y.shape[1], dtype=y.dtype, device=y.device).index_add_(0, rows, y)


def scatter_add(y, order, rows, shape):
    out = torch.zeros(shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    return out.scatter_add(0, rows[:, None].expand(-1, y.shape[1]), y)


COMBINES = {
    f.__name__: f
    for f in (inverse_setitem, inverse_argsort, stored, index_add, index_add_, scatter_add)
}


def clamped_swiglu(gate, up):
    gate, up = gate.clamp(max=1.0), up.clamp(min=-1.0, max=1.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


ACTIVATIONS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "up_first": lambda gate, up: up * F.silu(gate),
    "sigmoid": lambda gate, up: gate * torch.sigmoid(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "wide": lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype),
    "clamped": clamped_swiglu,
}


SPLITS = {
    "halves": lambda both: both.chunk(2, dim=-1),
    "interleaved": lambda both: (both[..., 0::2], both[..., 1::2]),
    "separate": None,
}


class Coded(nn.Module):
    """A weight [E, N, K] of codes, which is dequantised in each call."""

    def __init__(self, spelling: str, shape: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.format, self.decode = moe_dequant.SPELLINGS[spelling]
        for name, tensor in zip(
            ("codes", "scales", "factor"), moe_dequant.stored(self.format, seed, shape), strict=True
        ):
            self.register_buffer(name, tensor)

    def forward(self):
        return self.decode(self.codes, self.scales, self.factor)

    def exact(self):
        """Returns the weight in float64, by the definition of its format."""
        block = moe_dequant.FP8_BLOCK if self.format == "fp8" else (1, 32)
        weight = ExpertWeight(self.codes, self.format, self.scales, block)
        values = dequantized(weight, torch.float64)
        scaled = self.decode.__name__ == "nvfp4_table"
        return values * self.factor.double()[:, None, None] if scaled else values


class Moe(nn.Module):
    def __init__(self, axes: MoeAxes) -> None:
        super().__init__()
        self.axes = axes
        # Each step is a separate function, so that a test can replace one.
        self.ends_of = self.weight_of = self.rows_of = lambda x: x
        self.weights_of = lambda weights, order: weights[order]
        self.activation = ACTIVATIONS[axes.activation]
        self.combine = COMBINES[axes.combine]
        self.split = SPLITS[axes.layout]
        self.reduce = lambda out: out.sum(1) if out.dim() == 3 else out
        self.sum_slots = lambda y, weights: torch.einsum("tsh,ts->th", y, weights)
        self.escape = False
        experts, hidden, inner = axes.num_experts, axes.hidden, axes.inner
        self.router = nn.Linear(hidden, experts + axes.elsewhere, bias=False)
        self.mask_of = lambda ids: (ids >= experts)[:, None]
        self.clamp = lambda ids: ids.clamp_(max=experts - 1)
        if axes.layout == "separate":
            self.gate = self.weight(experts, inner, hidden)
            self.up = self.weight(experts, inner, hidden)
        else:
            self.gate_up = self.weight(experts, 2 * inner, hidden)
        down = axes.quantised if axes.quantised_down is None else axes.quantised_down
        self.down = self.weight(experts, hidden, inner, down)
        if axes.bias:
            self.gate_up_bias = nn.Parameter(torch.zeros(experts, 2 * inner))
            self.down_bias = nn.Parameter(torch.zeros(experts, hidden))

    def weight(self, experts, rows, columns, quantised=None):
        quantised = self.axes.quantised if quantised is None else quantised
        if quantised:
            return Coded(quantised, (experts, rows, columns), seed=rows + columns)
        shape = (rows, columns) if self.axes.stored == "NK" else (columns, rows)
        return nn.Parameter(torch.empty(experts, *shape))

    def multiply(self, x, weight, ends):
        weight = self.weight_of(weight() if isinstance(weight, Coded) else weight)
        weight = weight.transpose(1, 2) if self.axes.stored == "NK" else weight
        return torch._grouped_mm(x, weight, offs=ends)

    def forward(self, x):
        axes = self.axes
        scores = self.router(x).float().softmax(-1)
        weights, ids = scores.topk(axes.num_slots, -1)
        shape, flat = ids.shape, ids.reshape(-1)
        if axes.gemm == "batched":
            flat = flat.clamp(0, axes.num_experts - 1) if axes.elsewhere else flat
            return self.batched(x, flat, weights)
        if axes.gemm == "einsum":
            return self.by_slot(x, ids, weights)
        ids_sorted, order = ORDERS[axes.order](flat)
        counted = self.ends_of(flat)
        counted_sorted = ids_sorted if counted is flat else counted.sort()[0]
        ends = ENDS[axes.ends](counted, counted_sorted, axes.num_experts)
        rows = self.rows_of(ROWS[axes.rows](order, *shape))
        picked, mask = x[rows], None
        if axes.elsewhere:
            mask = self.mask_of(ids_sorted)
            ids_sorted = self.clamp(ids_sorted)
            picked = picked if mask is None else picked.masked_fill_(mask, 0.0)
        gate, up = self.projected(picked, ends, ids_sorted, mask)
        y = self.multiply(self.activation(gate, up), self.down, ends)
        if axes.bias:
            y = y + self.down_bias[ids_sorted]
        y = y if mask is None else y.masked_fill(mask, 0.0)
        if axes.weigh == "sorted":
            y = y * self.weights_of(weights.reshape(-1), order)[:, None]
            out = self.combine(y, order, rows, shape)
        else:
            out = self.combine(y, order, rows, shape) * weights[..., None]
        out = self.reduce(out).to(x.dtype)
        return (out, gate) if self.escape else out

    def batched(self, x, ids, weights):
        rows = x.repeat_interleave(self.axes.num_slots, dim=0)
        both = self.multiply_each(rows, self.gate_up, ids)
        if self.axes.bias:
            both = both + self.gate_up_bias[ids]
        y = self.multiply_each(self.activation(*self.split(both)), self.down, ids)
        if self.axes.bias:
            y = y + self.down_bias[ids]
        y = y.view(*weights.shape, -1) * weights[..., None]
        return y.sum(1).to(x.dtype)

    def multiply_each(self, x, weight, ids):
        weight = self.weight_of(weight() if isinstance(weight, Coded) else weight)[ids]
        if self.axes.stored == "NK":
            return torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(x.unsqueeze(1), weight).squeeze(1)

    def by_slot(self, x, ids, weights):
        stored = "tsnk" if self.axes.stored == "NK" else "tskn"
        both = torch.einsum(f"tk,{stored}->tsn", x, self.gate_up[ids])
        if self.axes.bias:
            both = both + self.gate_up_bias[ids]
        y = torch.einsum(f"tsk,{stored}->tsn", self.activation(*self.split(both)), self.down[ids])
        if self.axes.bias:
            y = y + self.down_bias[ids]
        return self.sum_slots(y, weights.to(y.dtype))

    def projected(self, x, ends, ids_sorted, mask):
        if self.axes.layout == "separate":
            return self.multiply(x, self.gate, ends), self.multiply(x, self.up, ends)
        both = self.multiply(x, self.gate_up, ends)
        if self.axes.bias:
            both = both + self.gate_up_bias[ids_sorted]
        return self.split(both if mask is None else both.masked_fill(mask, 0.0))


IDIOMS: dict[str, dict] = {"plain": {}}
IDIOMS |= {f"ends_{name}": {"ends": name} for name in ENDS}
IDIOMS |= {f"order_{name}": {"order": name} for name in ORDERS}
IDIOMS |= {f"rows_{name}": {"rows": name} for name in ROWS}
IDIOMS |= {f"combine_{name}": {"combine": name} for name in COMBINES}
IDIOMS |= {f"activation_{name}": {"activation": name} for name in ACTIVATIONS}
IDIOMS |= {
    "interleaved": {"layout": "interleaved", "activation": "clamped", "bias": True},
    "separate": {"layout": "separate"},
    "stored_KN": {"stored": "KN", "layout": "interleaved"},
    "weigh_tokens": {"weigh": "tokens"},
    "bias": {"bias": True},
    "argsort_bias": {"order": "argsort", "bias": True},
    "elsewhere": {"elsewhere": 3},
    "elsewhere_bias": {"elsewhere": 3, "bias": True, "weigh": "tokens"},
    "elsewhere_batched_bias": {"elsewhere": 3, "bias": True, "gemm": "batched"},
    "one_slot": {"num_slots": 1},
    "one_token": {"num_tokens": 1},
    "batched": {"gemm": "batched"},
    "batched_KN_bias": {
        "gemm": "batched", "stored": "KN", "bias": True, "layout": "interleaved",
        "activation": "clamped",
    },
}  # fmt: skip
IDIOMS |= {
    f"quantised_{name}": {"quantised": name, "inner": 64}
    for name in ("nvfp4_table", "mxfp4_ldexp", "fp8_blocks", "int4_groups")
}
IDIOMS |= {
    "batched_one_route": {"gemm": "batched", "num_tokens": 1, "num_slots": 1},
    "einsum": {"gemm": "einsum"},
    "einsum_KN_bias": {
        "gemm": "einsum", "stored": "KN", "bias": True, "layout": "interleaved",
        "activation": "clamped",
    },
    "einsum_one_token": {"gemm": "einsum", "num_tokens": 1},
    "einsum_one_slot": {"gemm": "einsum", "num_slots": 1},
    "quantised_interleaved": {
        "quantised": "mxfp4_ldexp", "inner": 64, "layout": "interleaved", "activation": "clamped",
        "bias": True,
    },
    "quantised_separate": {"quantised": "fp8_blocks", "inner": 64, "layout": "separate"},
    "quantised_batched": {"quantised": "nvfp4_table", "inner": 64, "gemm": "batched"},
}  # fmt: skip

#: One name for each distinct module. Several idioms are the same module as "plain".
MODULES = list({MoeAxes(**axes): name for name, axes in reversed(IDIOMS.items())}.values())


def bincount(ids, ids_sorted, n):
    return torch.bincount(ids, minlength=n).cumsum(0).to(torch.int32)


def bincount_cut(ids, ids_sorted, n):
    return torch.bincount(ids, None, n)[:n].cumsum(0).to(torch.int32)


# The shapes of these forms depend on data. They are one graph only with
# capture_dynamic_output_shape_ops.
ENDS |= {f.__name__: f for f in (bincount, bincount_cut)}


def build(name, **changes):
    """Returns (module, args) of an idiom. `changes` are fields of MoeAxes."""
    axes = replace(MoeAxes(), **{**IDIOMS[name], **changes})
    module = Moe(axes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if parameter.dim() == 2 else axes.hidden**-0.5
            parameter.data = (spread * scale).to(axes.dtype)
            parameter.requires_grad_(False)
    x = torch.randn(axes.num_tokens, axes.hidden, generator=generator).to(axes.dtype)
    return module.eval(), (x,)


def exact(module, x):
    """Computes the module's result in float64, one expert after the other."""
    axes = module.axes
    wide = {name: p.double() for name, p in module.named_parameters()}
    wide |= {n: m.exact() for n, m in module.named_children() if isinstance(m, Coded)}
    # The experts are the ones that the module itself chooses, because the choice is discrete.
    weights, ids = module.router(x).float().softmax(-1).topk(axes.num_slots, -1)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for s in range(axes.num_slots):
            e = int(ids[t, s])
            if e >= axes.num_experts and axes.gemm == "grouped":
                continue
            e = min(e, axes.num_experts - 1)
            gate, up = _halves(axes, wide, x[t].double(), e)
            h = ACTIVATIONS[axes.activation](gate, up)
            y = _times(axes, wide["down"][e], h)
            if axes.bias:
                y = y + wide["down_bias"][e]
            out[t] += weights[t, s].double() * y
    return out


def _times(axes, weight, x):
    return weight @ x if axes.stored == "NK" else x @ weight


def _halves(axes, wide, x, e):
    if axes.layout == "separate":
        return _times(axes, wide["gate"][e], x), _times(axes, wide["up"][e], x)
    both = _times(axes, wide["gate_up"][e], x)
    if axes.bias:
        both = both + wide["gate_up_bias"][e]
    return (both[0::2], both[1::2]) if axes.layout == "interleaved" else both.chunk(2)
