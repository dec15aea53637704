"""How long a QKV lowering should take: waves of tiles, memory traffic and launches.

The model ranks lowerings where nothing was measured; it does not promise a time.
"""

from __future__ import annotations

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.qkv.kernels import SwappedConfig, TiledConfig, tiles_per_head
from tilewright.codegen.qkv.problem import QkvProblem
from tilewright.codegen.qkv.quantized_plan import numbers_estimate, quantized_estimate
from tilewright.codegen.targets import Target

Config = SwappedConfig | TiledConfig

# Share of the chip's GEMM rate by warp groups at work on an SM. Fitted, like all constants below,
# on an H200 over the measured table: within a quarter of it, but for few tiles of long columns.
_WARP_GROUP_SHARE = {1: 0.62, 2: 0.93, 3: 0.94}
# An epilogue nothing overlaps with, for a tile of 128 x 256.
_EPILOGUE_S = 1.6e-6
# Beside the launch: first loads, last stores (15 us for 50 MB of weights, 41 us for 168 MB).
_FILL_S = 1.0e-6
_DESCRIPTOR_S = 1.0e-6
_SPLIT_S = 1.2e-6
_LIBRARY_FILL_S = 2.5e-6
# What one SM takes in: by TMA, and by loads of its threads.
_TMA_BYTES_PER_SM_S = 115e9
_LOAD_BYTES_PER_SM_S = 85e9


def shared_bytes(problem: QkvProblem, config: Config) -> int:
    """Shared memory of the pipelined operands."""
    size = ELEMENT_BYTES[problem.epilogue.dtype]
    if isinstance(config, SwappedConfig):
        rows = 2 * config.block_p + config.block_t
        # The norm's vectors for each token, and one tile that is normed already.
        norm = problem.input_norm
        vectors, normed = (norm.tiles * config.block_t, config.block_t) if norm else (0, 0)
        staged = (rows + vectors) * config.num_stages + normed
        return staged * config.block_k * size
    width = config.heads_per_tile * problem.epilogue.head_dim
    tiles = (config.block_m + width) * config.block_k * size * config.num_stages
    # A flattened loop keeps what the epilogue stages beside the pipeline: a part of the
    # accumulator, or all of it where a norm follows out of tensor memory.
    staging = config.block_m * width * 4 if config.flatten else 0
    if not (problem.epilogue.has_norm and config.warp_specialize):
        staging //= 4 * config.epilogue_parts
    # A wide tile that is finished in one go is rotated by fp32 tables through shared memory.
    if problem.epilogue.wide_tables and width == 256 and config.epilogue_parts == 1:
        staging *= 2
    return tiles + staging


def estimate(problem: QkvProblem, config: Config, num_tokens: int, target: Target) -> float:
    """Expected seconds of one fused kernel."""
    if problem.quantization is not None:
        assert isinstance(config, SwappedConfig)
        return quantized_estimate(problem, config, num_tokens, target)
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
        # A last round with fewer tiles than fit takes as long as a full one.
        per_sm = cdiv(tiles, target.num_sms * resident) * resident
    if (norm := problem.input_norm) is not None and not norm.follows:
        # Of each program, whole rows before the first product.
        overhead += per_sm * num_tokens * problem.hidden * size / _LOAD_BYTES_PER_SM_S
    groups = config.num_warps // 4 * together
    share = _WARP_GROUP_SHARE.get(groups, 0.94) + (0.04 if rows * columns >= 128 * 256 else 0.0)
    rate = target.flops_per_s(heads.dtype) / target.num_sms * share
    epilogue = _EPILOGUE_S * rows * columns / (128 * 256) / together
    compute = per_sm * (2 * rows * columns * problem.hidden / split / rate + epilogue)
    stream = (rows + columns) * problem.hidden * size / split
    intake = _TMA_BYTES_PER_SM_S if isinstance(config, TiledConfig) else _LOAD_BYTES_PER_SM_S
    on_chip = per_sm * stream / intake
    staged = shared_bytes(problem, config)
    running = min(tiles, target.num_sms * resident)
    in_flight = running * staged * (1 - 1 / config.num_stages)
    reach = min(in_flight / (target.num_sms * target.bytes_in_flight_per_sm), 1.0)
    memory = problem.bytes_moved(num_tokens) / (target.hbm_bytes_per_s * reach)
    return overhead + max(compute, memory, on_chip)


def _resident(problem: QkvProblem, config: Config, target: Target) -> int:
    """Programs of a config that one SM holds, by shared memory and by registers."""
    by_shared = target.max_shared_bytes // (shared_bytes(problem, config) + 1024)
    if isinstance(config, TiledConfig):
        rows, columns = config.block_m, config.heads_per_tile * problem.epilogue.head_dim
        limit = config.programs_per_sm if config.persistent else 4
    else:
        rows, columns, limit = 2 * config.block_p, config.block_t, 4
    # The accumulator, and half as much again for the epilogue and addresses.
    registers = min(40 + rows * columns // (32 * config.num_warps) * 3 // 2, target.max_registers)
    by_registers = target.registers_per_sm // (registers * 32 * config.num_warps)
    return max(min(by_shared, by_registers, limit), 1)


def library_estimate(problem: QkvProblem, num_tokens: int, target: Target, packed: bool) -> float:
    """Expected seconds of the GEMMs and the epilogue."""
    heads = problem.epilogue
    size = ELEMENT_BYTES[heads.dtype]
    widths = [heads.num_heads, *[heads.num_kv_heads] * (heads.kinds - 1)]
    if packed:
        widths = [sum(widths)]
    seconds = 0.0
    for count in widths:
        rows = count * heads.head_dim
        flops = 2 * num_tokens * rows * problem.hidden
        tiles = cdiv(num_tokens, 128) * cdiv(rows, 128)
        waves = cdiv(tiles, target.num_sms) * target.num_sms / tiles if num_tokens > 128 else 1.0
        # A library splits K where tiles are few, so a thin wave costs it little.
        compute = flops / target.flops_per_s(heads.dtype) * min(waves, 1.15)
        moved = size * (problem.hidden * rows + num_tokens * (problem.hidden + rows))
        seconds += target.launch_s + _LIBRARY_FILL_S + max(compute, moved / target.hbm_bytes_per_s)
    outputs = 2 * size * num_tokens * problem.num_rows
    if problem.quantization is not None:
        # GEMMs of fp32 take no tensor core.
        seconds *= 10 if problem.coded_x else 1
        seconds += numbers_estimate(problem, target)
    return seconds + target.launch_s + 0.5e-6 + outputs / target.hbm_bytes_per_s
