"""The time model of a step: how long one unit of it takes, and what that is spent on.

    seconds = starts of kernels + (bytes' time ** 2 + products' time ** 2) ** 0.5

A kernel overlaps what it reads with what it multiplies, never wholly: the root of both squares lies
between the longer and their sum. Each rate is a share of the target's own (`codegen/targets.py`
`Target`), which is what a copy and a library's largest product reach. The shares are few, and each
names the kept record that it follows from. docs/predictions.md holds the model to measured steps.

The planners of single ops (`codegen/qkv/time.py`, `codegen/mla/plan.py`) rank the tiles of one
kernel by formulas of their own, which know those tiles; no time here changes their choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tilewright.codegen.targets import Target
from tilewright.compiler.report.traffic import Unit

#: First loads and last stores of a kernel, beside the start of an empty one. Fitted over the
#: decode steps of Llama-3-8B, DeepSeek-V2-Lite and MiniCPM3 (*_end_to_end.json, H200).
FILL_S = 0.5e-6

#: Shares of a copy's rate at which parts move bytes. Fused ops and libraries: fitted over the same
#: steps. Mixtures: moe.json, Mixtral, 16 to 256 tokens. Inductor's kernels read and write in turn
#: and have rows to reduce: the prompts of the same files.
MEMORY_SHARES = {"fused": 0.95, "library": 0.92, "inductor": 0.90}
MIXTURE_MEMORY_SHARE = 0.97
#: Of weights as codes: linears_quantized.json, int4 and fp8, one token.
CODES_MEMORY_SHARE = 0.89

#: Shares of the tensor cores' rate. A library's products of 1024 to 8192 rows, 700 to 790 TFLOP/s:
#: the prompts of Llama-3-8B and DeepSeek-V2-Lite. Mixtures: moe.json, Mixtral and DeepSeek-V3, 4096
#: and 8192 tokens.
PRODUCT_SHARE = 0.93
MIXTURE_SHARE = 0.80
#: Of codes that kernels decode: the steps of ct-w4a16 and ct-fp8-dynamic in quantised_step.json.
CODES_SHARE = 0.27
#: Codes of four bits that take long to decode, as they stand for floats or lie packed along rows:
#: how many an SM makes numbers of in a second, for tensor cores and for one token without them.
#: linears_quantized.json, gate_up and down, nvfp4 and mxfp4.
SLOW_CODES = frozenset({"nvfp4", "mxfp4", "nf4", "fp4", "int4_n"})
SLOW_CODES_PER_SM_S = 1.85e10
SLOW_CODES_PER_SM_S_ALONE = 3.6e10
#: Their bytes with those of scales, of which a block of 16 to 128 has one.
SLOW_CODE_BYTES = 0.55
#: Mixtures of codes: moe_quantized.json, fp8, 64 and 1024 tokens.
CODES_MIXTURE_SHARE = 0.40

#: Shares that attention reaches: of many queries under a mask in a tensor (cache_attention.json,
#: prefill, "mask": 182 to 333 TFLOP/s), and of a few, whose rows fill no tile (the same file,
#: mla-64x1000-128: 138 TFLOP/s).
PROMPT_ATTENTION_SHARE = 0.28
DECODE_ATTENTION_SHARE = 0.17
#: Queries of a sequence from which on they fill the rows of a tile.
MANY_QUERIES = 64


@dataclass(frozen=True)
class Spent:
    """Microseconds of a part, by what they are spent on; their sum is its modelled time. products:
    of activations with weights. between: bytes that parts hand to each other."""

    weights_us: float = 0.0
    caches_us: float = 0.0
    between_us: float = 0.0
    products_us: float = 0.0
    attention_us: float = 0.0
    starts_us: float = 0.0

    @property
    def us(self) -> float:
        return sum(getattr(self, one.name) for one in fields(self))


def spent_of(unit: Unit, caches: int, present: int | None, target: Target) -> Spent:
    """Returns the times of a unit by their causes.

    caches: bytes of caches that it moves. present: tokens in the caches of each sequence; None: the
    new ones alone.
    """
    rate = target.hbm_bytes_per_s * _memory_share(unit) / 1e6
    moved = [size / rate for size in (unit.weights, caches, unit.activations + unit.scratch)]
    product = 1e6 * unit.flops / (unit.flop_rate * _product_share(unit))
    product += 1e6 * _decoding_s(unit, target)
    attention = sum(
        1e6
        * read.flops_of(read.queries if present is None else present)
        / (unit.flop_rate * _attention_share(read.queries))
        for read in unit.cache_reads
    )
    parts = [*moved, product, attention]
    bytes_us, products_us = sum(moved), product + attention
    both = math.hypot(bytes_us, products_us) or 1.0
    # Each has the part of the root that its square is of the square.
    scales = (*[bytes_us / both] * len(moved), *[products_us / both] * 2)
    scaled = [part * scale for part, scale in zip(parts, scales, strict=True)]
    starts_us = 1e6 * unit.launches * (target.launch_s + FILL_S)
    return Spent(*[*scaled, starts_us])


def _memory_share(unit: Unit) -> float:
    if unit.kind == "fused" and unit.family == "moe":
        return CODES_MEMORY_SHARE if unit.codes else MIXTURE_MEMORY_SHARE
    return CODES_MEMORY_SHARE if unit.codes else MEMORY_SHARES[unit.kind]


def _product_share(unit: Unit) -> float:
    mixture = unit.family == "moe"
    if not unit.codes:
        return MIXTURE_SHARE if mixture else PRODUCT_SHARE
    if mixture:
        return CODES_MIXTURE_SHARE
    return CODES_SHARE


def _decoding_s(unit: Unit, target: Target) -> float:
    """Seconds that making numbers of a linear's codes takes beside what CODES_SHARE has of it."""
    if unit.codes not in SLOW_CODES or unit.family == "moe":
        return 0.0
    numbers = unit.weights / SLOW_CODE_BYTES
    alone = unit.flops < 3 * numbers  # 2 FLOPs of each number are one token's
    rate = SLOW_CODES_PER_SM_S_ALONE if alone else SLOW_CODES_PER_SM_S
    return numbers / (rate * target.num_sms)


def _attention_share(queries: int) -> float:
    return PROMPT_ATTENTION_SHARE if queries >= MANY_QUERIES else DECODE_ATTENTION_SHARE
