"""Compares QKV plans, candidates and modelled times with stored ones, from one token to many."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.codegen.qkv.test_plan import LLAMA_8B, UNMEASURED, problem
from tests.plans import check, said, short, steps
from tilewright.codegen.formats import AWQ_ORDER, Quantization
from tilewright.codegen.operand import Operand
from tilewright.codegen.qkv.candidates import candidates
from tilewright.codegen.qkv.plan import (
    choose,
    epilogue_config,
    library_choice,
    ranked,
)
from tilewright.codegen.qkv.problem import QkvProblem
from tilewright.codegen.qkv.time import shared_bytes
from tilewright.codegen.row_norm import RowNorm
from tilewright.codegen.targets import SM90, SM100, SM120, Target

HALF = {"rope_style": "half", "rotary_dim": 128, "rope_full_width": True}


def coded(name: str, block: tuple[int, int], scale: str, base=LLAMA_8B, **more):
    """Returns the problem with quantised weights."""
    words = "i32" if more.get("per_word") == 8 else "fp8e4nv" if name == "fp8" else "u8"
    strides = [int(rows < base.hidden) for rows in block]
    q = Quantization(name, block, (Operand(scale, tuple(strides)),) * 3, **more)
    each = replace(base.weights[0], dtype=words) if base.weights[0] else None
    return replace(base, weights=(each,) * 3, quantization=q)


NORM = RowNorm(Operand("bf16", (1,)), 1e-6, 0.0)
ROWS = {"weight": "fp8", "x_block": 4096}
PROBLEMS = {
    "llama3-8b": LLAMA_8B,
    "unmeasured": UNMEASURED,
    "half a rotation": problem(rope_style="half", rotary_dim=64),
    "fp32 tables": problem(**HALF, wide_tables=True),
    "interleaved": problem(rope_style="interleaved", rotary_dim=128, rope_full_width=True),
    "normed heads": problem(normed=(True, True), **HALF),
    "normed after rotation": problem(normed=(True, True), norm_after_rope=True, **HALF),
    "narrow heads": problem(2048, 32, 4, 64),
    "wide heads": problem(3072, 16, 16, 256),
    "odd heads": problem(2560, 20, 20, 80),
    "fp16": problem(dtype="fp16"),
    "norm of x": replace(LLAMA_8B, input_norm=NORM),
    "layer norm of x": replace(LLAMA_8B, input_norm=replace(NORM, kind="layer")),
    "float8": coded("fp8", (1, 4096), "fp32"),
    "float8 blocks": coded("fp8", (128, 128), "fp32"),
    "int8": coded("int8", (1, 4096), "bf16"),
    "int4 words": coded("int4_k", (1, 128), "bf16", per_word=8, zero_point=8),
    "awq": coded("int4_n", (1, 128), "bf16", per_word=8, order=AWQ_ORDER),
    "nvfp4": coded("nvfp4", (1, 16), "fp8e4nv", per_word=2),
    "nf4": coded("nf4", (1, 64), "fp32", per_word=2),
    "int4 normed": coded("int4_k", (1, 64), "bf16", problem(normed=(True, True), **HALF)),
    "int4, norm of x": coded("int4_k", (1, 128), "bf16", replace(LLAMA_8B, input_norm=NORM)),
}
COUNTS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1024, 1025, 2048, 8192)


def kernel(given: QkvProblem, num_tokens: int, target: Target, packed: bool):
    choice = choose(given, num_tokens, target, packed)
    return choice.name, choice.config, choice.epilogue, choice.source, choice.norms_x


def test_plans_of_projections(pytestconfig) -> None:
    lines = {}
    for name, given in PROBLEMS.items():
        for target in (SM90, SM100, SM120):
            for packed in (False, True)[: 2 if target is SM90 else 1]:
                lines[f"{name} {target.name} packed={packed}"] = steps(
                    partial(kernel, given, target=target, packed=packed), COUNTS
                )
    check("qkv", lines, pytestconfig)


def test_candidates_and_their_times(pytestconfig) -> None:
    lines = {}
    for name, given in PROBLEMS.items():
        for target in (SM90, SM100, SM120):
            for n in COUNTS[::2]:
                found = candidates(given, n, target)
                sized = [(config, shared_bytes(given, config, target)) for config in found]
                timed = ranked(given, n, target) if given.input_norm is None else []
                lines[f"{name} {target.name} {n}"] = f"{short(sized)} {short(timed)}"
            library = (library_choice(given, n, target, False, None).seconds for n in COUNTS)
            tiles = (said(epilogue_config(given.epilogue, n, target)) for n in COUNTS)
            lines[f"{name} {target.name} library"] = f"{short(library)} {short(tiles)}"
    check("qkv_candidates", lines, pytestconfig)
