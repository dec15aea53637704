"""Benchmark of LoRA shrink (q, k and v, planar) and expand of one layer, compared with PyTorch's
own ways.

    python benchmarks/lora.py [--out DIR] [--hidden 4096 8192] [--ranks 8 16 64 128] [--tokens ...]

Times are microseconds per call, in CUDA graphs with a cold L2 cache. Tokens are sorted by adapter.
`unsorted` is the fused op with an id for each token, in random order; its time includes the sorting
that it needs. The shrink is compared with:

    grouped_mm    torch._grouped_mm over one stack [G, K, 3R], then the permutation to planes
    gather a gather of each token's weights and a bmm; left out if it needs over 1 GB linear one
    product and the permutation, for a single adapter
    linears       three products, for a single adapter with three separate weights
    loop          torch.compile of a loop over the adapters with a mask (--loop)

of_copy: the least bytes (x, the active weights and the result, each once) over tilewright's time,
as a share of the copy rate of the same run. Errors: the norm of the difference from float64 over
the norm of the exact result. cpu: CPU time of an uncaptured call. lowering, kernel: the op's choice
and its reason. A single adapter is given without offsets, as in graphs. "weights": "separate"
stands for three matrices of one adapter, as PEFT has them.

Rows with "op": "expand" add the deltas to q, k and v; they are compared with three
torch._grouped_mm and three additions. Rows with "op": "delta" are shrink and expand of one float32
adapter, with the deltas side by side; they are compared with `linears`, which is three pairs of
products, scaled and joined. `taken` says whether patterns use the kernels for such a row. 8
adapters are measured with all ranks, other numbers of adapters with ranks 16, 64 and 128. Every row
is kept as soon as it is measured. A row that fails has the error in "failed", and the run then
exits with 1.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bounds import copy_bytes_per_s
from compiling import compile_quietly, processes
from lora_delta import delta_specs, measure_delta
from lora_shapes import (
    MOST_CALLS,
    LoraSet,
    LoraShape,
    Variants,
    chosen,
    error,
    make_set,
    make_sets,
    timed,
)
from timing import cpu_us, keep

from tilewright.codegen.spec import KernelSpec
from tilewright.ops.lora import expand as lora_expand
from tilewright.ops.lora import shrink as lora_shrink

GATHER_BYTES = 1e9
TOKENS = (1, 16, 64, 512, 2048, 4096, 8192)
ALL_RANKS = 8  # the number of adapters for which all ranks are measured
OTHERS_RANKS = (16, 64, 128)
SKEWED = {8: (16, 64), 32: (64, 128)}  # ranks by the number of adapters


def grouped_mm(one: LoraSet) -> torch.Tensor:
    rank = one.weights.shape[1] // 3
    made = torch._grouped_mm(one.x, one.weights.mT, offs=one.offsets[1:])
    return made.view(-1, 3, rank).permute(1, 0, 2).contiguous()


def linear(one: LoraSet) -> torch.Tensor:
    """Computes the shrink of a single adapter as one product."""
    made = torch.nn.functional.linear(one.x, one.weights[0])
    return made.view(made.shape[0], 3, -1).permute(1, 0, 2).contiguous()


def linears(one: LoraSet) -> list[torch.Tensor]:
    """Computes the shrink of a single adapter as three products."""
    return [torch.nn.functional.linear(one.x, part[0]) for part in one.parts]


def gather(one: LoraSet) -> torch.Tensor:
    rank = one.weights.shape[1] // 3
    made = torch.bmm(one.weights[one.ids], one.x.unsqueeze(2))
    return made.view(-1, 3, rank).permute(1, 0, 2).contiguous()


def loop(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(x.shape[0], weights.shape[1])
    for adapter in range(weights.shape[0]):
        total = total + (x * (ids == adapter).unsqueeze(1).to(x.dtype)) @ weights[adapter].t()
    return total.view(x.shape[0], 3, -1).permute(1, 0, 2).contiguous()


def is_first(shape: LoraShape) -> bool:
    """Whether further variants, such as `unsorted`, are timed for the shape."""
    return (shape.hidden, shape.rank, shape.adapters) == (4096, 16, 8)


def compiled_loop(one: LoraSet) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]:
    """Returns the loop, compiled for the shapes of a set."""
    torch._dynamo.reset()
    compiled = torch.compile(loop, dynamic=False)
    compiled(one.x, one.weights, one.ids)
    return compiled


def compile_loop_quietly(shape: LoraShape) -> str:
    """Compiles the loop into Inductor's cache. Returns the text of the error, or "" if there is
    none."""
    try:
        compiled_loop(make_set(shape))
    except Exception as error:  # the error is the result
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def shrink_variants(shape: LoraShape, sets: list[LoraSet], *, with_loop: bool) -> Variants:
    op = lora_shrink.OP.torch_op
    unsorted = [one.ids[one.order] for one in sets]
    calls = [lora_shrink.OP.split(arguments(one)) for one in sets]
    variants: Variants = {"tilewright": lambda i: op(*calls[i][0], **calls[i][1])}
    if shape.apart:
        return variants | {"linears": lambda i: linears(sets[i])}
    variants["grouped_mm"] = lambda i: grouped_mm(sets[i])
    if is_first(shape):
        variants["unsorted"] = lambda i: op(sets[i].x, sets[i].weights, None, unsorted[i])
    if 6 * shape.tokens * shape.rank * shape.hidden <= GATHER_BYTES:
        variants["gather"] = lambda i: gather(sets[i])
    if shape.adapters == 1:
        variants["linear"] = lambda i: linear(sets[i])
    if with_loop:
        compiled = compiled_loop(sets[0])
        variants["loop"] = lambda i: compiled(sets[i].x, sets[i].weights, sets[i].ids)
    return variants


def exact(one: LoraSet) -> torch.Tensor:
    """Computes the shrink in float64. The result is planar."""
    total = one.x.new_zeros(one.x.shape[0], one.weights.shape[1], dtype=torch.float64)
    for adapter in one.ids.unique().tolist():
        rows = (one.ids == adapter).nonzero().flatten()
        total[rows] = one.x[rows].double() @ one.weights[adapter].double().t()
    return total.view(total.shape[0], 3, -1).permute(1, 0, 2)


def measure_shrink(shape: LoraShape, copy: float, *, with_loop: bool) -> dict[str, Any]:
    sets = make_sets(shape, most=MOST_CALLS)
    variants = shrink_variants(shape, sets, with_loop=with_loop)
    want = exact(sets[0])
    peer = grouped_mm(sets[0])  # the result with which all others are compared
    errors = {
        "tilewright_error": error(variants["tilewright"](0), want),
        "grouped_mm_error": error(peer, want),
    }
    if not errors["tilewright_error"] <= 1.05 * errors["grouped_mm_error"]:
        raise AssertionError(f"{shape}: less accurate than its peer: {errors}")
    times = timed(variants, len(sets))
    peers = {name: us for name, us in times.items() if name not in ("tilewright", "unsorted")}
    cpu = {}
    if is_first(shape) or shape.adapters == 1:
        cpu["cpu"] = round(cpu_us(lambda: lora_shrink.OP.call(arguments(sets[0]))), 1)
    columns = 3 * shape.rank
    least = shape.hidden * (shape.tokens + columns * sets[0].active) + shape.tokens * columns
    return {
        "op": "shrink",
        **describe(shape, sets[0]),
        **{name: round(us, 2) for name, us in times.items()},
        **cpu,
        "speedup_over_best": round(min(peers.values()) / times["tilewright"], 2),
        "of_copy": round(2 * least / (1e-6 * times["tilewright"] * copy), 3),
        **errors,
        **chosen(lora_shrink.OP.plan_for(arguments(sets[0]), "sm90")),
    }


def describe(shape: LoraShape, one: LoraSet) -> dict[str, Any]:
    return {
        "hidden": shape.hidden,
        "rank": shape.rank,
        "adapters": shape.adapters,
        "active": one.active,
        "tokens": shape.tokens,
        "routing": shape.routing,
        "weights": "separate" if shape.apart else "stacked",
    }


def arguments(one: LoraSet) -> lora_shrink.ShrinkArguments:
    if one.parts:
        q, k, v = one.parts
        return lora_shrink.ShrinkArguments(one.x, q_weight=q, k_weight=k, v_weight=v)
    offsets = None if one.weights.shape[0] == 1 else one.offsets
    return lora_shrink.ShrinkArguments(one.x, one.weights, offsets)


def expand_arguments(one: LoraSet, s: torch.Tensor) -> lora_expand.ExpandArguments:
    return lora_expand.ExpandArguments(s, *one.bases, *one.b, one.offsets)


def measure_expand(shape: LoraShape, copy: float) -> dict[str, Any]:
    sets = make_sets(shape, expand=True, most=MOST_CALLS)
    shrunk = [torch.randn(3, shape.tokens, shape.rank, device="cuda").bfloat16() for _ in sets]
    op = lora_expand.OP.torch_op

    def peer(i: int) -> list[torch.Tensor]:
        one, ends = sets[i], sets[i].offsets[1:]
        deltas = [
            torch._grouped_mm(s, b.mT, offs=ends) for s, b in zip(shrunk[i], one.b, strict=True)
        ]
        return [base + delta for base, delta in zip(one.bases, deltas, strict=True)]

    def ours(i: int) -> tuple[torch.Tensor, ...]:
        return op(shrunk[i], *sets[i].bases, *sets[i].b, sets[i].offsets)

    want = lora_expand.reference(in_float64(sets[0], shrunk[0]))
    errors = {
        "tilewright_error": max(error(a, b) for a, b in zip(ours(0), want, strict=True)),
        "grouped_mm_error": max(error(a, b) for a, b in zip(peer(0), want, strict=True)),
    }
    if not errors["tilewright_error"] <= errors["grouped_mm_error"]:
        raise AssertionError(f"{shape}: less accurate than its peer: {errors}")
    times = timed({"tilewright": ours, "grouped_mm": peer}, len(sets))
    least = sum(shape.widths) * (2 * shape.tokens + shape.rank * sets[0].active)
    least += 3 * shape.tokens * shape.rank
    report = lora_expand.OP.plan_for(expand_arguments(sets[0], shrunk[0]), "sm90")
    return {
        "op": "expand",
        **describe(shape, sets[0]),
        **{name: round(us, 2) for name, us in times.items()},
        "speedup_over_best": round(times["grouped_mm"] / times["tilewright"], 2),
        "of_copy": round(2 * least / (1e-6 * times["tilewright"] * copy), 3),
        **errors,
        **chosen(report),
    }


def in_float64(one: LoraSet, s: torch.Tensor) -> lora_expand.ExpandArguments:
    wide = [t.double() for t in (s, *one.bases, *one.b)]
    return lora_expand.ExpandArguments(*wide, one.offsets)


def shapes_of(options: argparse.Namespace) -> Iterator[LoraShape]:
    """Yields the shapes to measure. Shapes with 8 adapters come first."""
    for adapters in sorted(options.adapters, key=lambda adapters: adapters != ALL_RANKS):
        for hidden in options.hidden:
            for rank in options.ranks:
                if adapters != ALL_RANKS and rank not in OTHERS_RANKS:
                    continue
                for tokens in options.tokens:
                    yield LoraShape(hidden, rank, adapters, tokens)
                    if adapters == 1:
                        yield LoraShape(hidden, rank, adapters, tokens, apart=True)
        for rank in SKEWED.get(adapters, ()):
            for tokens in options.skewed:
                yield LoraShape(options.hidden[0], rank, adapters, tokens, "skewed")


def kernels_of(shapes: list[LoraShape], expands: list[LoraShape]) -> list[KernelSpec]:
    """Returns every kernel that will be timed. No GPU is needed."""
    specs: dict[KernelSpec, None] = {}
    for shape in shapes:
        x = torch.empty(shape.tokens, shape.hidden, dtype=torch.bfloat16, device="meta")
        w = x.new_empty(shape.adapters, 3 * shape.rank, shape.hidden)
        offsets = x.new_empty(shape.adapters + 1, dtype=torch.int32)
        ids = x.new_empty(shape.tokens, dtype=torch.int32)
        parts = (x.new_empty(1, shape.rank, shape.hidden),) * 3 if shape.apart else ()
        one = LoraSet(x, w, ids, offsets, ids, parts=parts)
        specs |= dict.fromkeys(lora_shrink.OP.plan_for(arguments(one), "sm90").specs)
        if is_first(shape):
            a = lora_shrink.ShrinkArguments(x, w, None, ids)
            specs |= dict.fromkeys(lora_shrink.OP.plan_for(a, "sm90").specs)
    for shape in expands:
        s = torch.empty(3, shape.tokens, shape.rank, dtype=torch.bfloat16, device="meta")
        bases = [s.new_empty(shape.tokens, width) for width in shape.widths]
        b = [s.new_empty(shape.adapters, width, shape.rank) for width in shape.widths]
        offsets = s.new_empty(shape.adapters + 1, dtype=torch.int32)
        e = lora_expand.ExpandArguments(s, *bases, *b, offsets)
        specs |= dict.fromkeys(lora_expand.OP.plan_for(e, "sm90").specs)
    return list(specs)


def compile_all(specs: list[KernelSpec], loops: list[LoraShape]) -> None:
    """Compiles every kernel and loop that will be timed, in parallel."""
    with processes() as pool:
        looped = [pool.submit(compile_loop_quietly, shape) for shape in loops]
        outcomes = [*pool.map(compile_quietly, specs, chunksize=2)]
        outcomes += [future.result() for future in looped]
    for failure in filter(None, outcomes):
        print(failure, flush=True)
    print(
        f"{len(specs)} kernels, {len(loops)} loops, {sum(map(bool, outcomes))} failed", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64, 128])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--skewed", type=int, nargs="*", default=[64, 512, 8192])
    parser.add_argument("--expand", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--delta", type=int, nargs="*", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--loop", type=int, nargs="*", default=[64, 512, 8192])
    options = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(0)
    shapes = list(shapes_of(options))
    expands = [LoraShape(4096, rank, 8, t) for rank in (16, 64) for t in options.expand]
    loops = [
        shape
        for shape in shapes
        if is_first(shape) and shape.routing == "uniform" and shape.tokens in options.loop
    ]
    deltas = [LoraShape(4096, rank, 1, t) for rank in (16, 64) for t in options.delta]
    compile_all([*kernels_of(shapes, expands), *delta_specs(deltas)], loops)
    gc.freeze()  # shortens the garbage collection of every capture
    copy = copy_bytes_per_s()
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []

    def add(shape: LoraShape, measure: Callable[[], dict[str, Any]]) -> None:
        try:
            row = measure()
        except Exception as error:  # the run goes on with the other rows
            row = {"shape": str(shape), "failed": f"{type(error).__name__}: {str(error)[:300]}"}
        rows.append({**row, "copy_tb_per_s": round(copy / 1e12, 3)})
        keep("lora", rows, options.out)
        print(row, flush=True)

    for shape in expands:
        add(shape, partial(measure_expand, shape, copy))
    for shape in deltas:
        add(shape, partial(measure_delta, shape))
    for shape in shapes:
        add(shape, partial(measure_shrink, shape, copy, with_loop=shape in loops))
    print(f"{len(rows)} rows after {time.monotonic() - started:.0f} s", flush=True)
    if any("failed" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
