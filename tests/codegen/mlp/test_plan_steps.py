"""Compares plans of linears with stored ones, from one token to many."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.plans import check, steps
from tilewright.codegen.formats import AWQ_ORDER, Quantization
from tilewright.codegen.mlp.mixed import (
    mixed_config,
    mixed_obstacle,
    most_decoded,
    pair_config,
    workspace,
)
from tilewright.codegen.mlp.plan import (
    dot_config,
    dot_obstacle,
    linear_config,
    made_bytes,
    most_tokens,
    multiplies_apart,
    orders_x,
    round_config,
    stage_bytes,
    takes_library,
    takes_norm,
)
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.operand import Operand
from tilewright.codegen.row_norm import RowNorm
from tilewright.codegen.targets import SM90, SM100, SM120, Target

GATE = LinearProblem(14336, 4096, "bf16", gated=True, k_major=True)
DOWN = LinearProblem(4096, 14336, "bf16", gated=False, k_major=True)
NORM = RowNorm(Operand("bf16", (1,)), 1e-6, 0.0)


def coded(problem: LinearProblem, name: str, columns: int, scale: str, **more) -> LinearProblem:
    """Returns a problem whose weights are quantised. In each row, `columns` codes share a scale."""
    words = "i32" if more.get("per_word") == 8 else "fp8e4nv" if name == "fp8" else "u8"
    scales = (Operand(scale, (problem.k // columns, int(columns < problem.k))), None, None)
    q = Quantization(name, (1, columns), scales, **more)
    return replace(problem, weight=words, quantization=q)


def formats(base: LinearProblem) -> dict[str, LinearProblem]:
    zero = (Operand("u8", (base.k // 64, 1)), None, None)
    return {
        "plain": base,
        "normed": replace(base, norm=NORM),
        "across": replace(base, k_major=False),
        "float8": coded(base, "fp8", base.k, "fp32"),
        "float8 in blocks": coded(base, "fp8", 128, "fp32"),
        "float8, exponents": coded(base, "fp8", 128, "u8"),
        "int8": coded(base, "int8", base.k, "bf16"),
        "int8 by groups": coded(base, "int8", 64, "bf16"),
        "int4 words": coded(base, "int4_k", 128, "bf16", per_word=8, zero_point=8),
        "int4 zeros": coded(base, "int4_k", 64, "bf16", per_word=8, zeros=zero),
        "int4 bytes": coded(base, "int4_k", 64, "fp16", per_word=2),
        "added zeros": coded(base, "int4_k_offset", 64, "bf16", per_word=8, zeros=zero),
        "awq": coded(base, "int4_n", 128, "bf16", per_word=8, order=AWQ_ORDER),
        "nvfp4": coded(base, "nvfp4", 16, "fp8e4nv", per_word=2),
        "nvfp4 words": coded(base, "nvfp4", 16, "fp8e4nv", per_word=8),
        "mxfp4": coded(base, "mxfp4", 32, "u8", per_word=2),
        "mxfp4 words": coded(base, "mxfp4", 32, "u8", per_word=8),
        "nf4": coded(base, "nf4", 64, "fp32", per_word=2),
        "nf4 words": coded(base, "nf4", 256, "fp32", per_word=8),
    }


PROBLEMS = {
    f"{name} {kind}": problem
    for name, base in {
        "gate": GATE,
        "down": DOWN,
        "small": replace(DOWN, n=1024, k=2560),
        "small gate": replace(GATE, n=9728, k=2560),
    }.items()
    for kind, problem in formats(base).items()
}
COUNTED = (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33, 48, 64, 65, 96, 97, 128, 129, 256)


def ways(problem: LinearProblem, target: Target, num_tokens: int):
    return (
        takes_library(problem, num_tokens, target),
        multiplies_apart(problem, num_tokens, target),
        orders_x(problem, num_tokens, target),
        dot_obstacle(problem, num_tokens) is None,
        dot_obstacle(problem, num_tokens, bytes_fill_words=False) is None,
    )


def memory(n: int, k: int, target: Target, num_tokens: int) -> tuple[int, int]:
    return workspace(mixed_config(n, k, num_tokens, target))


def test_plans_of_few_tokens(pytestconfig) -> None:
    lines = {}
    for name, problem in PROBLEMS.items():
        for target in (SM90, SM100, SM120):
            config = linear_config(problem, 16, target)
            tile = (config.block_n, config.block_t, config.block_k)
            size = stage_bytes(problem, *tile), made_bytes(problem, *tile)
            plan = steps(partial(linear_config, problem, target=target), COUNTED)
            lines[f"{name} {target.name}"] = f"{size} {plan}"
            lines[f"{name} {target.name} how"] = steps(partial(ways, problem, target))
        if problem.quantization is not None:
            lines[f"{name} dots"] = str(dot_config(problem))
    check("mlp_few", lines, pytestconfig)


def test_plans_of_many_tokens(pytestconfig) -> None:
    lines = {}
    for n, k in ((14336, 4096), (4096, 14336), (1024, 2560), (28672, 8192)):
        for target in (SM90, SM100):
            name = f"{n} x {k} {target.name}"
            lines[name] = steps(partial(mixed_config, n, k, target=target))
            tokens = (1, 100, 1000, 10000)
            lines[f"{name} memory"] = steps(partial(memory, n, k, target), tokens)
            lines[f"{name} pair"] = steps(partial(pair_config, n, k, target=target))
    for name, problem in PROBLEMS.items():
        obstacles = [mixed_obstacle(problem, dtype, SM90) is None for dtype in ("bf16", "fp16")]
        q = problem.quantization
        lines[f"{name} mixed"] = f"{obstacles} {q and most_decoded(q, problem.k)}"
    check("mlp_many", lines, pytestconfig)


def test_plans_of_norms_and_rounding(pytestconfig) -> None:
    lines = {}
    for columns in (512, 1000, 4096, 16384, 32768):
        for group in (0, 128):
            for whole in (False, True):
                lines[f"round {columns} by {group} {whole}"] = steps(
                    partial(round_config, columns, group, whole, target=SM90)
                )
        for kind in ("rms", "layer"):
            for is_coded in (False, True):
                lines[f"norm {kind} {columns} {is_coded}"] = steps(
                    partial(takes_norm, kind, columns=columns, coded=is_coded)
                )
    flags = [(w, c, r) for w in (1, 2) for c in (False, True) for r in (False, True)]
    lines["most tokens"] = str([most_tokens(*one) for one in flags])
    check("mlp_rows", lines, pytestconfig)
