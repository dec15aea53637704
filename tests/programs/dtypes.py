"""Programs that apply tensors of every dtype to scores, and breakages that give an operand of a
captured graph another dtype.

An operator promotes its operands, so `add` computes something else for each dtype: a bool mask is
added as zeros and ones, uint8 wraps around, and a tensor without dimensions promotes like a Python
number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from tests.models import quantized
from tests.programs.breakages import (
    _arguments,
    _change,
    at_place,
    calls,
    held,
    new_call,
    places,
    tensors,
)

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
#: The factor of floats that are converted to integers, so that the integers differ.
SPREAD = 3.0

# --- breakages ------------------------------------------------------------------------------------


def converted(graph: fx.Graph, x: fx.Node, dtype: torch.dtype, plain: bool) -> fx.Node:
    """Returns x in another dtype. With `plain`, only casts x, which makes most numbers True or
    0."""
    if not plain and held(x).dtype.is_floating_point and not dtype.is_floating_point:
        if dtype == torch.bool:
            return new_call(graph, "gt", x, 0)
        x = new_call(graph, "mul", x, SPREAD)
    return new_call(graph, "to", x, dtype)


def operand_cast(draw: random.Random, graph: fx.Graph) -> str | None:
    """Gives one operand of one call another dtype. The result may be cast back."""
    node = draw.choice(calls(graph))
    found = [
        place
        for place in places(_arguments(node), lambda item: isinstance(item, fx.Node))
        if isinstance(held(at_place(_arguments(node), place)), torch.Tensor)
    ]
    if not found:
        return None
    place, dtype, plain = draw.choice(found), draw.choice(DTYPES), draw.random() < 0.5
    old = at_place(_arguments(node), place)
    if held(old).dtype == dtype:
        return None
    with graph.inserting_before(node):
        _change(node, place, converted(graph, old, dtype, plain))
    back = draw.random() < 0.5 and _cast_back(graph, node)
    return f"{node.name}: {old} is {dtype}{'' if plain else ', spread'}{', cast back' * back}"


def _cast_back(graph: fx.Graph, node: fx.Node) -> bool:
    """Casts a node's result back for its users to the dtype that it had."""
    if not isinstance(held(node), torch.Tensor):
        return False
    users = list(node.users)
    with graph.inserting_after(node):
        cast = graph.call_method("to", (node, held(node).dtype))
    for user in users:
        user.replace_input_with(node, cast)
    return True


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


#: Calls that accept a tensor instead of a number. For other calls, Dynamo would first read the
#: value of the tensor.
_ARITHMETIC = {
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "eq", "ne", "lt", "le",
    "gt", "ge", "iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div", "div_", "clamp",
    "clamp_", "clamp_min", "clamp_max", "masked_fill", "masked_fill_", "where", "maximum",
    "minimum", "remainder", "floor_divide",
}  # fmt: skip


def number_as_tensor(draw: random.Random, graph: fx.Graph) -> str | None:
    """Replaces a Python number by a tensor of one element, which promotes differently."""

    def is_number(item: Any) -> bool:
        return isinstance(item, (int, float)) and not isinstance(item, bool)

    arithmetic = [n for n in calls(graph) if _name(n) in _ARITHMETIC]
    found = [(n, at) for n in arithmetic for at in places(_arguments(n), is_number)]
    if not found:
        return None
    node, at = draw.choice(found)
    number, dtype = at_place(_arguments(node), at), draw.choice(DTYPES[:10])
    shape = draw.choice(([], [], [1]))
    with graph.inserting_before(node):
        _change(node, at, new_call(graph, torch.full, shape, number, dtype=dtype))
    return f"{node.name}: {number} is a tensor {shape} of {dtype}"


def value_cast(draw: random.Random, graph: fx.Graph) -> str | None:
    """Gives a value another dtype for all its users, or casts it to another dtype and back."""
    node, dtype = draw.choice(tensors(graph)), draw.choice(DTYPES)
    old, users = held(node).dtype, list(node.users)
    if not users or old == dtype:
        return None
    order = {n: i for i, n in enumerate(graph.nodes)}
    back, plain = draw.random() < 0.5, draw.random() < 0.5
    with graph.inserting_before(min(users, key=order.__getitem__)):
        new = converted(graph, node, dtype, plain)
        new = new_call(graph, "to", new, old) if back else new
    for user in users:
        user.replace_input_with(node, new)
    return f"{node.name} is {dtype}{'' if plain else ', spread'}{', and back' * back}"


