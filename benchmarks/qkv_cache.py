"""Benchmark of QKV projection, RoPE and cache write of a layer: fused op, eager, torch.compile.

    python benchmarks/qkv_cache.py [--out DIR] [--tokens 1 16 ...] [--layouts paged static]

Times are microseconds per call, in CUDA graphs with a cold L2 cache; q, k and v have separate
weights. An error is the largest difference from float64, divided by the root mean square of the
result, for q and the written cache rows. `stock` is torch.compile with default options, `autotuned`
is mode="max-autotune-no-cudagraphs". Two variants are lower bounds: `gemm` is one library GEMM with
packed weights, and `read` is a kernel that only reads these weights. of_copy is the bytes of the
weights divided by tilewright's time, as a share of the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bounds import copy_bytes_per_s, reader
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

from tilewright.codegen.qkv.plan import plan_fused_qkv
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.qkv_cache import OP
from tilewright.ops.runtime.device import device_target

SHAPES = (
    Shape("llama3-8b", 4096, 32, 8),
    Shape("llama3-70b", 8192, 64, 8),
    Shape("qwen3-30b-a3b", 2048, 32, 4, norm=True),
    Shape("gpt-oss", 2880, 64, 8, 64, bias=True),
)
TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)
# Autotuning GEMMs takes long. Therefore it is done only for these token counts, and only for the
# static cache, which stock torch.compile does not copy.
AUTOTUNED_TOKENS = (16, 64, 1024, 4096)
AUTOTUNE = "max-autotune-no-cudagraphs"
EPS = 1e-6
Step = Callable[..., torch.Tensor]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def normed(x, weight):
    """Computes the RMSNorm of each head as models do. Returns x if there is no weight."""
    if weight is None:
        return x
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def project(x, weights, biases, norms, dim):
    """Computes q, k and v [..., heads, dim], with the norms of q and k if there are any."""
    made = [
        linear(x, weight, None if bias is None else bias.flatten()).unflatten(-1, (-1, dim))
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return [normed(rows, norm) for rows, norm in zip(made, (*norms, None), strict=True)]


def paged_step(x, weights, biases, norms, cos, sin, slots, keys, values):
    """Computes the step as engines do: it writes rows of the flat cache, by slot."""
    heads, dim = keys.shape[2:]
    q, k, v = project(x, weights, biases, norms, dim)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = q * cos + rotate_half(q) * sin
    k = k * cos + rotate_half(k) * sin
    keys.view(-1, heads, dim)[slots] = k
    values.view(-1, heads, dim)[slots] = v
    return q


def static_step(x, weights, biases, norms, cos, sin, positions, keys, values):
    """Computes the step as Hugging Face's models do: it writes with index_copy_ to a cache [batch,
    heads, length, dim]."""
    batch, _, _, dim = keys.shape
    x = x.view(batch, -1, x.shape[-1])
    q, k, v = (rows.transpose(1, 2) for rows in project(x, weights, biases, norms, dim))
    q = q * cos + rotate_half(q) * sin
    k = k * cos + rotate_half(k) * sin
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def step_arguments(layer: Layer, cache: Cache) -> tuple[Any, ...]:
    static = cache.layout == "static"
    slots = cache.slots if static else cache.slots[: layer.x.shape[0]]
    rows = slots.shape[0] if static else layer.x.shape[0]
    tables = (layer.cos[:rows], layer.sin[:rows])
    biases, norms = layer.biases or (None,) * 3, layer.norms or (None,) * 2
    return (layer.x, layer.weights, biases, norms, *tables, slots, cache.keys, cache.values)


def written_rows(cache: Cache, num_tokens: int) -> list[torch.Tensor]:
    """Returns the rows of K and of V that the step wrote to the cache, [T, Hkv, D] each."""
    if cache.layout == "static":
        picked = [c.index_select(2, cache.slots) for c in (cache.keys, cache.values)]
        return [c.transpose(1, 2).reshape(num_tokens, -1, c.shape[-1]) for c in picked]
    slots = cache.slots[:num_tokens]
    return [c[slots // PAGE_SIZE, slots % PAGE_SIZE] for c in (cache.keys, cache.values)]


def exact(layer: Layer, num_tokens: int, rows: int, dim: int) -> list[torch.Tensor]:
    """Computes q, k and v in float64 from the same bf16 inputs."""
    x = layer.x.double()
    repeats = num_tokens // rows
    cos, sin = (t[:rows].double().repeat(repeats, 1).unsqueeze(1) for t in (layer.cos, layer.sin))
    made = [(x @ weight.double().t()).view(num_tokens, -1, dim) for weight in layer.weights]
    if layer.biases is not None:
        made = [rows + bias.double() for rows, bias in zip(made, layer.biases, strict=True)]
    for i, norm in enumerate(layer.norms or ()):
        made[i] = made[i] * (made[i].square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
    q, k, v = made
    return [q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        worst = max(worst, float((a.double() - b).abs().max() / b.square().mean().sqrt()))
    return worst


def measure(
    shape: Shape, num_tokens: int, layout: str, autotune: bool, copy: float
) -> dict[str, Any]:
    """Measures one row: times, errors and the lowering. `copy` is the GPU's copy rate in
    bytes/s."""
    torch._dynamo.reset()
    step: Step = paged_step if layout == "paged" else static_step
    cache = paged_cache(shape) if layout == "paged" else static_cache(shape, num_tokens)
    layers = [make_layer(shape, num_tokens) for _ in range(shape.argument_sets(num_tokens))]
    ours = [OP.split(fused_arguments(shape, layer, cache)) for layer in layers]
    peers = [step_arguments(layer, cache) for layer in layers]
    packed = [torch.cat(layer.weights) for layer in layers]
    stock = torch.compile(step)
    autotuned = torch.compile(step, mode=AUTOTUNE)
    read = reader(packed)
    variants: dict[str, Callable[[int], Any]] = {
        "tilewright": lambda i: OP.torch_op(*ours[i][0], **ours[i][1]),
        "eager": lambda i: step(*peers[i]),
        "stock": lambda i: stock(*peers[i]),
        "gemm": lambda i: torch.mm(layers[i].x, packed[i].t()),
        "read": lambda i: read[i](),
    }
    if autotune:
        variants["autotuned"] = lambda i: autotuned(*peers[i])
    rows = cache.slots.shape[0] if layout == "static" else num_tokens
    want = exact(layers[0], num_tokens, rows, shape.head_dim)
    errors = {}
    for name in ("tilewright", "eager", "stock", *["autotuned"] * autotune):
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
    best = min(times[name] for name in ("eager", "stock", "autotuned") if name in times)
    return {
        "model": shape.name,
        "layout": layout,
        "tokens": num_tokens,
        **times,
        "speedup_over_best": best / times["tilewright"],
        "of_gemm": times["tilewright"] / times["gemm"],
        "of_copy": shape.weight_bytes / (1e-6 * times["tilewright"] * copy),
        "copy_tb_per_s": copy / 1e12,
        **errors,
        "lowering": plan.choice(num_tokens).reason,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layouts", nargs="+", default=["paged", "static"])
    parser.add_argument("--autotuned", type=int, nargs="*", default=AUTOTUNED_TOKENS)
    parser.add_argument("--models", nargs="+", default=[shape.name for shape in SHAPES])
    options = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bytes_per_s()
    rows = []
    for shape in SHAPES:
        for layout in options.layouts if shape.name in options.models else ():
            for tokens in options.tokens:
                autotune = layout == "static" and tokens in options.autotuned
                row = measure(shape, tokens, layout, autotune, copy)
                rows.append(row)
                keep("qkv_cache", rows, options.out)
                print(
                    f"{shape.name} {layout:6} T={tokens:5}: ours {row['tilewright']:8.1f}  "
                    f"eager {row['eager']:8.1f}  stock {row['stock']:8.1f}  auto "
                    f"{row.get('autotuned', 0):8.1f}  gemm {row['gemm']:8.1f}"
                    f"  read {row['read']:6.1f} of copy {row['of_copy']:.2f} of gemm "
                    f"{row['of_gemm']:.3f} {row['speedup_over_best']:5.2f}x  "
                    f"err {row['tilewright_error']:.4f}/{row['eager_error']:.4f}  "
                    f"{row['lowering']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
