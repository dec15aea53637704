"""Benchmark of quantised QKV projection, RoPE and cache write of one layer, compared with PyTorch
and with bf16.

    python benchmarks/qkv_quantized.py [--out DIR] [--tokens 1 16 ...] [--formats int4 ...]

Times are microseconds per call, in CUDA graphs with a cold L2 cache; q, k and v have separate
weights, and the cache is paged. `eager` and `stock` (torch.compile) run the graph that dequantises
the codes to a bf16 weight and multiplies by it. `bf16` is the fused op over bf16 weights of the
same dims, and `gemm` is one library GEMM over such weights. An error is the largest difference from
float64 arithmetic on the codes, divided by the root mean square of the result, for q and the
written cache rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from qkv_cache import error, rotate_half, written_rows
from qkv_shapes import Cache, Shape, fair_us, fused_arguments, make_layer, paged_cache
from quantized_layers import (
    BY_NAME,
    SHAPES,
    WEIGHT_ONLY,
    Format,
    Projection,
    QuantizedLayer,
    argument_sets,
    make_quantized,
    quantized_arguments,
    stored_weight,
)
from timing import capture, keep
from torch.nn.functional import linear, rms_norm

from tilewright.ops.qkv.lowering import planned_lowering
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.qkv_cache import OP
from tilewright.ops.runtime.device import target_of

FORMATS = ("int4", "fp8", "fp8_block")
FP32 = torch.float32
TOKENS = (1, 8, 16, 32, 64, 256, 1024, 4096)


def numbers(form: Format, part: Projection, dtype: torch.dtype) -> torch.Tensor:
    """Dequantises a weight to [N, K] in `dtype`, as models do."""
    if form.name == "int4":
        shifts = torch.arange(0, 32, 4, device=part.weight.device)
        codes = ((part.weight.unsqueeze(-1) >> shifts) & 15).flatten(-2).to(dtype) - 8
        blocks = codes.unflatten(1, (part.scale.shape[1], -1)) * part.scale.to(dtype).unsqueeze(-1)
        return blocks.flatten(1)
    # Libraries multiply integers in the model's dtype, and floats of 4 and 8 bits in fp32.
    wide = dtype if form.weight_format.startswith("int4") else torch.promote_types(dtype, FP32)
    return stored_weight(form, part).dequantize(wide).to(dtype)


def heads(
    form: Format, shape: Shape, layer: QuantizedLayer, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Computes q, k and v before the cache, in `dtype`."""
    x, dim = layer.x.to(dtype), shape.head_dim
    made = []
    for index, part in enumerate(layer.parts):
        bias = None if layer.biases is None else layer.biases[index].to(dtype)
        out = linear(x, numbers(form, part, dtype), bias).view(x.shape[0], -1, dim)
        if index < 2:
            if layer.norms is not None:
                out = rms_norm(out, (dim,), layer.norms[index].to(dtype), 1e-6)
            cos, sin = (table.to(dtype).unsqueeze(1) for table in (layer.cos, layer.sin))
            out = out * cos + rotate_half(out) * sin
        made.append(out)
    return made


def step(form: Format, shape: Shape, layer: QuantizedLayer, cache: Cache) -> torch.Tensor:
    """Computes the step as an unfused graph does."""
    q, k, v = heads(form, shape, layer, torch.bfloat16)
    slots, row = cache.slots[: layer.x.shape[0]], cache.keys.shape[2:]
    cache.keys.view(-1, *row)[slots] = k
    cache.values.view(-1, *row)[slots] = v
    return q


def measure(form: Format, shape: Shape, num_tokens: int) -> dict[str, Any]:
    """Measures one row: times, errors and the lowering."""
    torch._dynamo.reset()
    cache = paged_cache(shape, 0.25)
    sets = argument_sets(form, shape, num_tokens)
    layers = [make_quantized(form, shape, num_tokens) for _ in range(sets)]
    dense = [make_layer(shape, num_tokens) for _ in range(shape.argument_sets(num_tokens))]
    ours = [OP.split(quantized_arguments(form, shape, layer, cache)) for layer in layers]
    theirs = [OP.split(fused_arguments(shape, layer, cache)) for layer in dense]
    packed = [torch.cat(layer.weights) for layer in dense]
    stock = torch.compile(lambda layer: step(form, shape, layer, cache))
    variants: dict[str, Callable[[int], Any]] = {
        "tilewright": lambda i: OP.torch_op(*ours[i % sets][0], **ours[i % sets][1]),
        "eager": lambda i: step(form, shape, layers[i % sets], cache),
        "stock": lambda i: stock(layers[i % sets]),
        "bf16": lambda i: OP.torch_op(*theirs[i % len(dense)][0], **theirs[i % len(dense)][1]),
        "gemm": lambda i: torch.mm(dense[i % len(dense)].x, packed[i % len(dense)].t()),
    }
    want = heads(form, shape, layers[0], torch.float64)
    errors = {}
    for name in ("tilewright", "eager", "stock"):
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        got = [variants[name](0).view_as(want[0]), *written_rows(cache, num_tokens)]
        errors[f"{name}_error"] = error(got, want)
    calls = max(sets, 10 if num_tokens < 2048 else 2)
    graphs = {
        name: capture([lambda i=i, v=variant: v(i) for i in range(calls)], warmup=1)
        for name, variant in variants.items()
    }
    times = fair_us(graphs, calls, rounds=5)
    call = prepare(quantized_arguments(form, shape, layers[0], cache))
    return {
        "model": shape.name,
        "format": form.name,
        "tokens": num_tokens,
        **{name: round(us, 2) for name, us in times.items()},
        "over_stock": round(times["stock"] / times["tilewright"], 2),
        "over_bf16": round(times["bf16"] / times["tilewright"], 2),
        **errors,
        "lowering": planned_lowering(call, target_of(call.a.x.device)).reason,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=WEIGHT_ONLY)
    parser.add_argument("--models", nargs="+", default=[shape.name for shape in SHAPES])
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        for name in options.formats if shape.name in options.models else ():
            for tokens in options.tokens:
                row = measure(BY_NAME[name], shape, tokens)
                rows.append(row)
                keep("qkv_quantized", rows, options.out)
                times = " ".join(f"{k} {row[k]:.1f}" for k in ("tilewright", "eager", "stock"))
                print(
                    f"{shape.name} {name} T={tokens}: {times} bf16 {row['bf16']:.1f} "
                    f"gemm {row['gemm']:.1f} {row['over_stock']}x stock {row['over_bf16']}x bf16 "
                    f"err {row['tilewright_error']:.4f}/{row['eager_error']:.4f} "
                    f"{row['lowering'][:60]}",
                    flush=True,
                )
    worse = [row for row in rows if not row["tilewright_error"] <= row["eager_error"]]
    if worse:
        named = "; ".join(f"{r['model']} {r['format']} T={r['tokens']}" for r in worse)
        raise SystemExit(f"less accurate than eager: {named}")


if __name__ == "__main__":
    main()
