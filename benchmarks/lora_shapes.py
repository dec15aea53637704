"""Defines the dims, inputs and timing that the LoRA benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import capture, interleaved_us

from tilewright.ops.contract import LoweringReport

# The argument sets of a graph together must exceed the L2 cache (60 MB).
COLD_BYTES = 200e6
MOST_CALLS = 60
FLUSH_BYTES = 2**28
Variants = dict[str, Callable[[int], Any]]


@dataclass(frozen=True)
class LoraShape:
    """The sizes of one batch. Its tokens have `hidden` columns, and each has one of `adapters`
    adapters.

    All adapters have the same rank, and q, k and v have `widths` columns. `routing` is "uniform" or
    "skewed" (Zipf: the odds of adapter i are 1 / (i + 1)). `apart` says whether the weights of q, k
    and v are separate tensors instead of one stack.
    """

    hidden: int
    rank: int
    adapters: int
    tokens: int
    routing: str = "uniform"
    widths: tuple[int, int, int] = (4096, 1024, 1024)
    apart: bool = False

    def __str__(self) -> str:
        more = (" skewed" if self.routing == "skewed" else "") + (" apart" if self.apart else "")
        return f"K={self.hidden} r={self.rank} G={self.adapters} T={self.tokens}{more}"


@dataclass(frozen=True)
class LoraSet:
    """One set of arguments.

    x: [T, hidden].
    weights: [G, 3 * rank, hidden].
    ids: [T], the adapter of each token, sorted.
    offsets: [G + 1], the first token of each adapter.
    order: [T], a permutation of the tokens, so that ids[order] are unsorted.
    b, bases: [G, width, rank] and [T, width] for q, k and v; empty unless they are requested.
    parts: copies of the weights of q, k and v, [G, rank, hidden] each; empty unless they are
        separate.
    """

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor
    b: tuple[torch.Tensor, ...] = ()
    bases: tuple[torch.Tensor, ...] = ()
    parts: tuple[torch.Tensor, ...] = ()

    @property
    def active(self) -> int:
        return int((self.offsets.diff() > 0).sum())


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(scale).to(torch.bfloat16)


def make_set(shape: LoraShape, *, expand: bool = False) -> LoraSet:
    """Returns a set of random inputs, with a random adapter for each token."""
    odds = torch.ones(shape.adapters, device="cuda")
    if shape.routing == "skewed":
        odds = 1 / torch.arange(1, shape.adapters + 1, device="cuda")
    ids = torch.multinomial(odds, shape.tokens, replacement=True).sort().values
    counts = torch.bincount(ids, minlength=shape.adapters)
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
    wide, narrow = shape.hidden**-0.5, shape.rank**-0.5
    b = bases = ()
    if expand:
        b = tuple(normal(shape.adapters, w, shape.rank, scale=narrow) for w in shape.widths)
        bases = tuple(normal(shape.tokens, w) for w in shape.widths)
    x = normal(shape.tokens, shape.hidden)
    weights = normal(shape.adapters, 3 * shape.rank, shape.hidden, scale=wide)
    parts = tuple(part.clone() for part in weights.chunk(3, 1)) if shape.apart else ()
    order = torch.randperm(shape.tokens, device="cuda")
    return LoraSet(x, weights, ids.to(torch.int32), offsets, order, b, bases, parts)


def make_sets(shape: LoraShape, *, expand: bool = False, most: int = 500) -> list[LoraSet]:
    """Returns as many sets as keep the L2 cache cold, up to `most`.

    The number depends on the bytes that a call reads and writes.
    """
    active = min(shape.adapters, shape.tokens)
    touched = 2 * shape.hidden * (shape.tokens + 3 * shape.rank * active)
    if expand:
        touched = 2 * sum(shape.widths) * (2 * shape.tokens + shape.rank * active)
    count = max(10, -(-int(COLD_BYTES) // touched)) if shape.tokens < 2048 else 4
    return [make_set(shape, expand=expand) for _ in range(min(count, most))]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def timed(variants: Variants, count: int) -> dict[str, float]:
    """Returns the microseconds of each variant. The L2 cache is flushed before every replay."""
    flushed = torch.empty(FLUSH_BYTES // 4, device="cuda")
    graphs = {
        name: capture([lambda i=i, v=variant: v(i) for i in range(count)], warmup=1)
        for name, variant in variants.items()
    }
    return interleaved_us(graphs, count, rounds=7, replays=1, before_round=flushed.zero_)


def chosen(*reports: LoweringReport) -> dict[str, str]:
    return {
        "lowering": ", ".join(report.name for report in reports),
        "kernel": ", ".join(report.reason for report in reports),
    }
