"""Kernel specs for weights of 4- and 8-bit codes: `qkv_quantized`, and `dequantize_weight` for the
library lowering; and what a config may be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.formats import AWQ_ORDER, Quantization
from tilewright.codegen.qkv.specs import (
    QkvProblem,
    SwappedConfig,
    fused_obstacle,
    kernel_spec,
    slices_of_heads,
    tiles_per_head,
)
from tilewright.codegen.spec import Constant, KernelSpec
from tilewright.codegen.targets import Target

# Groups of columns in a step whose sums are scaled apart.
_GROUPS = (1, 2, 4)
_COUNTED_UP = (tuple(range(8)), (0, 1))


def quantization_of(problem: QkvProblem) -> Quantization:
    assert problem.quantization is not None
    return problem.quantization


def quantized_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_quantized` cannot take the problem; None when it can."""
    q, finish = quantization_of(problem), problem.finish
    if (obstacle := fused_obstacle(finish)) is not None:
        return obstacle
    if q.differs:
        return q.differs
    if not q.coded_x and q.x_dtype != finish.dtype:
        return f"x of {q.x_dtype} where q is {finish.dtype}"
    if q.coded_x and q.weight_format != "fp8":
        return f"x of fp8 with weights of {q.weight_format}"
    if q.is_int4 and q.order not in ((), *_COUNTED_UP, AWQ_ORDER, (1, 0)):
        return f"nibbles in the order {list(q.order)}"
    if q.packed_rows and not finish.interleaved and finish.pair_half % q.per_word:
        return "words that hold both partners of a pair"
    if q.packed_rows and finish.head_dim % q.per_word:
        return "words that reach from head to head"
    if not any(_block_k_fits(problem, block_k) for block_k in (32, 64, 128)):
        return f"scales of {q.block[1]} columns"
    return None


def _block_k_fits(problem: QkvProblem, block_k: int) -> bool:
    """Whether steps of block_k columns meet whole scales."""
    q = quantization_of(problem)
    if q.x_scale is not None and q.x_scale.block < problem.hidden and q.x_scale.block % block_k:
        return False
    columns = q.block[1]
    groups = 1
    if columns < problem.hidden and columns % block_k:
        if block_k % columns or block_k // columns not in _GROUPS:
            return False
        groups = block_k // columns
    if q.coded_x:
        # The tensor core's own sums are short: none is longer than 128 products.
        most = 256 if q.scales_whole_rows(problem.hidden) else 128
        return groups == 1 and 32 <= block_k <= most
    return block_k // groups >= (32 if q.per_word == 8 and not q.packed_rows else 16)


def quantized_fits(problem: QkvProblem, config: SwappedConfig, target: Target) -> bool:
    """Whether a config is legal for the problem and within the target's limits."""
    q, finish = quantization_of(problem), problem.finish
    if quantized_obstacle(problem) is not None or not _block_k_fits(problem, config.block_k):
        return False
    if quantized_shared_bytes(problem, config) > target.max_shared_bytes - 2048:
        return False
    if not 8 <= config.block_p <= next_power_of_2(finish.pairs_per_head):
        return False
    if config.ordered_x and (q.packed_rows or q.coded_x):
        return False
    if config.split_k > 1 and cdiv(problem.hidden, config.block_k) < config.split_k:
        return False
    return not finish.has_norm or tiles_per_head(problem, config) == 1


def quantized_shared_bytes(problem: QkvProblem, config: SwappedConfig) -> int:
    """Shared memory of the staged words and activations, and of the operands made of them."""
    q = quantization_of(problem)
    rows, x_bytes = 2 * config.block_p, ELEMENT_BYTES[q.x_dtype]
    words = rows * config.block_k * q.code_bytes
    x = config.block_t * config.block_k * x_bytes
    made = 0 if q.coded_x else x
    if q.packed_rows or _staged_codes(config):
        made += rows * config.block_k * 2
    return int((words + x) * config.num_stages + made)


def _staged_codes(config: SwappedConfig) -> bool:
    """Whether the codes reach the tensor core by way of shared memory: tiles below wgmma's."""
    return 2 * config.block_p < 64


