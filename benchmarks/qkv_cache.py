"""QKV projection, RoPE and cache write of one layer: the fused op, eager, stock torch.compile.

    python benchmarks/qkv_cache.py [--out DIR] [--tokens 1 16 ...] [--layouts paged static]

Microseconds per call, CUDA graphs, L2 cold, three separate weights. Errors are the largest
difference from float64 arithmetic over the rms of the result, over q and the written cache rows.
`gemm` is one bare library GEMM over weights packed for it: a bound, not a peer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from qkv_shapes import (
    PAGE_SIZE,
    Cache,
    Layer,
    Shape,
    fair_us,
    fused_arguments,
    make_layer,
    paged_cache,
    static_cache,
)
from timing import capture, keep
from torch.nn.functional import linear

from tilewright.codegen.qkv_plan import plan_fused_qkv
from tilewright.ops.lowerings import device_target, prepare
from tilewright.ops.qkv_cache import OP

SHAPES = (Shape("llama3-8b", 4096, 32, 8), Shape("llama3-70b", 8192, 64, 8))
TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)
Step = Callable[..., torch.Tensor]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def paged_step(x, q_weight, k_weight, v_weight, cos, sin, slots, keys, values):
    """As engines spell it: rows of the flat cache, by slot."""
    heads, dim = keys.shape[2:]
    q = linear(x, q_weight).view(-1, q_weight.shape[0] // dim, dim)
    k = linear(x, k_weight).view(-1, heads, dim)
    v = linear(x, v_weight).view(-1, heads, dim)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = q * cos + rotate_half(q) * sin
    k = k * cos + rotate_half(k) * sin
    keys.view(-1, heads, dim)[slots] = k
    values.view(-1, heads, dim)[slots] = v
    return q


def static_step(x, q_weight, k_weight, v_weight, cos, sin, positions, keys, values):
    """As Hugging Face spells it: [batch, heads, length, dim], index_copy_ along the length."""
    batch, heads, _, dim = keys.shape
    x = x.view(batch, -1, x.shape[-1])
    q = linear(x, q_weight).view(batch, x.shape[1], -1, dim).transpose(1, 2)
    k = linear(x, k_weight).view(batch, x.shape[1], heads, dim).transpose(1, 2)
    v = linear(x, v_weight).view(batch, x.shape[1], heads, dim).transpose(1, 2)
    q = q * cos + rotate_half(q) * sin
    k = k * cos + rotate_half(k) * sin
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def step_arguments(layer: Layer, cache: Cache) -> tuple[torch.Tensor, ...]:
    static = cache.layout == "static"
    slots = cache.slots if static else cache.slots[: layer.x.shape[0]]
    rows = slots.shape[0] if static else layer.x.shape[0]
    tables = (layer.cos[:rows], layer.sin[:rows])
    return (layer.x, *layer.weights, *tables, slots, cache.keys, cache.values)


def written_rows(cache: Cache, num_tokens: int) -> list[torch.Tensor]:
    """What the step left in the cache: [T, Hkv, D] of K and of V."""
    if cache.layout == "static":
        picked = [c.index_select(2, cache.slots) for c in (cache.keys, cache.values)]
        return [c.transpose(1, 2).reshape(num_tokens, -1, c.shape[-1]) for c in picked]
    slots = cache.slots[:num_tokens]
    return [c[slots // PAGE_SIZE, slots % PAGE_SIZE] for c in (cache.keys, cache.values)]


def exact(layer: Layer, num_tokens: int, rows: int, dim: int) -> list[torch.Tensor]:
    """q, k and v in float64 from the same bf16 inputs."""
    x = layer.x.double()
    repeats = num_tokens // rows
    cos, sin = (t[:rows].double().repeat(repeats, 1).unsqueeze(1) for t in (layer.cos, layer.sin))
    q, k, v = ((x @ weight.double().t()).view(num_tokens, -1, dim) for weight in layer.weights)
    return [q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        worst = max(worst, float((a.double() - b).abs().max() / b.square().mean().sqrt()))
    return worst


def measure(shape: Shape, num_tokens: int, layout: str) -> dict[str, Any]:
    """One row: times, errors and the lowering taken."""
    torch._dynamo.reset()
    step: Step = paged_step if layout == "paged" else static_step
    cache = paged_cache(shape) if layout == "paged" else static_cache(shape, num_tokens)
    layers = [make_layer(shape, num_tokens) for _ in range(shape.argument_sets(num_tokens))]
    ours = [OP.split(fused_arguments(shape, layer, cache)) for layer in layers]
    peers = [step_arguments(layer, cache) for layer in layers]
    packed = [torch.cat(layer.weights) for layer in layers]
    stock = torch.compile(step)
    variants: dict[str, Callable[[int], Any]] = {
        "tilewright": lambda i: OP.torch_op(*ours[i][0], **ours[i][1]),
        "eager": lambda i: step(*peers[i]),
        "stock": lambda i: stock(*peers[i]),
        "gemm": lambda i: torch.mm(layers[i].x, packed[i].t()),
    }
    rows = cache.slots.shape[0] if layout == "static" else num_tokens
    want = exact(layers[0], num_tokens, rows, shape.head_dim)
    errors = {}
    for name in ("tilewright", "eager", "stock"):
        for rows_left in (cache.keys, cache.values):
            rows_left.fill_(torch.nan)
        q = variants[name](0)
        if layout == "static" and name != "tilewright":
            q = q.transpose(1, 2)
        got = [q.reshape(num_tokens, -1, shape.head_dim), *written_rows(cache, num_tokens)]
        errors[f"{name}_error"] = error(got, want)
    if not errors["tilewright_error"] <= errors["eager_error"]:
        raise AssertionError(f"less accurate than eager: {errors}")
    calls = shape.calls_per_graph(num_tokens)
    graphs = {
        name: capture([lambda i=i, v=variant: v(i % len(layers)) for i in range(calls)])
        for name, variant in variants.items()
    }
    times = fair_us(graphs, calls)
    call = prepare(fused_arguments(shape, layers[0], cache))
    target = device_target(layers[0].x.device)
    plan = plan_fused_qkv(call.problem, target, call.rows is not None)
    best = min(times["eager"], times["stock"])
    return {
        "model": shape.name,
        "layout": layout,
        "tokens": num_tokens,
        **times,
        "speedup_over_best": best / times["tilewright"],
        "of_gemm": times["tilewright"] / times["gemm"],
        **errors,
        "lowering": plan.choice(num_tokens).reason,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layouts", nargs="+", default=["paged", "static"])
    parser.add_argument("--models", nargs="+", default=[shape.name for shape in SHAPES])
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        for layout in options.layouts if shape.name in options.models else ():
            for tokens in options.tokens:
                row = measure(shape, tokens, layout)
                rows.append(row)
                keep("qkv_cache", rows, options.out)
                print(
                    f"{shape.name} {layout:6} T={tokens:5}: ours {row['tilewright']:8.1f}  "
                    f"eager {row['eager']:8.1f}  stock {row['stock']:8.1f}  gemm {row['gemm']:8.1f}"
                    f"  {row['speedup_over_best']:5.2f}x  err {row['tilewright_error']:.4f}/"
                    f"{row['eager_error']:.4f}  {row['lowering']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