def input_of_dtype(draw: random.Random, graph: fx.Graph) -> str | None:
    """Gives an input another dtype. `given_as_told` converts the arguments of the program's
    calls."""
    node, dtype = draw.choice(tensors(graph, "placeholder")), draw.choice(DTYPES)
    old = held(node)
    if old.dtype == dtype:
        return None
    new = old.to(dtype)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=False)
    node.meta = {**node.meta, "example_value": new}
    for user in node.users:
        user.meta["told"] = None
    return f"the input {node.name} is {dtype}"


def given_as_told(graph: fx.Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the inputs in the dtypes of the graph's placeholders."""
    told = [held(n) for n in graph.nodes if n.op == "placeholder"]
    return tuple(
        _of_dtype(item, fake.dtype) if isinstance(fake, torch.Tensor) else item
        for item, fake in zip(inputs, told, strict=True)
    )


def _of_dtype(item: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if item.dtype == dtype:
        return item
    if item.dtype.is_floating_point and not dtype.is_floating_point:
        item = item > 0 if dtype == torch.bool else item * SPREAD
    return item.to(dtype)


#: Calls with an argument that names the dtype in which they compute.
_ASKED = ("sum", "cumsum", "softmax", "mean", "prod", "log_softmax", "norm")


def dtype_asked(draw: random.Random, graph: fx.Graph) -> str | None:
    """Makes a reduction or softmax name the dtype in which it computes, or no longer name one."""
    found = [n for n in calls(graph) if _name(n) in _ASKED]
    if not found:
        return None
    node, dtype = draw.choice(found), draw.choice((None, *DTYPES[:10]))
    node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
    if dtype is not None:
        node.kwargs = {**node.kwargs, "dtype": dtype}
    back = draw.random() < 0.5 and _cast_back(graph, node)
    return f"{node.name}: asked for {dtype}{', cast back' * back}"


BREAKAGES: tuple[Callable[[random.Random, fx.Graph], str | None], ...] = (
    operand_cast, operand_cast, operand_cast, operand_cast, value_cast, input_of_dtype,
    input_of_dtype, number_as_tensor, dtype_asked,
)  # fmt: skip

# --- scores and masks -----------------------------------------------------------------------------

B, HEADS, KV_HEADS, S, K, D = 2, 4, 2, 3, 12, 16
HIDDEN = float("-inf")

#: Functions that return a mask [.., S, K] for the positions of queries [S], the places of keys [K],
#: padding [B, K] and numbers.
MASKS: dict[str, Callable[..., torch.Tensor]] = {
    "given": lambda m, p, j, pad: m,
    "turned": lambda m, p, j, pad: ~m,
    "causal": lambda m, p, j, pad: j <= p[:, None],
    "later": lambda m, p, j, pad: j > p[:, None],
    "window": lambda m, p, j, pad: (j <= p[:, None]) & (j > p[:, None] - 4),
    "tril": lambda m, p, j, pad: torch.ones(S, K, dtype=torch.bool).tril(K - S),
    "triu": lambda m, p, j, pad: torch.ones(S, K, dtype=torch.bool).triu(1),
    "padding": lambda m, p, j, pad: pad[:, None, None],
    "padded": lambda m, p, j, pad: pad[:, None, None] & (j <= p[:, None]),
    "rows": lambda m, p, j, pad: torch.ones(K, K, dtype=torch.bool).tril()[p],
    "numbers": lambda m, p, j, pad: torch.where(m, 0.0, HIDDEN),
    "large": lambda m, p, j, pad: torch.where(m, 0.0, -1e4),
    "filled": lambda m, p, j, pad: torch.zeros(S, K).masked_fill(j > p[:, None], HIDDEN),
    "infinite": lambda m, p, j, pad: torch.full((S, K), HIDDEN).triu(1),
    "distance": lambda m, p, j, pad: j - p[:, None],
    "fraction": lambda m, p, j, pad: (j - p[:, None]) / 4,
    "one_less": lambda m, p, j, pad: 1 - m.to(p.dtype),
    "ones": lambda m, p, j, pad: torch.ones(S, K),
}

#: Functions of scores and a mask that return scores.
APPLIED: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda s, m: s + m,
    "added_to": lambda s, m: m + s,
    "torch_add": torch.add,
    "add_twice": lambda s, m: torch.add(s, m, alpha=2),
    "add_": lambda s, m: s.add_(m),
    "iadd": lambda s, m: s.__iadd__(m),
    "sub": lambda s, m: s - m,
    "subtracted_from": lambda s, m: m - s,
    "mul": lambda s, m: s * m,
    "div": lambda s, m: s / (m + 2),
    "where": lambda s, m: torch.where(m, s, HIDDEN),
    "where_large": lambda s, m: torch.where(m, s, -1e9),
    "where_not": lambda s, m: torch.where(m, HIDDEN, s),
    "fill": lambda s, m: s.masked_fill(m, HIDDEN),
    "fill_lowest": lambda s, m: s.masked_fill(m, torch.finfo(s.dtype).min),
    "fill_": lambda s, m: s.masked_fill_(m, HIDDEN),
    "fill_equal": lambda s, m: s.masked_fill(m == 0, HIDDEN),
    "minus_many": lambda s, m: s - 1e9 * (1 - m),
    "times_and_minus": lambda s, m: s * m - 1e4 * (1 - m),
    "plus_many": lambda s, m: s + (1 - m) * -1e4,
    "as_numbers": lambda s, m: s + (1.0 - m.to(s.dtype)) * torch.finfo(s.dtype).min,
    "maximum": torch.maximum,
    "as_they_are": lambda s, m: s,
}


class Scores(nn.Module):
    """Attention in separate operations, with a function applied to its scores.

    m is [B, 1, S, K], positions are [S], and padding is [B, K].
    """

    def __init__(self, **drawn: Any) -> None:
        super().__init__()
        self.drawn = drawn

    def forward(self, q, k, v, m, positions, padding):
        drawn = self.drawn
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        places = torch.arange(K, dtype=drawn["places"])
        mask = MASKS[drawn["mask"]](m, positions, places, padding)
        mask = mask if drawn["cast"] is None else mask.to(drawn["cast"])
        if drawn["product"] == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = self.product(q, k, mask)
        if drawn["softcap"]:
            scores = torch.tanh(scores / 2) * 2
        scores = APPLIED[drawn["applied"]](scores, mask)
        scores = scores * drawn["scaled_after"]
        weights = scores.softmax(-1, dtype=drawn["softmax"])
        return weights.to(v.dtype) @ v

    def product(self, q, k, mask):
        drawn = self.drawn
        if drawn["product"] == "einsum":
            return torch.einsum("bhsd,bhkd->bhsk", q, k) * 0.3
        if drawn["product"] == "baddbmm":
            q, k = q.flatten(0, 1), k.flatten(0, 1)
            mask = mask.expand(B, HEADS, S, K).flatten(0, 1)
            return torch.baddbmm(mask, q, k.mT, alpha=0.3).view(B, HEADS, S, K)
        return q @ k.transpose(2, 3) * 0.3


def scores(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    drawn = {
        "mask": draw.choice(tuple(MASKS)),
        "applied": draw.choice(tuple(APPLIED)),
        "cast": draw.choice((None, None, *DTYPES[:10])),
        "product": draw.choice(("matmul", "matmul", "matmul", "einsum", "baddbmm", "sdpa")),
        "softcap": draw.random() < 0.2,
        "scaled_after": draw.choice((1, 1, 1.0, 0.5, True)),
        "softmax": draw.choice((None, None, None, torch.float32, torch.float64)),
        "places": draw.choice((torch.int64, torch.int64, torch.int32, torch.float32, torch.int8)),
    }
    generator = torch.Generator().manual_seed(draw.randrange(1 << 20))
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    positions = torch.tensor([6, 7, 8])
    padding = torch.ones(B, K, dtype=torch.bool)
    padding[1, 2:5] = False
    mask = (torch.arange(K) <= positions[:, None]) & padding[:, None, None]
    given = draw.choice((None, None, *DTYPES[:10]))
    mask = mask if given is None else mask.to(given)
    positions = positions.to(draw.choice((torch.int64, torch.int64, torch.int32, torch.int16)))
    padding = padding if draw.random() < 0.7 else padding.to(draw.choice(DTYPES[:10]))
    args = (
        normal(B, HEADS, S, D), normal(B, KV_HEADS, K, D), normal(B, KV_HEADS, K, D), mask,
        positions, padding,
    )  # fmt: skip
    return Scores(**drawn), args, f"scores {drawn} {dtype} {given}"


# --- quantised weights ----------------------------------------------------------------------------


class Coded(nn.Module):
    """Computes K and V by linears with coded weights, and writes them to a cache."""

    def __init__(self, form: Callable[..., Any], bias: bool) -> None:
        super().__init__()
        self.k, self.v = (quantized.QuantizedLinear(form, 64, 64, i, bias) for i in range(2))

    def forward(self, x, slots, keys, values):
        for cache, project in ((keys, self.k), (values, self.v)):
            cache[slots] = project(x).view(-1, 2, 32)
        return keys[slots] + values[slots]


def coded(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    form, bias = draw.choice(tuple(quantized.STORED)), draw.random() < 0.3
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if bias else draw.choice((torch.bfloat16, torch.float16, torch.float32))
    x = torch.randn(4, 64, generator=generator).to(dtype)
    caches = [torch.zeros(8, 2, 32, dtype=dtype) for _ in range(2)]
    return Coded(form, bias), (x, torch.tensor([2, 5, 1, 7]), *caches), f"{form.__name__} {dtype}"