def quantized_spec(problem: QkvProblem, config: SwappedConfig, target: str) -> KernelSpec:
    """`qkv_quantized` for one problem and config; a norm over slices of a head is a ValueError."""
    q, finish = quantization_of(problem), problem.finish
    slices = slices_of_heads(problem, config)
    constants: dict[str, Constant] = {
        **finish.constants(),
        "HIDDEN": problem.hidden,
        "X_STRIDE": ordered_width(problem, config) if config.ordered_x else problem.x_stride,
        "X_IN_ORDER": config.ordered_x,
        "X_SCALE_STRIDES": q.x_scale.strides if q.x_scale else (0, 0),
        "X_SCALE_BLOCK": q.x_scale.block if q.x_scale else problem.hidden,
        "PER": q.per_word,
        "PACKED_ROWS": q.packed_rows,
        "INTERLEAVED_NIBBLES": q.order == AWQ_ORDER,
        "REVERSED": q.order == (1, 0),
        "SCALE_ROWS": q.block[0],
        "SCALE_COLUMNS": q.block[1] if q.block[1] < problem.hidden else _whole(problem, config),
        "PACKED_ZEROS": q.packed_zeros,
        "CODE_OFFSET": q.code_offset,
        "ZERO_OFFSET": q.zero_point - q.code_offset,
        "BLOCK_P": config.block_p,
        "TILES_PER_HEAD": slices,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
    }
    weights = [strides or problem.weight_strides[1] for strides in problem.weight_strides]
    for index, (letter, strides) in enumerate(zip("QKV", weights, strict=True)):
        constants[f"{letter}_WEIGHT_STRIDES"] = strides.all
        scale = q.scale_strides[index] or q.scale_strides[1] or (0, 0)
        zero = q.zero_strides[index] or q.zero_strides[1] or (0, 0)
        constants[f"{letter}_BLOCK_STRIDES"] = (*scale, *zero)
    has_v = problem.weight_strides[2] is not None
    arguments: dict[str, str | None] = {
        "x_ptr": f"*{q.x_dtype}",
        "x_scale_ptr": f"*{q.x_scale.dtype}" if q.x_scale else None,
    }
    for name, dtype in (
        ("weight", q.word_dtype),
        ("scale", q.scale_dtype),
        ("zero", q.zero_dtype),
    ):
        for letter in "qkv":
            there = dtype is not None and (letter != "v" or has_v)
            arguments[f"{letter}_{name}_ptr"] = f"*{dtype}" if there else None
    arguments |= {
        **finish.pointer_types(),
        "workspace_ptr": "*fp32" if config.split_k > 1 else None,
        "counters_ptr": "*i32" if config.split_k > 1 else None,
        **finish.count_types(),
    }
    return kernel_spec(
        "qkv.quantized", "qkv_quantized", problem, constants, arguments, config, target
    )


def ordered_width(problem: QkvProblem, config: SwappedConfig) -> int:
    """Columns of x as `order_x` writes it: whole steps."""
    return cdiv(problem.hidden, config.block_k) * config.block_k


# Tokens of one program of `order_x`.
_ORDER_TOKENS = 8


