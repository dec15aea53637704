"""Every linear of a decoder layer as its fused op, by format: microseconds, and the share of the
copy rate at which its codes and scales are read.

    python benchmarks/linears_quantized.py [--models llama3-8b ...] [--ops qkv gate_up down out]
        [--formats int4 awq ...] [--tokens 1 16 64 1024] [--out DIR]

qkv: `fused_qkv_paged` with a paged cache; gate_up: `linear_activation` behind an RMS norm; down and
out (of the attention): `linear_residual`. Random codes as checkpoints have them, bf16 weights of
the same dims in the same run. CUDA graphs, L2 cold, every format in its turn, from rest. bytes: of
codes, scales and zeros, or of bf16 weights; share: bytes / time over what a copy of 2 GiB reads and
writes per second. error: of linears, relative in the 2-norm, from float64 of the same codes. Of
more tokens than patterns give them, ops are timed all the same: `left` then says why a graph keeps
its own calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bounds import copy_bytes_per_s
from compiling import failures_of
from qkv_shapes import COLD_BYTES, Shape, fair_us, normal, paged_cache
from quantized_layers import (
    BY_NAME,
    WEIGHT_ONLY,
    Format,
    Projection,
    QuantizedLayer,
    make_projection,
    quantized_arguments,
    stored_weight,
)
from timing import capture, keep

from tilewright.compiler.verify import relative_error
from tilewright.ops.contract import get_op
from tilewright.ops.mlp.arguments import LinearActivationArguments, LinearResidualArguments
from tilewright.ops.mlp.gains import slower
from tilewright.ops.runtime.device import target_of

DENSE = Format("bf16", "dense", (0, 0))
KNOWN = {"bf16": DENSE} | {name: BY_NAME[name] for name in WEIGHT_ONLY}
TOKENS = (1, 16, 64, 1024)


@dataclass(frozen=True)
class Model:
    attention: Shape
    intermediate: int


MODELS = {
    "llama3-8b": Model(Shape("llama3-8b", 4096, 32, 8), 14336),
    "llama3-70b": Model(Shape("llama3-70b", 8192, 64, 8), 28672),
}


@dataclass(frozen=True)
class Linears:
    """Weights of one call. parts: each weight as its format stores it. arguments: makes the op's
    arguments for a number of tokens."""

    op: str
    parts: Sequence[Projection]
    arguments: Callable[[int], Any]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors)


def projection(form: Format, rows: int, columns: int) -> Projection:
    if form is DENSE:
        return Projection(normal(rows, columns, scale=columns**-0.5), None, None)
    return make_projection(form, rows, columns)


def qkv(form: Format, model: Model) -> Linears:
    shape = model.attention
    dim, heads = shape.head_dim, (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    parts = tuple(projection(form, count * dim, shape.hidden) for count in heads)
    cache = paged_cache(shape, 0.05)

    def arguments(tokens: int) -> Any:
        x, angles = normal(tokens, shape.hidden), torch.randn(tokens, dim // 2, device="cuda")
        tables = (f(angles.repeat(1, 2)).bfloat16() for f in (torch.cos, torch.sin))
        layer = QuantizedLayer(x, None, parts, None, None, *tables)
        made = quantized_arguments(form, shape, layer, cache)
        return replace(made, static_tokens=True)  # as in a decode step's graph

    return Linears("fused_qkv_paged", parts, arguments)


def coded(form: Format, part: Projection) -> dict[str, Any]:
    """The weight of a linear, as arguments by name."""
    weight = stored_weight(form, part)
    given = {"weight": weight.data, "weight_scale": weight.scale, "weight_zero": weight.zero}
    given |= {"weight_format": weight.weight_format, "zero_point": weight.zero_point}
    return given | {"scale_block": weight.scale_block, "nibble_order": weight.nibble_order}


def gate_up(form: Format, model: Model) -> Linears:
    hidden = model.attention.hidden
    gate, up = (projection(form, model.intermediate, hidden) for _ in range(2))
    norm_weight = normal(hidden)
    given = coded(form, gate) | {"rms_norm": True, "norm_weight": norm_weight}
    given |= {"up_weight": up.weight, "up_scale": up.scale, "up_zero": up.zero}
    return Linears(
        "linear_activation",
        (gate, up),
        lambda tokens: LinearActivationArguments(normal(tokens, hidden), **given),
    )


def residual(form: Format, rows: int, columns: int) -> Linears:
    part = projection(form, rows, columns)
    given = coded(form, part)
    return Linears(
        "linear_residual",
        (part,),
        lambda tokens: LinearResidualArguments(
            normal(tokens, columns), residual=normal(tokens, rows), **given
        ),
    )


OPS: dict[str, Callable[[Format, Model], Linears]] = {
    "qkv": qkv,
    "gate_up": gate_up,
    "down": lambda form, model: residual(form, model.attention.hidden, model.intermediate),
    "out": lambda form, model: residual(
        form, model.attention.hidden, model.attention.num_heads * model.attention.head_dim
    ),
}


def error(arguments: Any, made: torch.Tensor) -> float:
    """From float64 of the same codes."""
    names = ("x", "residual", "norm_weight")
    given = {name: getattr(arguments, name, None) for name in names}
    wide = {name: tensor.double() for name, tensor in given.items() if tensor is not None}
    op = get_op("linear_residual" if "residual" in wide else "linear_activation")
    return relative_error(made.double(), op.reference(replace(arguments, **wide)))


@dataclass
class Weights:
    """As many weights of one format as keep the L2 cache cold."""

    form: Format
    layers: list[Linears]

    @classmethod
    def of(cls, form: Format, make: Callable[[Format, Model], Linears], model: Model) -> Weights:
        first = make(form, model)
        count = max(2, -(-int(COLD_BYTES) // first.num_bytes))
        return cls(form, [first, *(make(form, model) for _ in range(count - 1))])


def kernels(everything: Sequence[Weights], tokens: Sequence[int]) -> list[Any]:
    """The kernels of all calls, each once."""
    found = {}
    target = target_of(torch.device("cuda", torch.cuda.current_device())).name
    for weights in everything:
        first = weights.layers[0]
        for count in tokens:
            report = get_op(first.op).plan_for(first.arguments(count), target)
            found |= {spec.name: spec for spec in report.specs}
    return list(found.values())


def measured(everything: Sequence[Weights], tokens: int, rate: float) -> dict[str, dict[str, Any]]:
    """By format: time, share of the copy rate and error of one op."""
    op = get_op(everything[0].layers[0].op)
    target = target_of(torch.device("cuda", torch.cuda.current_device())).name
    calls = max(max(len(weights.layers) for weights in everything), 10 if tokens < 256 else 4)
    graphs, rows, kept = {}, {}, []
    for weights in everything:
        arguments = [layer.arguments(tokens) for layer in weights.layers]
        given = [op.split(one) for one in arguments]
        turns = [given[i % len(given)] for i in range(calls)]
        name, made = weights.form.name, op.torch_op(*given[0][0], **given[0][1])
        graphs[name] = capture([lambda a=a, k=k: op.torch_op(*a, **k) for a, k in turns], warmup=1)
        rows[name] = {"bytes": weights.layers[0].num_bytes}
        if op.name != "fused_qkv_paged":
            rows[name]["error"] = error(arguments[0], made)
            rows[name]["left"] = slower(tokens=tokens, weights=len(weights.layers[0].parts))
        rows[name]["lowering"] = str(op.plan_for(arguments[0], target).reason)
        kept.append(given)
    for name, us in fair_us(graphs, calls, rounds=5).items():
        rows[name] |= {"us": us, "share": rows[name]["bytes"] / (1e-6 * us * rate)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama3-8b"], choices=list(MODELS))
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--formats", nargs="+", default=list(KNOWN), choices=list(KNOWN))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_bytes_per_s()
    print(f"copy: {rate / 1e12:.2f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []
    forms = ["bf16", *(name for name in given.formats if name != "bf16")]
    for model in given.models:
        for name in given.ops:
            everything = [Weights.of(KNOWN[form], OPS[name], MODELS[model]) for form in forms]
            failures_of(kernels(everything, given.tokens))
            for tokens in given.tokens:
                found = measured(everything, tokens, rate)
                for form, row in found.items():
                    over = found["bf16"]["us"] / row["us"]
                    facts = {"model": model, "op": name, "format": form, "tokens": tokens}
                    rows.append(facts | row | {"over_bf16": over})
                    print(
                        f"{model} {name:8} T={tokens:<5} {form:10} {row['us']:8.1f} us  "
                        f"{row['bytes'] / 1e6:6.1f} MB  {100 * row['share']:4.0f} % of a copy  "
                        f"{over:5.2f}x bf16  error {row.get('error', 0):.1e}  "
                        f"{'(not matched) ' if row.get('left') else ''}{row['lowering'][:60]}",
                        flush=True,
                    )
                keep("linears_quantized", rows, given.out)
            del everything


if __name__ == "__main__":
    main()
