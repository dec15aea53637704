"""Defines attention dims, inputs and the timing of long calls, which the QKV benchmarks share."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from timing import interleaved_us

from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.qkv.arguments import FusedQkvArguments

PAGE_SIZE = 16
STATIC_LENGTH = 2048
# The argument sets of a graph together must exceed the L2 cache (60 MB).
COLD_BYTES = 250e6
# Without a GPU, inputs are meta tensors, for which kernels can be planned.
DEVICE = "cuda" if torch.cuda.is_available() else "meta"
REST_S = 0.03


@dataclass(frozen=True)
class Shape:
    """The sizes of one model's projections.

    norm: whether q and k are normalised.
    bias: whether all three projections have a bias.
    """

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    norm: bool = False
    bias: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 * self.hidden * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def argument_sets(self, num_tokens: int) -> int:
        """Returns the number of sets of weights and activations that keeps the L2 cache cold."""
        per_set = self.weight_bytes + 2 * num_tokens * self.hidden
        return max(2, -(-int(COLD_BYTES) // per_set))

    def calls_per_graph(self, num_tokens: int) -> int:
        """Returns the number of calls in one captured graph, summed over all argument sets."""
        return max(self.argument_sets(num_tokens), 10 if num_tokens < 2048 else 2)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(scale).to(torch.bfloat16)


@dataclass(frozen=True)
class Layer:
    """Input, weights [H * D, hidden], norms, biases [H, D] and rope tables of one layer."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    norms: tuple[torch.Tensor, torch.Tensor] | None
    cos: torch.Tensor
    sin: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


def make_layer(shape: Shape, num_tokens: int, packed: bool = False) -> Layer:
    """Returns a layer with random weights, which are three tensors or, if `packed`, slices of one
    tensor."""
    dim, scale = shape.head_dim, shape.hidden**-0.5
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    if packed:
        rows = [h * dim for h in heads]
        weights = normal(sum(rows), shape.hidden, scale=scale).split(rows)
    else:
        weights = [normal(h * dim, shape.hidden, scale=scale) for h in heads]
    norms = (normal(dim), normal(dim)) if shape.norm else None
    angles = torch.randn(num_tokens, dim // 2, device=DEVICE).repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    biases = tuple(normal(h, dim) for h in heads) if shape.bias else None
    return Layer(normal(num_tokens, shape.hidden), tuple(weights), norms, cos, sin, biases)


@dataclass(frozen=True)
class Cache:
    """The K and V caches, and the slots of the step's tokens.

    A paged cache is [pages, PAGE_SIZE, Hkv, D] with flat slots. A static cache is [batch, Hkv,
    STATIC_LENGTH, D], and its slots are positions that all sequences write.
    """

    layout: str
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor

    @property
    def window(self) -> CacheWindow:
        if self.layout == "paged":
            return CacheWindow.page_major(self.keys)
        return CacheWindow.static_cache(self.keys)


def paged_cache(shape: Shape, gib_each: float = 1.0) -> Cache:
    row = PAGE_SIZE * shape.num_kv_heads * shape.head_dim
    pages = int(gib_each * 2**30) // (2 * row)
    keys, values = (normal(pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    return Cache("paged", keys, values, torch.randperm(pages * PAGE_SIZE, device=DEVICE))


def static_cache(shape: Shape, num_tokens: int) -> Cache:
    """Returns a cache for a decode step of up to 256 tokens, or for a prefill of 1024 tokens each.

    A decode step has one sequence for each token.
    """
    batch = num_tokens if num_tokens <= 256 else max(num_tokens // 1024, 1)
    size = (batch, shape.num_kv_heads, STATIC_LENGTH, shape.head_dim)
    positions = torch.arange(num_tokens // batch, device=DEVICE) + 100
    return Cache("static", normal(*size), normal(*size), positions)


def fused_arguments(
    shape: Shape, layer: Layer, cache: Cache, static_tokens: bool = False
) -> FusedQkvArguments:
    """Returns the op's arguments for one layer's step."""
    window = cache.window.to_ints()
    by_head = [weight.unflatten(0, (-1, shape.head_dim)) for weight in layer.weights]
    q_norm, k_norm = layer.norms or (None, None)
    q_bias, k_bias, v_bias = layer.biases or (None, None, None)
    static = cache.layout == "static"
    slots = cache.slots if static else cache.slots[: layer.x.shape[0]]
    rows = slots.shape[0] if static else layer.x.shape[0]
    return FusedQkvArguments(
        layer.x,
        *by_head,
        cache.keys,
        cache.values,
        slots,
        window,
        window,
        q_bias=q_bias,
        k_bias=k_bias,
        v_bias=v_bias,
        q_norm_weight=q_norm,
        k_norm_weight=k_norm,
        cos=layer.cos[:rows],
        sin=layer.sin[:rows],
        rotary_dim=shape.head_dim,
        rope_style="half",
        slots="per_sequence" if static else "flat",
        indexing="torch" if static else "paged",
        static_tokens=static_tokens,
    )


def fair_us(
    graphs: Mapping[str, torch.cuda.CUDAGraph], calls_per_graph: int, rounds: int = 7
) -> dict[str, float]:
    """Returns the median microseconds per call. Each variant starts after a pause, in a random
    order.

    A GEMM of many tokens takes the chip to its power limit. Without a pause, the next variant would
    run at lower clocks.
    """
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in order.sample(sorted(graphs), len(graphs)):
            time.sleep(REST_S)
            one = interleaved_us({name: graphs[name]}, calls_per_graph, rounds=1)
            times[name].append(one[name])
    return {name: statistics.median(values) for name, values in times.items()}
