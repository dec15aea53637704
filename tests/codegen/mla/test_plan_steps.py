"""Compares plans of multi-head latent attention with stored ones, from few keys to many."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.codegen.mla.test_attention_plan import DENSE, RAGGED, WIDE
from tests.plans import check, steps
from tilewright.codegen.attention.problem import AttentionSizes
from tilewright.codegen.mla.attention_kernels import AttentionProblem
from tilewright.codegen.mla.attention_plan import attention_config, library_gains, rotates_queries
from tilewright.codegen.mla.key_kernels import LatentProblem, UpProblem
from tilewright.codegen.mla.plan import (
    DecodeSizes,
    absorbs,
    latent_config,
    up_config,
    uses_library,
)
from tilewright.codegen.operand import Operand
from tilewright.codegen.targets import SM90, SM100, SM120, Target

PROBLEMS = {
    "dense": DENSE,
    "wide": WIDE,
    "128 heads": replace(DENSE, num_heads=128),
    "ragged": RAGGED,
    "128 ragged": replace(RAGGED, sequences=128),
    "1024 ragged": replace(RAGGED, sequences=1024),
    "pointers": replace(DENSE, tma=False, rope_tma=False),
    "rope by pointers": replace(DENSE, rope_tma=False),
    "no rope": replace(DENSE, rope=0, rope_tma=False),
    "masked": replace(DENSE, attn_mask="u8"),
    "masked, fp32": replace(DENSE, attn_mask="fp32"),
    "wide, masked": replace(WIDE, attn_mask="u8"),
    "fp32 result": replace(DENSE, out="fp32", has_lse=True),
    "positioned": replace(DENSE, positioned=True),
    "fp8": replace(DENSE, dtype="fp8e4nv"),
    "fp8 by key": replace(DENSE, dtype="fp8e4nv", v_by_key=True),
    "fp8, masked": replace(DENSE, dtype="fp8e4nv", attn_mask="u8"),
}
KEYS = (1, 64, 65, 768, 1024, 1025, 2048, 3071, 3072, 8192, 65536)
UP = UpProblem(16, 128, 128, 512, Operand("bf16", (576,)), Operand("bf16", (512,)),
               Operand("bf16", (4096, 256)))  # fmt: skip
UPS = {
    "joint": UP,
    "heads apart": replace(UP, k=Operand("bf16", (6144, 384))),
    "odd heads apart": replace(UP, nope=80, v_dim=64, k=Operand("bf16", (6144, 384))),
    "limited": replace(UP, limited=True),
    "blocks": replace(UP, scale_block=(128, 128)),
    "narrow blocks": replace(UP, scale_block=(64, 64)),
    "separate": replace(UP, joint=False),
    "narrow, separate": replace(UP, joint=False, nope=32, v_dim=48, scale_block=(1, 256)),
}
LATENT = LatentProblem(512, 64, 0, 1e-6, False, 64, "flat", False, 0, "none", False, 1, 0.0, 1.0,
                       (1, 1, 1, 1), False)  # fmt: skip
DECODED = DecodeSizes(1, 2048, 16, 128, 64, 128, 512, 16, 1)


def by_keys(
    problem: AttentionProblem, target: Target, sequences: int, queries: int | None, keys: int
):
    return attention_config(problem, AttentionSizes(sequences, queries or keys, keys), target)


def gains(heads: int, count: int) -> bool:
    return library_gains(heads, AttentionSizes(2, count, count))


def of_keys(sizes: DecodeSizes, keys: int) -> bool:
    return absorbs(replace(sizes, keys=keys))


def test_plans_of_attention(pytestconfig) -> None:
    lines = {}
    for name, problem in PROBLEMS.items():
        for target in (SM90, SM100, SM120):
            for count in (1, 8):
                for queries in (1, 64, None):
                    lines[f"{name} {target.name} {count} x {queries or 'all'}, by keys"] = steps(
                        partial(by_keys, problem, target, count, queries), KEYS
                    )
            config = attention_config(problem, AttentionSizes(1, 512, 512), target)
            lines[f"{name} {target.name} rotates"] = str(rotates_queries(problem, config))
    for heads in (16, 128):
        lines[f"library {heads} heads"] = steps(partial(gains, heads))
    check("mla_attention", lines, pytestconfig)


def test_plans_around_attention(pytestconfig) -> None:
    lines = {}
    for target in (SM90, SM100):
        for name, problem in UPS.items():
            lines[f"up {name} {target.name}"] = steps(partial(up_config, problem, target=target))
            lines[f"up {name} {target.name} library"] = str(uses_library(problem, 100, target))
    for name, problem in {"store": LATENT, "both": replace(LATENT, keys="rows")}.items():
        lines[f"latents {name}"] = steps(partial(latent_config, problem))
    for rows in (16, 64, 128):
        for sequences in (0, 1, 2, 8):
            for queries in (1, 4, 16, 64):
                sizes = replace(DECODED, queries=queries, rows=rows, sequences=sequences)
                lines[f"absorbs {sequences} x {queries} in {rows} rows"] = steps(
                    partial(of_keys, sizes)
                )
    check("mla_plans", lines, pytestconfig)
