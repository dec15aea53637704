"""Compares plans of `cache_attention` with stored ones, for sequences of few and many keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.codegen.attention.test_plan import (
    H100,
    HEADS_OF_4,
    HEADS_OF_8,
    LATENTS,
    MANY_LATENTS,
    NARROW_HEADS,
    ROUNDED,
)
from tests.plans import FEW, check, said, steps
from tilewright.codegen.attention.plan import decode_config, decodes, prefill_config
from tilewright.codegen.attention.prefill_tiles import schedule
from tilewright.codegen.attention.problem import AttentionSizes, CacheProblem
from tilewright.codegen.targets import SM90, SM100, SM120, Target

PAGED = replace(HEADS_OF_8, paged=True, page_size=16)
PROBLEMS = {
    "8 heads": HEADS_OF_8,
    "4 heads": HEADS_OF_4,
    "narrow": NARROW_HEADS,
    "wide": replace(HEADS_OF_4, head_dim=256, v_dim=256),
    "odd": replace(HEADS_OF_8, head_dim=80, v_dim=96, group=5),
    "paged": PAGED,
    "wide pages": replace(PAGED, head_dim=192, v_dim=256),
    "fp8": replace(HEADS_OF_8, key_dtype="fp8e4nv"),
    "masked": replace(HEADS_OF_8, attn_mask="u8"),
    "masked, fp32": replace(PAGED, attn_mask="fp32"),
    "wide, masked": replace(HEADS_OF_4, head_dim=256, v_dim=256, attn_mask="bf16"),
    "ragged": replace(HEADS_OF_8, ragged=True, sequences=8),
    "tma": replace(HEADS_OF_8, tma=True),
    "latents": LATENTS,
    "many latents": MANY_LATENTS,
    "paged latents": replace(MANY_LATENTS, paged=True, page_size=64),
    "masked latents": replace(LATENTS, attn_mask="u8"),
    "rounded": ROUNDED,
}
KEYS = (1, 64, 65, 512, 1000, 2048, 4096, 16384)


def by_keys(problem: CacheProblem, target: Target, sequences: int, keys: int):
    return decode_config(problem, AttentionSizes(sequences, 1, keys), target)


def by_queries(problem: CacheProblem, target: Target, queries: int):
    return decode_config(problem, AttentionSizes(4, queries, 4096), target)


def order(problem: CacheProblem, target: Target, queries: int):
    return schedule(
        prefill_config(problem, target),
        AttentionSizes(8, queries, 8 * queries),
        target,
        heads=problem.num_heads,
        key_bytes=problem.key_bytes,
        ragged=problem.ragged,
    )


def decodes_all(problem: CacheProblem, queries: int) -> bool:
    return decodes(problem, AttentionSizes(8, queries, 1024))


def test_plans_of_decoding(pytestconfig) -> None:
    lines = {}
    for name, problem in PROBLEMS.items():
        for target in (SM90, H100, SM100, SM120):
            rate = f"{target.name} {target.hbm_bytes_per_s / 1e12:g} TB/s"
            for count in (1, 8, 64):
                plan = partial(by_keys, problem, target, count)
                lines[f"{name} {rate} {count} sequences, by keys"] = steps(plan, KEYS)
            plan = partial(by_queries, problem, target)
            lines[f"{name} {rate} by queries"] = steps(plan, (1, 2, 3, 4, 5, 8, 16, 64))
    check("attention_decoding", lines, pytestconfig)


def test_plans_of_many_queries(pytestconfig) -> None:
    lines = {}
    for name, problem in PROBLEMS.items():
        for target in (SM90, SM100, SM120):
            lines[f"{name} {target.name}"] = said(prefill_config(problem, target))
            plan = partial(order, problem, target)
            lines[f"{name} {target.name} tiles"] = steps(plan, (1, 64, 65, 1000, 5000))
        lines[f"{name} decodes"] = steps(partial(decodes_all, problem), FEW)
    check("attention_prefill", lines, pytestconfig)