def order_spec(problem: QkvProblem, config: SwappedConfig, target: str) -> KernelSpec:
    """`order_x` for a config with ordered_x."""
    q = quantization_of(problem)
    whole = q.block[1] >= problem.hidden
    constants: dict[str, Constant] = {
        "HIDDEN": problem.hidden,
        "X_STRIDE": problem.x_stride,
        "PER": q.per_word,
        "INTERLEAVED_NIBBLES": q.order == AWQ_ORDER,
        "GROUPS": 1 if whole else max(config.block_k // q.block[1], 1),
        "BLOCK_T": _ORDER_TOKENS,
        "BLOCK_K": config.block_k,
    }
    pointer = f"*{q.x_dtype}"
    arguments: dict[str, str | None] = {
        "x_ptr": pointer,
        "ordered_ptr": pointer,
        "num_tokens": "i32",
    }
    few = SwappedConfig(8, _ORDER_TOKENS, config.block_k, 4, 1)
    return kernel_spec("qkv.quantized", "order_x", problem, constants, arguments, few, target)


def order_grid(problem: QkvProblem, config: SwappedConfig, num_tokens: int) -> tuple[int, int]:
    return cdiv(problem.hidden, config.block_k), cdiv(num_tokens, _ORDER_TOKENS)


def _whole(problem: QkvProblem, config: SwappedConfig) -> int:
    """Columns of a scale that is for all of them, also for those that the last step masks."""
    return max(problem.hidden, config.block_k)


@dataclass(frozen=True)
class DequantizeConfig:
    """`dequantize_weight`: block_r rows by block_k columns per program."""

    block_r: int
    block_k: int
    num_warps: int = 4


@dataclass(frozen=True)
class DequantizeProblem:
    """One weight, the index-th of q, k and v, made numbers of `dtype`."""

    quantized: QkvProblem
    index: int
    dtype: str

    @property
    def num_rows(self) -> int:
        finish = self.quantized.finish
        heads = finish.num_heads if self.index == 0 else finish.num_kv_heads
        return heads * finish.head_dim

    @property
    def unaligned(self) -> tuple[str, ...]:
        letter = "qkv"[self.index]
        names = {f"{letter}_{what}_ptr": f"{what}_ptr" for what in ("weight", "scale", "zero")}
        return tuple(names[name] for name in self.quantized.unaligned if name in names)


def dequantize_config(problem: DequantizeProblem) -> DequantizeConfig:
    """Tiles along which both the words and the numbers are read and written in runs."""
    q, strides = quantization_of(problem.quantized), problem.quantized.weight_strides[problem.index]
    assert strides is not None
    if q.packed_rows:
        return DequantizeConfig(128, 64)
    return DequantizeConfig(16, 256) if strides.column == 1 else DequantizeConfig(64, 64)


def dequantize_spec(problem: DequantizeProblem, target: str) -> KernelSpec:
    """`dequantize_weight` for one weight."""
    q, index = quantization_of(problem.quantized), problem.index
    config, finish = dequantize_config(problem), problem.quantized.finish
    strides, scale = problem.quantized.weight_strides[index], q.scale_strides[index]
    assert strides is not None
    assert scale is not None
    columns = min(q.block[1], next_power_of_2(problem.quantized.hidden))
    constants: dict[str, Constant] = {
        "NUM_ROWS": problem.num_rows,
        "HIDDEN": problem.quantized.hidden,
        "HEAD_DIM": finish.head_dim,
        "GROUP": finish.group if index == 0 else 0,
        "WEIGHT_STRIDES": strides.all,
        "BLOCK_STRIDES": (*scale, *(q.zero_strides[index] or (0, 0))),
        "PER": q.per_word,
        "PACKED_ROWS": q.packed_rows,
        "ORDER": q.order or tuple(range(q.per_word)),
        "SCALE_ROWS": q.block[0],
        "SCALE_COLUMNS": columns,
        "PACKED_ZEROS": q.packed_zeros,
        "ZERO_ORDER": q.order if len(q.order) == 8 else tuple(range(8)),
        "ZERO_POINT": q.zero_point,
        "BLOCK_R": config.block_r,
        "BLOCK_K": config.block_k,
        "UNIT": gcd(columns, config.block_k),
    }
    signature = {
        "weight_ptr": f"*{q.word_dtype}",
        "scale_ptr": f"*{q.scale_dtype}",
        "zero_ptr": f"*{q.zero_dtype}",
        "out_ptr": f"*{problem.dtype}",
    }
    if q.zero_dtype is None:
        del signature["zero_ptr"]
        constants["zero_ptr"] = None
    return KernelSpec.make(
        "qkv.dequantize",
        "dequantize_weight",
        constants,
        signature,
        divisible16=[name for name in signature if name not in problem.unaligned],
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
    return "fp32" if quantization_of(problem).coded_x else problem.finish.dtype


def dequantize_problems(problem: QkvProblem) -> list[DequantizeProblem]:
    """One for each weight there is."""
    there = [i for i, strides in enumerate(problem.weight_strides) if strides is not None]
    return [DequantizeProblem(problem, index, number_dtype(problem)) for index in there]
