"""A cost model of QKV lowerings: waves of tiles, memory traffic and launches.

The cost model ranks lowerings that were not measured. Its times are not accurate predictions.
"""

from __future__ import annotations

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.qkv.kernels import (
    Config,
    DotsConfig,
    SwappedConfig,
    TiledConfig,
    tiles_per_head,
)
from tilewright.codegen.qkv.problem import QkvProblem
from tilewright.codegen.targets import Target

# Maps the number of active warp groups on an SM to the fraction of the chip's GEMM rate that they
# reach. This constant was fitted to the shipped tables `measured_*.json`, which come from an H200.
# The constants below were fitted in the same way, unless their comments say otherwise. The
# estimates are within a quarter of the measured times, except for a few tiles.
_WARP_GROUP_SHARE = {1: 0.62, 2: 0.93, 3: 0.94}
# The time of the epilogue of a tile of 128 x 256, if the epilogue overlaps with nothing.
_EPILOGUE_S = 1.6e-6
# The time of the first loads and the last stores, in addition to the launch. With this time, 50 MB
# of weights take 15 us in total, and 168 MB take 41 us.
_FILL_S = 1.0e-6
# The additional time of `qkv_projection`, which loads through TMA descriptors.
_DESCRIPTOR_S = 1.0e-6
# The time in which a multiprocessor starts another program. A persistent program needs no such
# time: it loads the operands of its next tile during the epilogue. This time only decides between
# tiles that would otherwise take equally long. In the measured tables, persistent tiles are the
# fastest if there are several waves of tiles, and other tiles are the fastest if there is only one
# wave.
_RESTART_S = 0.1e-6
# The time that a split of K adds, without the traffic of the partial sums.
_SPLIT_S = 1.2e-6
# The time that a library's GEMM takes in addition to the launch, its products and its traffic.
_LIBRARY_FILL_S = 2.5e-6
# How many bytes an SM loads by TMA in a second.
_TMA_BYTES_PER_SM_S = 115e9
# How many bytes the threads of an SM load in a second.
_LOAD_BYTES_PER_SM_S = 85e9

# The number of codes of quantised weights that an SM unpacks in a second.
_CODES_PER_SM_S = 9.0e10
# Two fractions of the tensor cores' rate with quantised weights: the fraction that tiles of up to
# 32 tokens reach, and the fraction that tiles of more tokens reach. Tiles of fewer than 64 tokens
# take as long as tiles of 64 tokens.
_CODES_MMA_SHARES = (0.75, 0.55)
# The same as _FILL_S, for quantised weights.
_CODES_FILL_S = 1.5e-6
# The same as _SPLIT_S, for quantised weights.
_CODES_SPLIT_S = 1.0e-6
# The time of the kernel that permutes x to the order of the codes.
_ORDER_S = 1.5e-6
# The same as _FILL_S, for the kernel without tensor cores. With this time, 13 MB of int4 take 7.4
# us in total on an H100.
_DOTS_FILL_S = 1.0e-6
# How many integers (True), or floats (False), an SM multiplies in a second without tensor cores.
# The rates are modelled: 8 integers take 6 instructions at half rate, and a float takes 3
# instructions.
_DOTS_PER_SM_S = {True: 1.0e11, False: 5.0e10}


def shared_bytes(problem: QkvProblem, config: Config, target: Target) -> int:
    """Returns how many bytes of shared memory the pipelined operands take."""
    if isinstance(config, DotsConfig):
        # Threads exchange x through shared memory, because the thread that loads a part of x is not
        # the thread that multiplies it.
        return 4 * config.block_k
    if problem.quantization is not None:
        assert isinstance(config, SwappedConfig)
        return _codes_shared_bytes(problem, config, target)
    size = ELEMENT_BYTES[problem.epilogue.dtype]
    if isinstance(config, SwappedConfig):
        rows = 2 * config.block_p + config.block_t
        # A norm takes shared memory for its vectors, which are repeated for each token, and for one
        # tile of normalised x.
        norm = problem.input_norm
        vectors, normed = (norm.tiles * config.block_t, config.block_t) if norm else (0, 0)
        staged = (rows + vectors) * config.num_stages + normed
        return staged * config.block_k * size
    width = config.heads_per_tile * problem.epilogue.head_dim
    tiles = (config.block_m + width) * config.block_k * size * config.num_stages
    # A flattened loop keeps the memory of the epilogue in addition to the pipeline: a part of the
    # accumulator, or all of it if a norm reads it from tensor memory.
    staging = config.block_m * width * 4 if config.flatten else 0
    if not (problem.epilogue.has_norm and config.warp_specialize):
        staging //= 4 * config.epilogue_parts
    # If the epilogue processes a wide tile in one part, the rotation by fp32 tables passes through
    # shared memory.
    if problem.epilogue.wide_tables and width == 256 and config.epilogue_parts == 1:
        staging *= 2
    return tiles + staging


