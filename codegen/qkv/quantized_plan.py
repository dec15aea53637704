"""Configs worth a try for quantised weights, and how long they should take.

Times come from `measured_quantized.json` (written by `benchmarks/qkv_quantized.py`) where it has
the problem's dims and format, else from the model here: the memory's time, the time to make codes
of words, that of the tensor cores, and what every launch costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.formats import Quantization
from tilewright.codegen.qkv.kernels import SwappedConfig, tiles_per_head
from tilewright.codegen.qkv.problem import QkvProblem, fused_obstacle
from tilewright.codegen.targets import Target

# Tokens of a tile where the tensor core takes codes and x out of registers: more spill (sm120).
MOST_TOKENS_IN_REGISTERS = 32
# Codes that an SM unpacks in a second, by bytes of a code; fitted on an H200.
_CODES_PER_SM_S = {0.5: 9.0e10, 1.0: 9.0e10}
# Share of the tensor cores' rate that tiles of few tokens and of more reach; those of fewer than 64
# take as long as those of 64.
_MMA_SHARES = (0.75, 0.55)
_FILL_S = 1.5e-6
_SPLIT_S = 1.0e-6
# Of the kernel that puts x in order.
_ORDER_S = 1.5e-6


def quantized_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection_swapped` cannot take the codes; None when it can."""
    q, heads = problem.codes, problem.epilogue
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
    q = problem.codes
    if not problem.coded_x:
        return q.step_fits(problem.hidden, block_k)
    # The tensor core's own sums are short: none is longer than 128 products.
    most = 256 if q.scales_whole_rows(problem.hidden) else 128
    return q.groups_in(problem.hidden, block_k) == 1 and 32 <= block_k <= most


def quantized_fits(problem: QkvProblem, config: SwappedConfig, target: Target) -> bool:
    """Whether a config is legal for the problem and within the target's limits."""
    q, heads = problem.codes, problem.epilogue
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
    q = problem.codes
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


def quantized_configs(problem: QkvProblem, num_tokens: int) -> Iterator[SwappedConfig]:
    """What was worth its while on an H200, in any format measured.

    Few tokens: small tiles in many parts of K. More: x put in order once, and not by every program.
    """
    q = problem.codes
    whole = next_power_of_2(problem.epilogue.pairs_per_head)
    slices = sorted({min(32, whole), whole})
    block_k = q.longest_step(problem.hidden)
    free = q.packed_rows or problem.coded_x
    block_t = max(16, next_power_of_2(num_tokens))
    if num_tokens <= 32:
        for block_p in slices:
            for split_k in (2, 3, 4, 8):
                yield SwappedConfig(block_p, block_t, block_k, 4, 3, split_k)
                if not free:
                    yield SwappedConfig(block_p, block_t, block_k, 4, 3, split_k, ordered_x=True)
            yield SwappedConfig(block_p, block_t, block_k, 4, 6)
            yield SwappedConfig(block_p, block_t, 2 * block_k, 4, 6)
        return
    tiles = [(block_p, tokens, 4) for block_p in slices for tokens in (32, 64)]
    tiles += [(whole, 64, 8)]
    if num_tokens > 64:
        tiles = [(block_p, tokens, 4) for block_p in slices for tokens in (64, 128)]
        tiles += [(whole, 64, 8), (whole, 128, 8)]
    for block_p, tokens, warps in tiles:
        for split_k in (1, 2) if num_tokens <= 256 else (1,):
            for stages in (3, 4):
                yield SwappedConfig(block_p, tokens, block_k, warps, stages, split_k, not free)


def quantized_bytes(problem: QkvProblem, num_tokens: int) -> float:
    """Least bytes of global memory: codes, scales and x read once, q and the slots written once."""
    q, size = problem.codes, ELEMENT_BYTES[problem.epilogue.dtype]
    blocks = cdiv(problem.num_rows, q.block[0]) * cdiv(problem.hidden, q.block[1])
    per_token = ELEMENT_BYTES[problem.x.dtype] * problem.hidden + size * problem.num_rows
    codes = q.code_bytes * problem.hidden * problem.num_rows
    scale = q.scales[0]
    assert scale is not None
    return codes + blocks * ELEMENT_BYTES[scale.dtype] + num_tokens * per_token


