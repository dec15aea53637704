"""Structures that real graphs repeat many times, such as pieces of a split, writes, experts and
layers.

function, args = STRUCTURES["unbind"].make(512)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH = 16

#: A function and its arguments.
Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Structure:
    """A repeated structure.

    nodes: the number of graph nodes in one piece.
    make: a function that returns the structure with n pieces.
    """

    nodes: int
    make: Callable[[int], Made]


STRUCTURES: dict[str, Structure] = {}


def structure(nodes: int) -> Callable[[Callable[[int], Made]], Callable[[int], Made]]:
    """Registers a structure whose pieces have this many nodes."""

    def add(make: Callable[[int], Made]) -> Callable[[int], Made]:
        STRUCTURES[make.__name__] = Structure(nodes, make)
        return make

    return add


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


@structure(1)
def unbind(n: int) -> Made:
    return lambda w: torch.stack(w.flatten().unbind(0)), (_rand(n),)


@structure(2)
def split_sums(n: int) -> Made:
    return lambda x: torch.cat([p + 1 for p in x.split(2)]), (_rand(2 * n),)


@structure(2)
def chunk_gated(n: int) -> Made:
    return lambda x: torch.cat([p * 2 for p in x.chunk(n, -1)], -1), (_rand(4, n * 2),)


@structure(1)
def tensor_split(n: int) -> Made:
    return lambda x: torch.stack(x.tensor_split(n, 0)[::-1]), (_rand(n * 2),)


@structure(1)
def selects(n: int) -> Made:
    return lambda x: torch.stack([x[i] for i in range(n)][::-1]), (_rand(n, 4),)


@structure(2)
def slices(n: int) -> Made:
    return lambda x: torch.cat([x[:, i : i + 3].relu() for i in range(n)]), (_rand(2, n + 3),)


@structure(1)
def hstack_slices(n: int) -> Made:
    return lambda x: torch.hstack([x[:, i : i + 3] for i in range(n)]), (_rand(2, n + 3),)


@structure(2)
def setitems(n: int) -> Made:
    def run(x: Tensor, y: Tensor) -> Tensor:
        for i in range(n):
            x[i] = y[i]
        return x.sum()

    return run, (_rand(n, 4), _rand(n, 4))


@structure(2)
def setitems_fresh(n: int) -> Made:
    def run(y: Tensor) -> Tensor:
        x = torch.empty(n, 4)
        for i in range(n):
            x[i : i + 1] = y[i]
        return x + 1

    return run, (_rand(n, 4),)


@structure(4)
def reads_between_writes(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        for i in range(1, n):
            x[i] = x[i - 1] * 0.5
        return x.sum()

    return run, (_rand(n, 4),)


@structure(3)
def in_place_views(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        y = x * 2
        for i in range(n):
            y[i].mul_(2.0)
        return y

    return run, (_rand(n, 4),)


@structure(1)
def in_place_chain(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        y = x * 2
        for _ in range(n):
            y.add_(1.0)
        return y

    return run, (_rand(4, 4),)


@structure(7)
def experts(n: int) -> Made:
    def run(x: Tensor, ids: Tensor, w: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(n):
            h = F.linear(x, w[e])
            out = out + torch.where((ids == e).unsqueeze(-1), h * weights, 0.0)
        return out

    x, ids = _rand(8, WIDTH), torch.randint(0, n, (8,))
    return run, (x, ids, _rand(n, WIDTH, WIDTH), _rand(8, 1))


@structure(9)
def experts_masked(n: int) -> Made:
    def run(x: Tensor, routed: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(n):
            h = F.silu(F.linear(x, gate[e])) * F.linear(x, up[e])
            out += F.linear(h, down[e]) * routed[:, e : e + 1]
        return out

    weights = [_rand(n, WIDTH, WIDTH) for _ in range(3)]
    return run, (_rand(8, WIDTH), _rand(8, n).softmax(-1), *weights)


@structure(8)
def layers(n: int) -> Made:
    def run(x: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for _ in range(n):
            h = F.rms_norm(x, (WIDTH,), norm)
            h = F.linear(F.relu(F.linear(h, up)), down)
            x = x + h
        return x

    parameters = map(torch.nn.Parameter, (_rand(WIDTH), _rand(WIDTH, WIDTH), _rand(WIDTH, WIDTH)))
    return run, (_rand(8, WIDTH), *parameters)


@structure(24)
def attention_layers(n: int) -> Made:
    def run(x: Tensor, w: Tensor, cache: Tensor, pos: Tensor) -> Tensor:
        for i in range(n):
            q, k, v = (t.view(1, 4, 2, 8).transpose(1, 2) for t in F.linear(x, w).split(16, -1))
            cache[0, i].index_copy_(2, pos, k)
            cache[1, i].index_copy_(2, pos, v)
            h = F.scaled_dot_product_attention(q, cache[0, i], cache[1, i])
            x = x + h.transpose(1, 2).reshape(1, 4, 16)
        return x

    w = torch.nn.Parameter(_rand(48, WIDTH))
    return run, (_rand(1, 4, WIDTH), w, _rand(2, n, 1, 2, 32, 8), torch.arange(4))


@structure(1)
def residuals(n: int) -> Made:
    def run(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(n):
            x = x + y
        return x

    return run, (_rand(4, 4), _rand(4, 4))


@structure(4)
def residual_linears(n: int) -> Made:
    def run(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(n):
            x = x + F.linear(x, w)
        return x

    return run, (_rand(4, WIDTH), torch.nn.Parameter(_rand(WIDTH, WIDTH)))


@structure(6)
def adapters(n: int) -> Made:
    def run(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w)
        for i in range(n):
            y = y + F.linear(F.linear(x, a[i]), b[i]) * 0.5
        return y

    w = torch.nn.Parameter(_rand(WIDTH, WIDTH))
    return run, (_rand(4, WIDTH), w, _rand(n, 4, WIDTH), _rand(n, WIDTH, 4))


@structure(7)
def adapters_masked(n: int) -> Made:
    def run(x: Tensor, ids: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w)
        for i in range(n):
            mask = (ids == i).unsqueeze(-1)
            y += F.linear(F.linear(x, a[i]), b[i]) * mask
        return y

    w = torch.nn.Parameter(_rand(WIDTH, WIDTH))
    ids = torch.randint(0, n, (4,))
    return run, (_rand(4, WIDTH), ids, w, _rand(n, 4, WIDTH), _rand(n, WIDTH, 4))


@structure(9)
def heads(n: int) -> Made:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = []
        for i in range(n):
            scores = q[:, i] @ k[:, i].transpose(-1, -2) * 0.25
            found.append(scores.softmax(-1) @ v[:, i])
        return torch.stack(found, 1)

    return run, tuple(_rand(1, n, 4, 8) for _ in range(3))


@structure(4)
def one_hot_where(n: int) -> Made:
    def run(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        for e in range(n):
            x = torch.where(ids == e, table[e], x)
        return x

    return run, (_rand(8, 4), torch.randint(0, n, (8, 1)), _rand(n, 4))


@structure(2)
def growing(n: int) -> Made:
    def run(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(n):
            x = torch.cat([x, y])
        return x

    return run, (_rand(1, 4), _rand(1, 4))


@structure(2)
def nested_views(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        for _ in range(n):
            x = x.view(2, 8).transpose(0, 1).reshape(4, 4)
        return x

    return run, (_rand(4, 4),)


@structure(2)
def window(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        for _ in range(n):
            x = x[1:] + 1
        return x

    return run, (_rand(n + 2, 4),)


@structure(1)
def inputs(n: int) -> Made:
    return lambda *xs: torch.stack(xs), tuple(_rand(4) for _ in range(n))


@structure(3)
def written_inputs(n: int) -> Made:
    def run(y: Tensor, *xs: Tensor) -> Tensor:
        for x in xs:
            x[0:2] = y
        return y + 1

    return run, (_rand(2), *(_rand(4) for _ in range(n)))


def _put_back(x: Tensor, dim: int, step: int) -> Tensor:
    made = torch.empty_like(x)
    for first in range(0, x.shape[dim], step):
        length = min(step, x.shape[dim] - first)
        made.narrow(dim, first, length).copy_(x.narrow(dim, first, length))
    return made


#: Functions that split a tensor along a dimension into pieces of a given length, and join the
#: pieces again.
RESTATED: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "as it is": lambda x, dim, step: x,
    "split": lambda x, dim, step: torch.cat(x.split(step, dim), dim),
    "chunk": lambda x, dim, step: torch.cat(x.chunk(max(1, x.shape[dim] // step), dim), dim),
    "unbind": lambda x, dim, step: torch.stack(x.unbind(dim), dim),
    "select": lambda x, dim, step: torch.stack(
        [x.select(dim, i) for i in range(x.shape[dim])], dim
    ),
    "narrow": lambda x, dim, step: torch.cat(
        [x.narrow(dim, i, min(step, x.shape[dim] - i)) for i in range(0, x.shape[dim], step)], dim
    ),
    "turned round": lambda x, dim, step: torch.cat(x.split(step, dim)[::-1], dim),
    "doubled": lambda x, dim, step: torch.cat([p * 2 for p in x.split(step, dim)], dim) * 0.5,
    "copied": _put_back,
}


class Restated(torch.nn.Module):
    """A layer whose weights, activations and keys are each split and joined again.

    `chosen` has a name of RESTATED, a dimension and a length for each of "w", "x", "k", "v" and
    "up".
    """

    def __init__(self, chosen: dict[str, tuple[str, int, int]], width: int = 64) -> None:
        super().__init__()
        self.chosen = chosen
        shapes = {"w": (3 * width, width), "out": (width, width), "up": (2 * width, width)}
        shapes["down"] = (width, width)
        for name, shape in shapes.items():
            weight = torch.nn.Parameter(_rand(*shape) * width**-0.5)
            setattr(self, name, weight)

    def restated(self, name: str, x: Tensor) -> Tensor:
        how, dim, step = self.chosen[name]
        return RESTATED[how](x, dim, step)

    def forward(self, x: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        tokens, width = x.shape
        h = self.restated("x", x)
        parts = F.linear(h, self.restated("w", self.w)).split(width, -1)
        q, k, v = (part.view(1, tokens, 4, width // 4).transpose(1, 2) for part in parts)
        k_cache.index_copy_(2, positions, self.restated("k", k))
        v_cache.index_copy_(2, positions, self.restated("v", v))
        read = F.scaled_dot_product_attention(q, k_cache, v_cache)
        x = x + F.linear(read.transpose(1, 2).reshape(tokens, width), self.out)
        gate, up = F.linear(x, self.restated("up", self.up)).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)
