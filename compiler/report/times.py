"""Models how long one unit of a step takes, and the causes of that time.

    seconds = starts of kernels + (bytes' time ** 2 + products' time ** 2) ** 0.5

A kernel overlaps its reads with its products, but never wholly: the root of the sum of squares lies
between the longer time and the sum of both. Each rate is a share of the target's own rate
(`codegen/targets.py` `Target`), which is the rate that a copy, or the largest product of a library,
reaches. The comment on each share names the stored measurements from which the share comes.
docs/predictions.md compares the cost model with measured steps.

The planners of single ops (`codegen/qkv/time.py`, `codegen/mla/plan.py`) rank the tiles of one
kernel by other formulas, which know these tiles. The times of this file do not change that
choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tilewright.codegen.targets import Target
from tilewright.compiler.report.traffic import Unit

#: The time of a kernel's first loads and last stores, in addition to the start of an empty kernel.
#: This constant, MEMORY_SHARE, PRODUCT_SHARE, MIXTURE_SHARE and PROMPT_ATTENTION_SHARE were fitted
#: together over the 101 steps in bfloat16 that are not held out. These are steps of 20 models on an
#: H100 (steps.json), and of Llama-3-8B, DeepSeek-V2-Lite and MiniCPM3 on an H200
#: (*_end_to_end.json).
FILL_S = 1.1e-6

#: The share of a copy's rate that parts reach when they move bytes.
MEMORY_SHARE = 0.98
#: How many times faster than memory the L2 cache is. This is an assumption: bytes that cross
#: between parts and fit into the L2 cache are still there for the next part. The prompts among the
#: steps to which FILL_S was fitted support this assumption: with it, the root mean square of all
#: errors falls from 4.7 to 4.3 %. These prompts do not distinguish a factor of 2 from a factor of
#: 3.
L2_SPEED = 2.0
#: The share of a copy's rate that mixtures reach when they read experts as codes. It comes from
#: moe_quantized.json. Linears of codes reach MEMORY_SHARE (linears_quantized.json, int4 and fp8,
#: one token).
CODES_MEMORY_SHARE = 0.89

#: The share of the tensor cores' rate that a library's products reach. Products with 1024 to 8192
#: rows reach 680 to 790 TFLOP/s.
PRODUCT_SHARE = 0.91
#: The share of the tensor cores' rate that mixtures reach. The share is 0.8 if each expert has many
#: tokens (moe.json, Mixtral and DeepSeek-V3, 4096 and 8192 tokens), and smaller for fewer tokens.
MIXTURE_SHARE = 0.74
#: The share of the tensor cores' rate that kernels reach with codes that they have decoded. This
#: constant and DECODED_PER_SM_S come from the linears of 16 to 128 tokens in
#: docs/quantised-performance.md and from the steps of ct-w4a16, ct-fp8-dynamic and bitsandbytes-nf4
#: in quantised_step.json.
CODES_SHARE = 0.75
#: The number of tokens that a kernel of codes multiplies by a weight after it has decoded the
#: weight. It decodes the weight again for the next tokens.
TOKENS_OF_TILE = 64
#: The numbers of 4-bit codes that an SM decodes in a second, by format: the first for kernels that
#: use tensor cores, the second for kernels of one token, which use none (linears_quantized.json).
#: Reading the memory hides the decoding of int4_k for one token, and of all codes of 8 bits.
DECODED_PER_SM_S = {
    "int4_k": (1.0e11, math.inf),
    "nvfp4": (4.6e10, 3.6e10),
    "mxfp4": (2.0e10, 5.0e10),
    "nf4": (2.7e10, 3.0e10),
    "fp4": (2.7e10, 3.0e10),
    "int4_n": (2.7e10, 3.0e10),
}
#: The bytes of a 4-bit code, including its part of the scale that a block of 16 to 128 codes
#: shares.
FOUR_BIT_BYTES = 0.55
#: The name of the kernel for linears of codes with many tokens. It decodes while the tensor cores
#: multiply, and reaches PRODUCT_SHARE.
MIXED_LINEAR = "mixed_linear"
#: The share of the tensor cores' rate that MIXED_LINEAR reaches in place of PRODUCT_SHARE, by
#: format. The two scales of NVFP4 take longer than the product (docs/quantised-performance.md,
#: "Prompts").
MIXED_SHARES = {"nvfp4": 0.78}
#: The share of the tensor cores' rate that mixtures reach if their weights are codes. It comes from
#: moe_quantized.json (fp8, 64 and 1024 tokens).
CODES_MIXTURE_SHARE = 0.40

#: The share of the tensor cores' rate that attention reaches for many queries under a mask in a
#: tensor (182 to 333 TFLOP/s in cache_attention.json, prefill, "mask").
PROMPT_ATTENTION_SHARE = 0.33
#: The share of the tensor cores' rate that attention reaches for few queries, whose rows fill no
#: tile (138 TFLOP/s in cache_attention.json, mla-64x1000-128).
DECODE_ATTENTION_SHARE = 0.17
#: The smallest number of queries of a sequence that fills the rows of a tile.
MANY_QUERIES = 64


@dataclass(frozen=True)
class Spent:
    """The modelled microseconds of a part, by cause. Their sum is the modelled time of the part.

    products_us: the time of products of activations with weights.
    between_us: the time of the bytes that cross between parts.
    """

    weights_us: float = 0.0
    caches_us: float = 0.0
    between_us: float = 0.0
    products_us: float = 0.0
    attention_us: float = 0.0
    starts_us: float = 0.0

    @property
    def us(self) -> float:
        return sum(getattr(self, one.name) for one in fields(Spent))


def spent_of(unit: Unit, caches: int, present: int | None, target: Target) -> Spent:
    """Returns the times of a unit by their causes.

    caches: the bytes of caches that the unit moves.
    present: the number of tokens in the caches of each sequence; None if only the new tokens count.
    """
    rate = target.hbm_bytes_per_s * _memory_share(unit) / 1e6
    between = _beyond_l2(unit.activations + unit.scratch, target)
    moved = [size / rate for size in (unit.weights, caches, between)]
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
    # The root is divided in proportion to the two squares, and each square in proportion to its
    # parts.
    scales = (*[bytes_us / both] * len(moved), *[products_us / both] * 2)
    scaled = [part * scale for part, scale in zip(parts, scales, strict=True)]
    starts_us = 1e6 * unit.launches * (target.launch_s + FILL_S)
    return Spent(*[*scaled, starts_us])


def _beyond_l2(size: int, target: Target) -> float:
    """Returns the number of bytes that memory moves in the time that it takes to pass `size` bytes
    from part to part. Bytes that fit into the L2 cache come from there and therefore count less."""
    near = min(size, target.l2_bytes)
    return size - near + near / L2_SPEED


def _memory_share(unit: Unit) -> float:
    return CODES_MEMORY_SHARE if unit.codes and unit.family == "moe" else MEMORY_SHARE


def _product_share(unit: Unit) -> float:
    mixture = unit.family == "moe"
    if not unit.codes:
        return MIXTURE_SHARE if mixture else PRODUCT_SHARE
    if mixture:
        return CODES_MIXTURE_SHARE
    return MIXED_SHARES.get(unit.codes, PRODUCT_SHARE) if _is_mixed(unit) else CODES_SHARE


def _is_mixed(unit: Unit) -> bool:
    return any(name.startswith(MIXED_LINEAR) for name in unit.kernels)


def _decoding_s(unit: Unit, target: Target) -> float:
    """Returns the seconds that decoding takes in addition to the products."""
    if unit.codes not in DECODED_PER_SM_S or _is_mixed(unit):
        return 0.0
    numbers = unit.weights / FOUR_BIT_BYTES
    tokens = unit.flops / (2 * numbers) if numbers else 0.0
    together, alone = DECODED_PER_SM_S[unit.codes]
    if tokens < 1.5:
        return numbers / (alone * target.num_sms)
    tiles = max(math.ceil(tokens / TOKENS_OF_TILE - 0.1), 1)
    return tiles * numbers / (together * target.num_sms)


def _attention_share(queries: int) -> float:
    return PROMPT_ATTENTION_SHARE if queries >= MANY_QUERIES else DECODE_ATTENTION_SHARE
