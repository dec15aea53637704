"""Kernel specs for weights of 4- and 8-bit codes: `qkv_projection_swapped` for them, and
`dequantize_weight` for the library lowering; and what a config may be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.formats import AWQ_ORDER, Quantization
from tilewright.codegen.operand import Operand
from tilewright.codegen.qkv.problem import QkvProblem, fused_obstacle
from tilewright.codegen.qkv.specs import (
    SwappedConfig,
    swapped_spec,
    tiles_per_head,
)
from tilewright.codegen.spec import Constant, KernelSpec, constants_of
from tilewright.codegen.targets import Target

# Tokens of a tile where the tensor core takes codes and x out of registers: more spill (sm120).
MOST_TOKENS_IN_REGISTERS = 32


def quantization_of(problem: QkvProblem) -> Quantization:
    assert problem.quantization is not None
    return problem.quantization


def quantized_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection_swapped` cannot take the codes; None when it can."""
    q, heads = quantization_of(problem), problem.epilogue
    if (obstacle := fused_obstacle(heads)) is not None:
        return obstacle
    if problem.input_norm is not None:
        return "x meets codes in their order, not normed"
    if q.differs:
        return q.differs
    if not problem.coded_x and problem.x.dtype != heads.dtype:
        return f"x of {problem.x.dtype} where q is {heads.dtype}"
    if problem.coded_x and q.weight_format != "fp8":
        return f"x of fp8 with weights of {q.weight_format}"
    if not q.known_order:
        return f"nibbles in the order {list(q.order)}"
    if q.packed_rows and not heads.interleaved and heads.pair_half % q.per_word:
        return "words that hold both partners of a pair"
    if q.packed_rows and heads.head_dim % q.per_word:
        return "words that reach from head to head"
    if not any(_block_k_fits(problem, block_k) for block_k in (32, 64, 128)):
        return f"scales of {q.block[1]} columns"
    return None


def _block_k_fits(problem: QkvProblem, block_k: int) -> bool:
    """Whether steps of block_k columns meet whole scales."""
    q = quantization_of(problem)
    if not problem.coded_x:
        return q.step_fits(problem.hidden, block_k)
    # The tensor core's own sums are short: none is longer than 128 products.
    most = 256 if q.scales_whole_rows(problem.hidden) else 128
    return q.groups_in(problem.hidden, block_k) == 1 and 32 <= block_k <= most


def quantized_fits(problem: QkvProblem, config: SwappedConfig, target: Target) -> bool:
    """Whether a config is legal for the problem and within the target's limits."""
    q, heads = quantization_of(problem), problem.epilogue
    if quantized_obstacle(problem) is not None or not _block_k_fits(problem, config.block_k):
        return False
    if quantized_shared_bytes(problem, config, target) > target.max_shared_bytes - 2048:
        return False
    if not 8 <= config.block_p <= next_power_of_2(heads.pairs_per_head):
        return False
    if target.multiplies_registers and config.block_t > MOST_TOKENS_IN_REGISTERS:
        return False
    if config.ordered_x and (q.packed_rows or problem.coded_x):
        return False
    if config.split_k > 1 and cdiv(problem.hidden, config.block_k) < config.split_k:
        return False
    return not heads.has_norm or tiles_per_head(problem, config) == 1


def quantized_shared_bytes(problem: QkvProblem, config: SwappedConfig, target: Target) -> int:
    """Shared memory of the staged words and activations, and of the operands made of them."""
    q = quantization_of(problem)
    rows, x_bytes = 2 * config.block_p, ELEMENT_BYTES[problem.x.dtype]
    words = rows * config.block_k * q.code_bytes
    x = config.block_t * config.block_k * x_bytes
    made = 0 if problem.coded_x else x
    if q.packed_rows or _staged_codes(q, config, target):
        made += rows * config.block_k * 2
    return int((words + x) * config.num_stages + made)


def _staged_codes(q: Quantization, config: SwappedConfig, target: Target) -> bool:
    """Whether the codes reach the tensor core by way of shared memory: tiles below wgmma's, and
    words of eight codes of a row where its threads hold fewer of them side by side (mma.sync)."""
    return 2 * config.block_p < 64 or (target.multiplies_registers and q.per_word == 8)


def quantized_spec(problem: QkvProblem, config: SwappedConfig, target: str) -> KernelSpec:
    """`qkv_projection_swapped` of weights of codes."""
    q = quantization_of(problem)
    constants: dict[str, Constant] = {
        "X_IN_ORDER": config.ordered_x,
        "X_SCALE_STRIDES": q.x_scale.strides if q.x_scale else (0, 0),
        "X_SCALE_BLOCK": q.x_block if q.x_scale else problem.hidden,
        **q.block_constants(problem.hidden, config.block_k),
    }
    if config.ordered_x:
        constants["X_STRIDE"] = ordered_width(problem, config)
    for index, letter in enumerate("QKV"):
        there = index if problem.weights[index] else 1
        constants[f"{letter}_BLOCK_STRIDES"] = q.block_strides(there)
    return swapped_spec(problem, config, target, constants)