def _codes_shared_bytes(problem: QkvProblem, config: SwappedConfig, target: Target) -> int:
    """Returns how many bytes of shared memory the staged words and activations take, together with
    the operands that are computed from them."""
    q = problem.codes
    rows, x_bytes = 2 * config.block_p, ELEMENT_BYTES[problem.x.dtype]
    words = rows * config.block_k * q.staged_bytes
    x = config.block_t * config.block_k * x_bytes
    made = 0 if problem.coded_x else x
    # Codes pass through shared memory to the tensor core if they are packed along the rows, or if
    # the tile is smaller than a tile of wgmma. With mma.sync, words that have eight codes of a row
    # pass through shared memory too, because a thread of mma.sync holds fewer adjacent codes.
    if q.packed_rows or rows < 64 or (target.multiplies_registers and q.per_word == 8):
        made += rows * config.block_k * 2
    return int((words + x) * config.num_stages + made)


def estimate(problem: QkvProblem, config: Config, num_tokens: int, target: Target) -> float:
    """Estimates the time of one fused kernel, in seconds."""
    if isinstance(config, DotsConfig):
        return _dots_estimate(problem, config, num_tokens, target)
    if problem.quantization is not None:
        assert isinstance(config, SwappedConfig)
        return _codes_estimate(problem, config, num_tokens, target)
    heads = problem.epilogue
    size = ELEMENT_BYTES[heads.dtype]
    split = 1
    overhead = target.launch_s + _FILL_S
    if isinstance(config, SwappedConfig):
        rows, columns = 2 * config.block_p, config.block_t
        row_tiles = heads.heads_in_all * tiles_per_head(problem, config)
        split = config.split_k
        if split > 1:
            exchanged = 24 * rows * columns * split * row_tiles
            overhead += _SPLIT_S + exchanged / target.hbm_bytes_per_s
    else:
        rows, columns = config.heads_per_tile * heads.head_dim, config.block_m
        row_tiles = heads.heads_in_all // config.heads_per_tile
        overhead += _DESCRIPTOR_S
    tiles = row_tiles * cdiv(num_tokens, columns) * split
    per_sm = cdiv(tiles, target.num_sms)
    resident = _resident(problem, config, target)
    together = min(per_sm, resident)
    if per_sm > resident:
        # A last wave that is not full takes as long as a full wave.
        waves = cdiv(tiles, target.num_sms * resident)
        per_sm = waves * resident
        if isinstance(config, TiledConfig) and not config.persistent:
            overhead += (waves - 1) * _RESTART_S
    if (norm := problem.input_norm) is not None and not norm.follows:
        # Each program reads whole rows before its first product.
        overhead += per_sm * num_tokens * problem.hidden * size / _LOAD_BYTES_PER_SM_S
    groups = config.num_warps // 4 * together
    share = _WARP_GROUP_SHARE.get(groups, 0.94) + (0.04 if rows * columns >= 128 * 256 else 0.0)
    rate = target.flops_per_s(heads.dtype) / target.num_sms * share
    epilogue = _EPILOGUE_S * rows * columns / (128 * 256) / together
    compute = per_sm * (2 * rows * columns * problem.hidden / split / rate + epilogue)
    stream = (rows + columns) * problem.hidden * size / split
    intake = _TMA_BYTES_PER_SM_S if isinstance(config, TiledConfig) else _LOAD_BYTES_PER_SM_S
    on_chip = per_sm * stream / intake
    staged = shared_bytes(problem, config, target)
    running = min(tiles, target.num_sms * resident)
    in_flight = running * staged * (1 - 1 / config.num_stages)
    reach = min(in_flight / (target.num_sms * target.bytes_in_flight_per_sm), 1.0)
    memory = problem.bytes_moved(num_tokens) / (target.hbm_bytes_per_s * reach)
    return overhead + max(compute, memory, on_chip)


def _codes_bytes(problem: QkvProblem, num_tokens: int) -> float:
    """Returns a lower bound of the global memory traffic in bytes: codes, scales and x are read
    once, and q and the slots are written once."""
    q, size = problem.codes, ELEMENT_BYTES[problem.epilogue.dtype]
    blocks = cdiv(problem.num_rows, q.block[0]) * cdiv(problem.hidden, q.block[1])
    per_token = ELEMENT_BYTES[problem.x.dtype] * problem.hidden + size * problem.num_rows
    codes = q.code_bytes * problem.hidden * problem.num_rows
    scale = q.scales[0]
    assert scale is not None
    return codes + blocks * ELEMENT_BYTES[scale.dtype] + num_tokens * per_token


def _dots_estimate(
    problem: QkvProblem, config: DotsConfig, num_tokens: int, target: Target
) -> float:
    """Estimates the time of the kernel without tensor cores, in seconds. The estimate is the time
    of the launch, plus the longer of two times: reading memory, and multiplying."""
    overhead = target.launch_s + _DOTS_FILL_S + (_CODES_SPLIT_S if config.split_k > 1 else 0.0)
    tiles = problem.epilogue.heads_in_all * tiles_per_head(problem, config) * config.split_k
    busy = min(tiles * num_tokens / target.num_sms, 1.0)
    memory = _codes_bytes(problem, num_tokens) / (target.hbm_bytes_per_s * busy)
    rate = _DOTS_PER_SM_S[problem.codes.dots_integers] * target.num_sms * busy
    return overhead + max(memory, num_tokens * problem.hidden * problem.num_rows / rate)


