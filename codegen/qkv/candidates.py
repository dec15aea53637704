"""Candidate tile sizes of the fused QKV kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.qkv.kernels import (
    Config,
    DotsConfig,
    SwappedConfig,
    TiledConfig,
    tiles_per_head,
)
from tilewright.codegen.qkv.problem import (
    QkvProblem,
    dots_obstacle,
    heads_fit,
    steps_fit,
    swapped_obstacle,
    tiled_obstacle,
)
from tilewright.codegen.qkv.time import shared_bytes
from tilewright.codegen.targets import Target

# The largest number of tokens in a tile if the tensor core reads codes and x from registers. With
# more tokens, registers spill (sm120).
MOST_TOKENS_IN_REGISTERS = 32
# The largest number of sums of a warp if the codes are 4-bit floats. With more sums, registers
# spill (sm90).
MOST_SUMS_OF_FLOATS = 1024

# The formats of weights that may be multiplied without tensor cores. The projection of Llama-3-8B
# took these times on an H100, in us (in parentheses: the time of the kernel that uses tensor
# cores): int4 7.4 (9.9), int8 9.6 (13.0), float8 12.4 (13.1), float8 in blocks 10.0 (14.6), NVFP4
# 8.9 (11.0), MXFP4 8.8 (15.1), nf4 9.8 (14.4).
DOTTED_FORMATS = ("int4_k", "int4_k_offset", "int8", "fp8", "nvfp4", "mxfp4", "nf4", "fp4")
# The largest number of tokens for which weights are multiplied without tensor cores.
MOST_DOTTED_TOKENS = 1
# The number of pairs of columns (as RoPE rotates them) of a head that a program without tensor
# cores computes, unless a norm needs whole heads.
DOT_PAIRS = 8
# For 8-bit codes: the number of 32-bit words (rows times words of a row) that four warps read in a
# step.
DOT_WORDS = 4096
# For 4-bit codes: the number of 32-bit words that four warps read in a step.
DOT_WORDS_OF_NIBBLES = 2048
# For 8-bit codes: the fewest 32-bit words of a row in a step.
LEAST_DOT_WORDS = 32
# For 4-bit codes: the fewest 32-bit words of a row in a step.
LEAST_DOT_WORDS_OF_NIBBLES = 16
# The number of programs for each multiprocessor. If there are fewer tiles, K is split until there
# are this many programs.
DOT_PROGRAMS = 3
# The largest number of words that a thread holds in registers. With more words, registers spill.
MOST_THREAD_WORDS = 64
# Options of tiles whose programs compute several tiles in one flattened loop.
PERSISTENT = {"persistent": True, "flatten": True}


def candidates(problem: QkvProblem, num_tokens: int, target: Target) -> list[Config]:
    """Returns the configs worth measuring that fit this problem and target."""
    tried = _configs(problem, num_tokens, target)
    return [config for config in tried if fits(problem, config, target)]


def _configs(problem: QkvProblem, num_tokens: int, target: Target) -> Iterator[Config]:
    """Yields the configs that were among the fastest on an H200 in at least one measured problem.
    Configs that were the fastest more often come first."""
    dots = dots_config(problem, num_tokens, target)
    if dots is not None:
        yield dots
    if problem.quantization is not None:
        yield from _code_configs(problem, num_tokens)
        return
    whole = next_power_of_2(problem.epilogue.pairs_per_head)
    if num_tokens <= 128:
        block_t = max(16, next_power_of_2(num_tokens))
        for block_p in sorted({32, whole}):
            for block_k, stages in ((128, 5), (128, 6), (128, 4), (256, 4), (64, 8), (64, 5)):
                warps = 8 if block_p * block_t >= 64 * 64 else 4
                for split_k in (1,) if block_p <= 32 else (1, 2, 4):
                    yield SwappedConfig(block_p, block_t, block_k, warps, stages, split_k)
    tiled = [(heads, heads * problem.epilogue.head_dim) for heads in (1, 2, 4, 8)]
    for heads, width in tiled:
        yield from _tiled_configs(heads, width, num_tokens, target)
    if num_tokens > 64 and not target.has("tcgen05"):
        for heads in (heads for heads, width in tiled if width == 128):
            yield TiledConfig(256, heads, 64, 8, 4, epilogue_parts=4, **PERSISTENT)


def dots_config(problem: QkvProblem, num_tokens: int, target: Target) -> DotsConfig | None:
    """Returns the tile sizes of the kernel without tensor cores; None if this kernel cannot compute
    the call or is not faster."""
    q, heads = problem.quantization, problem.epilogue
    if q is None or num_tokens > MOST_DOTTED_TOKENS or q.weight_format not in DOTTED_FORMATS:
        return None
    whole = next_power_of_2(heads.pairs_per_head)
    block_p = whole if heads.has_norm else DOT_PAIRS
    nibbles = q.format.bits == 4
    tile = DOT_WORDS_OF_NIBBLES if nibbles else DOT_WORDS
    least = LEAST_DOT_WORDS_OF_NIBBLES if nibbles else LEAST_DOT_WORDS
    words = max(tile // (2 * block_p), least)
    warps = max(4 * 2 * block_p * words // tile, 4)
    if problem.hidden % (words * q.per_int32):
        words = max(words // 2, least)
    block_k = q.per_int32 * words
    tiles = heads.heads_in_all * cdiv(heads.pairs_per_head, block_p)
    steps = cdiv(problem.hidden, block_k)
    parts = max(min(DOT_PROGRAMS * target.num_sms // tiles, steps), 1)
    config = DotsConfig(block_p, block_k, warps, cdiv(steps, cdiv(steps, parts)))
    return config if fits(problem, config, target) else None


def _tiled_configs(
    heads: int, width: int, num_tokens: int, target: Target
) -> Iterator[TiledConfig]:
    """Yields tile sizes for `heads` heads with `width` columns together. For all chips, some of
    these tiles have persistent loops. If the chip keeps the accumulator in tensor memory, the warps
    of such loops are specialised."""
    walk = PERSISTENT | {"warp_specialize": target.has("tcgen05")}
    if 32 < num_tokens <= 1024 and width <= 128:
        yield TiledConfig(64, heads, 128, 4, 4)
        for stages in (3, 4, 6):
            yield TiledConfig(64, heads, 64, 4, stages)
    if num_tokens > 64 and width <= 128:
        yield TiledConfig(128, heads, 64, 8, 6, epilogue_parts=2)
        yield TiledConfig(128, heads, 64, 8, 5, **walk)
        yield TiledConfig(128, heads, 64, 8, 4, **walk)
    if num_tokens > 64 and width == 256:
        yield TiledConfig(64, heads, 64, 8, 5)
        if not target.has("tcgen05"):
            yield TiledConfig(128, heads, 64, 8, 4, **walk)
        parts = 4 if target.has("tcgen05") else 2
        yield TiledConfig(128, heads, 64, 8, 4, epilogue_parts=parts, **walk)
        if not target.has("tcgen05"):
            yield TiledConfig(128, heads, 64, 8, 4, epilogue_parts=2, pairs_first=True, **walk)
    if num_tokens > 64 and not target.has("tcgen05"):
        # With two programs on an SM, the epilogue of one program overlaps with the products of the
        # other program.
        if width == 128:
            for parts in (2, 4):
                pair = TiledConfig(128, heads, 64, 4, 3, epilogue_parts=parts, **walk)
                yield replace(pair, programs_per_sm=2)
            yield TiledConfig(128, heads, 64, 8, 6, epilogue_parts=2, **walk)
        if width == 256:
            pair = TiledConfig(64, heads, 32, 4, 5, epilogue_parts=4, **walk)
            yield replace(pair, programs_per_sm=2)


def _code_configs(problem: QkvProblem, num_tokens: int) -> Iterator[SwappedConfig]:
    """Yields the configs for quantised weights that were among the fastest on an H200 in at least
    one measured format.

    For few tokens, tiles are small, and K is split into many parts. For more tokens, an earlier
    kernel permutes x once, so that the programs need not permute it.
    """
    q = problem.codes
    whole = next_power_of_2(problem.epilogue.pairs_per_head)
    slices = sorted({min(32, whole), whole})
    longest = q.longest_step(problem.hidden)
    block_k = next((size for size in (longest, 64, 32) if steps_fit(problem, size)), longest)
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


def fits(problem: QkvProblem, config: Config, target: Target) -> bool:
    """Whether a config is valid for the problem and within the limits of the target."""
    if isinstance(config, TiledConfig):
        legal = tiled_obstacle(problem) is None and _tiled_fits(problem, config)
    elif isinstance(config, DotsConfig):
        legal = dots_obstacle(problem) is None and _dots_fits(problem, config)
    else:
        legal = swapped_obstacle(problem) is None and _swapped_fits(problem, config, target)
    return legal and shared_bytes(problem, config, target) <= target.max_shared_bytes - 2048


def _dots_fits(problem: QkvProblem, config: DotsConfig) -> bool:
    q, heads = problem.codes, problem.epilogue
    if not 8 <= config.block_p <= next_power_of_2(heads.pairs_per_head):
        return False
    if cdiv(problem.hidden, config.block_k) < config.split_k:
        return False
    words = int(2 * config.block_p * config.block_k * q.code_bytes / 4)
    many = words > 32 * config.num_warps * MOST_THREAD_WORDS
    if many or config.block_k % (q.dot_run * q.per_int32):
        return False
    return not heads.has_norm or tiles_per_head(problem, config) == 1


def _swapped_fits(problem: QkvProblem, config: SwappedConfig, target: Target) -> bool:
    q, heads = problem.quantization, problem.epilogue
    if not 8 <= config.block_p <= next_power_of_2(heads.pairs_per_head):
        return False
    steps = cdiv(problem.hidden, config.block_k)
    if config.split_k > 1 and steps < config.split_k * (2 if q is None else 1):
        return False
    if q is not None:
        crowded = target.multiplies_registers and config.block_t > MOST_TOKENS_IN_REGISTERS
        sums = 2 * config.block_p * config.block_t // config.num_warps
        crowded |= bool(q.format.number) and sums > MOST_SUMS_OF_FLOATS
        idle = config.ordered_x and (q.packed_rows or problem.coded_x)
        if crowded or idle or not steps_fit(problem, config.block_k):
            return False
    return not heads.has_norm or tiles_per_head(problem, config) == 1


def _tiled_fits(problem: QkvProblem, config: TiledConfig) -> bool:
    heads = problem.epilogue
    width = config.heads_per_tile * heads.head_dim
    accumulator = config.block_m * width
    # With twelve warps, a thread has 168 registers. These are too few for 256 columns and a heavy
    # epilogue.
    crowded = config.warp_specialize and width == 256 and (heads.has_norm or heads.interleaved)
    # Interleaved pairs take more registers if they are separated after the rotation, or if N is the
    # contiguous dimension of the weights.
    if width == 256 and heads.interleaved and (heads.halves or not problem.k_major):
        crowded = crowded or config.epilogue_parts < 4
    if heads.norm_after != "none" and config.pair_parts > 1:
        return False
    return (
        heads_fit(problem, config.heads_per_tile)
        and 64 <= width <= 256
        and accumulator <= 128 * 32 * config.num_warps
        and config.epilogue_parts <= width // 32
        and not crowded
    )