def quantized_estimate(
    problem: QkvProblem, config: SwappedConfig, num_tokens: int, target: Target
) -> float:
    """Expected seconds of the kernel for weights of codes."""
    q = problem.codes
    rows, columns, split = 2 * config.block_p, config.block_t, config.split_k
    row_tiles = problem.epilogue.heads_in_all * tiles_per_head(problem, config)
    tiles = row_tiles * cdiv(num_tokens, columns) * split
    per_sm = cdiv(tiles, target.num_sms)
    overhead = target.launch_s + _FILL_S
    if split > 1:
        overhead += _SPLIT_S + 8 * rows * columns * tiles / target.hbm_bytes_per_s
    depth = problem.hidden / split
    together = max(min(per_sm, _resident(problem, config, target)), 1)
    unpacked = 0.0 if problem.coded_x else per_sm * rows * depth / _CODES_PER_SM_S[q.code_bytes]
    # One program alone hides little of what it waits for.
    unpacked *= 1.6 if together == 1 and config.num_warps == 4 else 1.0
    if config.ordered_x:
        overhead += _ORDER_S
    elif not (problem.coded_x or q.packed_rows):
        unpacked += per_sm * columns * depth / (2 * _CODES_PER_SM_S[1.0])
    # Words along the rows reach the tensor core by way of shared memory.
    unpacked *= 2.0 if q.packed_rows else 1.0
    share = _MMA_SHARES[columns > 32]
    rate = target.flops_per_s(problem.x.dtype) / target.num_sms * share
    multiplied = per_sm * 2 * rows * max(columns, 64) * depth / rate
    staged = (
        config.num_stages
        * config.block_k
        * (rows * q.code_bytes + columns * ELEMENT_BYTES[problem.x.dtype])
    )
    in_flight = together * staged * (1 - 1 / config.num_stages)
    reach = min(in_flight / target.bytes_in_flight_per_sm, 1.0)
    busy = min(tiles / target.num_sms, 1.0)
    memory = quantized_bytes(problem, num_tokens) / (target.hbm_bytes_per_s * reach * busy)
    return overhead + max(memory, unpacked, multiplied)


def _resident(problem: QkvProblem, config: SwappedConfig, target: Target) -> int:
    """Programs that one SM holds, by shared memory and by registers."""
    by_shared = target.max_shared_bytes // (quantized_shared_bytes(problem, config, target) + 1024)
    elements = 2 * config.block_p * config.block_t // (32 * config.num_warps)
    registers = min(80 + 2 * elements, target.max_registers)
    by_registers = target.registers_per_sm // (registers * 32 * config.num_warps)
    return max(min(by_shared, by_registers), 1)


def numbers_estimate(problem: QkvProblem, target: Target) -> float:
    """Expected seconds of making numbers of the weights: codes read, numbers written."""
    size = problem.codes.code_bytes + ELEMENT_BYTES[problem.number_dtype]
    kinds = problem.epilogue.kinds
    moved = problem.hidden * problem.num_rows * size
    return kinds * target.launch_s + moved / (0.7 * target.hbm_bytes_per_s)


# --- the measured table -------------------------------------------------------------------------

MEASURED_FILE = Path(__file__).with_name("measured_quantized.json")


@cache
def measured_table() -> tuple[dict, ...]:
    """Rows of the measured table, shipped with the package."""
    return tuple(json.loads(MEASURED_FILE.read_text("utf-8"))["rows"])


def row_key(problem: QkvProblem, target: Target) -> dict:
    """What a row of the table is for, beside the token count."""
    q, heads = problem.codes, problem.epilogue
    return {
        "target": target.name,
        "hidden": problem.hidden,
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "norm": heads.has_norm,
        "weight_format": q.weight_format,
        "word_dtype": problem.weights[0].dtype,
        "k_major": problem.k_major,
        "block": list(q.block),
        "zeros": q.has_zero_tensors,
        "coded_x": problem.coded_x,
    }


def quantized_row(problem: QkvProblem, num_tokens: int, target: Target) -> dict | None:
    """The row for the problem's dims and format at the smallest count that is not below."""
    if problem.epilogue.dtype not in ("bf16", "fp16") or not problem.epilogue.writes_v:
        return None
    key = row_key(problem, target)
    same = [row for row in measured_table() if key.items() <= row.items()]
    above = [row for row in same if row["num_tokens"] >= num_tokens]
    return min(above, key=lambda row: row["num_tokens"], default=None)
