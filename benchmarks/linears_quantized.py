"""Benchmark of the fused op of every linear of a decoder layer, by format of the weights.

    python benchmarks/linears_quantized.py [--models llama3-8b ...] [--ops qkv gate_up down out]
        [--formats int4 awq ...] [--tokens 1 16 64 1024] [--out DIR]
    python benchmarks/linears_quantized.py --prompts [--models llama3-8b ...]
        [--tokens 256 1024 1027 4096] [--out DIR]

qkv is `fused_qkv_paged` with a paged cache, gate_up is `linear_activation` after an RMS norm, and
down and out (the projection after attention) are `linear_residual`. Weights are random codes, laid
out as in checkpoints. bf16 weights of the same dims are timed in the same run. Times are
microseconds of CUDA graphs with a cold L2 cache; the formats are timed in turn, each after a pause.
bytes: the bytes of codes, scales and zeros, or of bf16 weights. share: bytes / time, as a share of
the bytes that a copy of 2 GiB reads and writes per second. error: the relative error of a linear
against float64 with the same codes, in the 2-norm. Ops are also timed for more tokens than patterns
match; `left` then says why a graph keeps its own calls.

--prompts measures products of many tokens in graphs that also round activations to float8.
`scaled_linear` has scales by tensor, row or block. It is compared with `bf16`, the library's GEMM
with bf16 weights, and with `graph`, torch.compile of the graph that the op replaces, with scales by
row. This graph decodes x and the weight to bf16 and multiplies them. `qkv` measures QKV projections
of such codes, by the planned fused kernel and by the library.
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
    make_quantized,
    quantized_arguments,
    stored_weight,
)
from timing import capture, keep
from torch.nn.functional import linear

from tilewright.codegen.qkv.plan import library_choice, plan_fused_qkv
from tilewright.compiler.verify import relative_error
from tilewright.ops.contract import get_op
from tilewright.ops.mlp.arguments import (
    LinearActivationArguments,
    LinearResidualArguments,
    ScaledLinearArguments,
)
from tilewright.ops.mlp.gains import slower
from tilewright.ops.qkv.choices import run
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.runtime.device import target_of

DENSE = Format("bf16", "dense", (0, 0))
KNOWN = {"bf16": DENSE} | {name: BY_NAME[name] for name in WEIGHT_ONLY}
TOKENS = (1, 16, 64, 1024)
PROMPTS = (256, 1024, 1027, 4096)
#: For each kind of scales, a pair for x and a pair for the weight. The pair for x is (the number of
#: rows of scales, or 0 for one scale per token; the columns that share a scale). The pair for the
#: weight is (the rows, and the columns, that share a scale). 0 rows of a weight, or 0 columns,
#: stand for all rows or columns.
KINDS: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "tensors": ((1, 0), (0, 0)),
    "rows": ((0, 0), (1, 0)),
    "blocks": ((0, 128), (128, 128)),
}


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
    """The weights of one call of an op.

    parts: each weight as its format stores it.
    arguments: a function that makes the op's arguments for a number of tokens.
    """

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
        return replace(made, static_tokens=True)  # as for a decode step's graph

    return Linears("fused_qkv_paged", parts, arguments)


def coded(form: Format, part: Projection) -> dict[str, Any]:
    """Returns the arguments, by name, that hold the weight of a linear."""
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
    """Returns the relative error from float64 of the same codes, in the 2-norm."""
    names = ("x", "residual", "norm_weight")
    given = {name: getattr(arguments, name, None) for name in names}
    wide = {name: tensor.double() for name, tensor in given.items() if tensor is not None}
    op = get_op("linear_residual" if "residual" in wide else "linear_activation")
    return relative_error(made.double(), op.reference(replace(arguments, **wide)))


@dataclass
class Weights:
    """The weights of one format, enough to exceed the L2 cache."""

    form: Format
    layers: list[Linears]

    @classmethod
    def of(cls, form: Format, make: Callable[[Format, Model], Linears], model: Model) -> Weights:
        first = make(form, model)
        count = max(2, -(-int(COLD_BYTES) // first.num_bytes))
        return cls(form, [first, *(make(form, model) for _ in range(count - 1))])


def kernels(everything: Sequence[Weights], tokens: Sequence[int]) -> list[Any]:
    """Returns the kernels of all calls, each once."""
    found = {}
    target = target_of(torch.device("cuda", torch.cuda.current_device())).name
    for weights in everything:
        first = weights.layers[0]
        for count in tokens:
            report = get_op(first.op).plan_for(first.arguments(count), target)
            found |= {spec.name: spec for spec in report.specs}
    return list(found.values())


def measured(everything: Sequence[Weights], tokens: int, rate: float) -> dict[str, dict[str, Any]]:
    """Measures one op. Returns the time, the share of the copy rate and the error, by format."""
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


# --- prompts --------------------------------------------------------------------------------------


def scaled(kind: str, rows: int, columns: int, tokens: int) -> ScaledLinearArguments:
    """Returns random codes of x and of the weight, with scales of one kind."""
    (every, along), block = KINDS[kind]
    bn, bk = (size or whole for size, whole in zip(block, (rows, columns), strict=True))
    codes = [torch.randn(n, columns, device="cuda").mul_(60) for n in (tokens, rows)]
    x, weight = (one.clamp_(-448, 448).to(torch.float8_e4m3fn) for one in codes)
    sizes = every or tokens, columns // along if along else 1
    x_scale = (1 + torch.rand(sizes, device="cuda")) / 60
    scale = (1 + torch.rand(rows // bn, columns // bk, device="cuda")) * columns**-0.5 / 60
    return ScaledLinearArguments(
        x, weight, scale, x_scale=x_scale, scale_block=[bn, bk], out_dtype=torch.bfloat16
    )


@torch.compile
def decoded(x: torch.Tensor, x_scale: Any, weight: torch.Tensor, scale: Any) -> torch.Tensor:
    """Computes the product as a graph does from codes with a scale for each row."""
    rows = (x.to(torch.bfloat16) * x_scale).to(torch.bfloat16)
    return linear(rows, (weight.to(torch.bfloat16) * scale).to(torch.bfloat16))


def linear_prompts(rows: int, columns: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Measures each variant. Returns the time, and the error from float64 of the same codes."""
    op = get_op("scaled_linear")
    count = max(2, -(-int(COLD_BYTES) // (rows * columns)))
    calls: dict[str, list[Callable[[], torch.Tensor]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        sets = [scaled(kind, rows, columns, tokens) for _ in range(count)]
        exact = op.reference(replace(sets[0], out_dtype=torch.float64))
        obstacles = op.choose("cuda", sets[0], target_of(sets[0].x.device)).rejected
        for _, why in obstacles:
            print(f"{kind}: {why}", flush=True)
        if not obstacles:
            calls[kind] = [lambda a=a: op.call(a) for a in sets]
            found[kind] = {"error": relative_error(op.call(sets[0]).double(), exact)}
        if kind == "rows":
            calls["graph"] = [
                lambda a=a: decoded(a.x, a.x_scale, a.weight, a.weight_scale) for a in sets
            ]
            found["graph"] = {"error": relative_error(calls["graph"][0]().double(), exact)}
    halves = [(normal(tokens, columns), normal(rows, columns)) for _ in range(-(-count // 2))]
    calls["bf16"] = [lambda x=x, w=w: linear(x, w) for x, w in halves]
    return timed(calls, found | {"bf16": {}})


def qkv_prompts(shape: Shape, name: str, tokens: int) -> dict[str, dict[str, Any]]:
    """Measures the planned fused kernel and the library's products, on codes of x and weights."""
    form, cache = BY_NAME[name], paged_cache(shape, 0.05)
    sets = [
        quantized_arguments(form, shape, make_quantized(form, shape, tokens), cache)
        for _ in range(max(2, -(-2 * int(COLD_BYTES) // shape.weight_bytes)))
    ]
    sets = [replace(one, static_tokens=True) for one in sets]
    problem, target = prepare(sets[0]).problem, target_of(sets[0].x.device)
    planned = plan_fused_qkv(replace(problem, scaled_by=""), target).choice(tokens)
    choices = {
        f"{name} {planned.name}": planned,
        f"{name} by library": library_choice(problem, tokens, target, False, None),
    }
    calls = {
        label: [lambda a=a, choice=choice: run(a, choice) for a in sets]
        for label, choice in choices.items()
    }
    return timed(calls, {label: {"lowering": one.reason} for label, one in choices.items()})


def timed(
    calls: dict[str, list[Callable[[], torch.Tensor]]], rows: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Times the calls, and returns `rows` with their microseconds added."""
    longest = max(map(len, calls.values()))
    graphs = {
        name: capture([own[i % len(own)] for i in range(longest)], warmup=1)
        for name, own in calls.items()
    }
    for name, us in fair_us(graphs, longest, rounds=5).items():
        rows[name]["us"] = us
    return rows


def prompts(models: Sequence[str], tokens: Sequence[int], out: Path | None) -> None:
    rows: list[dict[str, Any]] = []
    for name in models:
        model = MODELS[name]
        shape, inner = model.attention, model.intermediate
        hidden, attended = shape.hidden, shape.num_heads * shape.head_dim
        sizes = {"gate": (inner, hidden), "down": (hidden, inner), "out": (hidden, attended)}
        for count in tokens:
            found = {op: linear_prompts(*size, count) for op, size in sizes.items()}
            found["qkv"] = {}
            for form in ("fp8_fp8", "fp8_fp8_block"):
                found["qkv"] |= qkv_prompts(shape, form, count)
            for op, variants in found.items():
                for variant, row in variants.items():
                    facts = {"model": name, "op": op, "variant": variant, "tokens": count}
                    rows.append(facts | row)
                    print(
                        f"{name} {op:5} T={count:<5} {variant:24} {row['us']:8.1f} us  "
                        f"error {row.get('error', 0):.1e}  {row.get('lowering', '')[:70]}",
                        flush=True,
                    )
            keep("prompts_quantized", rows, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama3-8b"], choices=list(MODELS))
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--formats", nargs="+", default=list(KNOWN), choices=list(KNOWN))
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--prompts", action="store_true", help="float8 activations, many tokens")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.tokens = given.tokens or (PROMPTS if given.prompts else TOKENS)
    torch.manual_seed(0)
    if given.prompts:
        with torch.no_grad():
            prompts(given.models, given.tokens, given.out)
        return
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