def ordered_width(problem: QkvProblem, config: SwappedConfig) -> int:
    """Columns of x as `order_x` writes it: whole steps."""
    return cdiv(problem.hidden, config.block_k) * config.block_k


# Tokens of one program of `order_x`.
_ORDER_TOKENS = 8


def order_spec(problem: QkvProblem, config: SwappedConfig, target: str) -> KernelSpec:
    """`order_x` for a config with ordered_x."""
    q = quantization_of(problem)
    whole = q.block[1] >= problem.hidden
    return KernelSpec.of(
        "qkv.quantized",
        "order_x",
        {
            "HIDDEN": problem.hidden,
            "X_STRIDE": problem.x.strides[0],
            "PER": q.per_word,
            "INTERLEAVED_NIBBLES": q.order == AWQ_ORDER,
            "GROUPS": 1 if whole else max(config.block_k // q.block[1], 1),
            "BLOCK_T": _ORDER_TOKENS,
            "BLOCK_K": config.block_k,
        },
        {
            "x_ptr": problem.x,
            "ordered_ptr": Operand(problem.x.dtype),
            "num_tokens": problem.epilogue.counts()["num_tokens"],
        },
        num_warps=4,
        num_stages=1,
        target=target,
    )


def order_grid(problem: QkvProblem, config: SwappedConfig, num_tokens: int) -> tuple[int, int]:
    return cdiv(problem.hidden, config.block_k), cdiv(num_tokens, _ORDER_TOKENS)


@dataclass(frozen=True)
class DequantizeConfig:
    """`dequantize_weight`: block_r rows by block_k columns per program."""

    block_r: int
    block_k: int
    num_warps: int = 4


@dataclass(frozen=True)
class DequantizeProblem:
    """One weight, the index-th of q, k and v, as numbers: rows of `out`."""

    quantized: QkvProblem
    index: int
    out: Operand

    @property
    def num_rows(self) -> int:
        heads = self.quantized.epilogue
        return (heads.num_kv_heads if self.index else heads.num_heads) * heads.head_dim

    @property
    def weight(self) -> Operand:
        weight = self.quantized.weights[self.index]
        assert weight is not None
        return weight


def dequantize_config(problem: DequantizeProblem) -> DequantizeConfig:
    """Tiles along which both the words and the numbers are read and written in runs."""
    if quantization_of(problem.quantized).packed_rows:
        return DequantizeConfig(128, 64)
    k_major = problem.weight.strides[-1] == 1
    return DequantizeConfig(16, 256) if k_major else DequantizeConfig(64, 64)


def dequantize_spec(problem: DequantizeProblem, target: str) -> KernelSpec:
    """`dequantize_weight` for one weight."""
    q, index = quantization_of(problem.quantized), problem.index
    config, heads = dequantize_config(problem), problem.quantized.epilogue
    scale, zero = q.scales[index], q.zeros[index]
    columns = min(q.block[1], next_power_of_2(problem.quantized.hidden))
    return KernelSpec.of(
        "qkv.dequantize",
        "dequantize_weight",
        {
            "NUM_ROWS": problem.num_rows,
            "HIDDEN": problem.quantized.hidden,
            "HEAD_DIM": heads.head_dim,
            "GROUP": heads.group if index == 0 else 0,
            "WEIGHT_STRIDES": problem.weight.strides,
            "BLOCK_STRIDES": q.block_strides(index),
            "PER": q.per_word,
            **constants_of(q, "packed_rows", "packed_zeros", "zero_point"),
            "ORDER": q.order or tuple(range(q.per_word)),
            "SCALE_ROWS": q.block[0],
            "SCALE_COLUMNS": columns,
            "ZERO_ORDER": q.order if len(q.order) == 8 else tuple(range(8)),
            **constants_of(config, "block_r", "block_k"),
            "UNIT": gcd(columns, config.block_k),
        },
        {
            "weight_ptr": problem.weight,
            "scale_ptr": scale,
            "zero_ptr": zero,
            "out_ptr": problem.out,
        },
        num_warps=config.num_warps,
        num_stages=1,
        target=target,
    )


def dequantize_grid(problem: DequantizeProblem) -> tuple[int, int]:
    config = dequantize_config(problem)
    return (
        cdiv(problem.num_rows, config.block_r),
        cdiv(problem.quantized.hidden, config.block_k),
    )


def number_dtype(problem: QkvProblem) -> str:
    """What the library lowering makes of codes: numbers of q's type, fp32 where x has codes too,
    since a product of rounded numbers would be less than x's and the weight's own."""
    return "fp32" if problem.coded_x else problem.epilogue.dtype


def dequantize_problems(problem: QkvProblem) -> list[DequantizeProblem]:
    """One for each weight there is; the numbers are rows of one tensor, one weight after the
    other."""
    dtype, first = number_dtype(problem), 0
    made = []
    for index, weight in enumerate(problem.weights):
        if weight is not None:
            aligned = first * problem.hidden * ELEMENT_BYTES[dtype] % 16 == 0
            made.append(DequantizeProblem(problem, index, Operand(dtype, aligned=aligned)))
            first += made[-1].num_rows
    return made