def _codes_estimate(
    problem: QkvProblem, config: SwappedConfig, num_tokens: int, target: Target
) -> float:
    """Estimates the time of the kernel for quantised weights, in seconds. The estimate is the time
    of the launch, plus the longest of three times: reading memory, unpacking words, and
    multiplying."""
    q = problem.codes
    rows, columns, split = 2 * config.block_p, config.block_t, config.split_k
    row_tiles = problem.epilogue.heads_in_all * tiles_per_head(problem, config)
    tiles = row_tiles * cdiv(num_tokens, columns) * split
    per_sm = cdiv(tiles, target.num_sms)
    overhead = target.launch_s + _CODES_FILL_S
    if split > 1:
        overhead += _CODES_SPLIT_S + 8 * rows * columns * tiles / target.hbm_bytes_per_s
    depth = problem.hidden / split
    together = max(min(per_sm, _resident(problem, config, target)), 1)
    unpacked = 0.0 if problem.coded_x else per_sm * rows * depth / _CODES_PER_SM_S
    # A program that is alone on an SM hides little of its latency.
    unpacked *= 1.6 if together == 1 and config.num_warps == 4 else 1.0
    if config.ordered_x:
        overhead += _ORDER_S
    elif not (problem.coded_x or q.packed_rows):
        unpacked += per_sm * columns * depth / (2 * _CODES_PER_SM_S)
    # Words that are packed along the rows pass through shared memory to the tensor core.
    unpacked *= 2.0 if q.packed_rows else 1.0
    share = _CODES_MMA_SHARES[columns > 32]
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
    memory = _codes_bytes(problem, num_tokens) / (target.hbm_bytes_per_s * reach * busy)
    return overhead + max(memory, unpacked, multiplied)


def _resident(problem: QkvProblem, config: Config, target: Target) -> int:
    """Returns how many programs of a config fit an SM, limited by shared memory and by
    registers."""
    by_shared = target.max_shared_bytes // (shared_bytes(problem, config, target) + 1024)
    if isinstance(config, TiledConfig):
        rows, columns = config.block_m, config.heads_per_tile * problem.epilogue.head_dim
        limit = config.programs_per_sm if config.persistent else 4
    else:
        rows, columns = 2 * config.block_p, config.block_t
        limit = 4 if problem.quantization is None else by_shared
    elements = rows * columns // (32 * config.num_warps)
    # Registers hold the accumulator, and half as many other numbers for the epilogue and the
    # addresses. Kernels of quantised weights need more registers.
    wanted = 40 + elements * 3 // 2 if problem.quantization is None else 80 + 2 * elements
    registers = min(wanted, target.max_registers)
    by_registers = target.registers_per_sm // (registers * 32 * config.num_warps)
    return max(min(by_shared, by_registers, limit), 1)


def library_estimate(problem: QkvProblem, num_tokens: int, target: Target, packed: bool) -> float:
    """Estimates the time of the library GEMMs and the epilogue, in seconds."""
    heads = problem.epilogue
    size = ELEMENT_BYTES[heads.dtype]
    codes = problem.multiplies_codes(target)
    dtype = problem.x.dtype if codes else heads.dtype
    packed = packed and not codes
    widths = [heads.num_heads, *[heads.num_kv_heads] * (heads.kinds - 1)]
    if packed:
        widths = [sum(widths)]
    seconds = 0.0
    for count in widths:
        rows = count * heads.head_dim
        flops = 2 * num_tokens * rows * problem.hidden
        tiles = cdiv(num_tokens, 128) * cdiv(rows, 128)
        waves = cdiv(tiles, target.num_sms) * target.num_sms / tiles if num_tokens > 128 else 1.0
        # A library splits K if there are few tiles, so a wave that is not full costs little.
        compute = flops / target.flops_per_s(dtype) * min(waves, 1.15)
        read = ELEMENT_BYTES[dtype] * problem.hidden * (rows + num_tokens)
        moved = read + size * num_tokens * rows
        seconds += target.launch_s + _LIBRARY_FILL_S + max(compute, moved / target.hbm_bytes_per_s)
    outputs = 2 * size * num_tokens * problem.num_rows
    if problem.quantization is not None and not codes:
        # GEMMs in fp32 do not use tensor cores.
        seconds *= 10 if problem.coded_x else 1
        seconds += _numbers_estimate(problem, target)
    return seconds + target.launch_s + 0.5e-6 + outputs / target.hbm_bytes_per_s


def _numbers_estimate(problem: QkvProblem, target: Target) -> float:
    """Estimates the time to dequantise the weights, in seconds: codes are read, and numbers are
    written."""
    size = problem.codes.code_bytes + ELEMENT_BYTES[problem.number_dtype]
    kinds = problem.epilogue.kinds
    moved = problem.hidden * problem.num_rows * size
    return kinds * target.launch_s + moved / (0.7 * target.hbm_bytes_per_s)
