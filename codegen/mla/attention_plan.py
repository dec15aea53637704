"""Plans of MLA attention, by the chip, the widths of operands and the sizes of a call.

Each bound below is the number at which two ways took equal time on an H200.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.attention.blocks import KEYS
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.attention.problem import AttentionSizes
from tilewright.codegen.mla.attention_kernels import MAX_SORTED, AttentionProblem
from tilewright.codegen.targets import Target

# Tiles for kernels in which all warps load data, so that no warp is specialised. The plan uses the
# first entry that fits.
BY_POINTERS = (
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 32, 8, 2),
    PrefillConfig(64, 64, 4, 2),
    PrefillConfig(64, 32, 4, 1),
)
# Tiles for calls with a mask tensor, whose own tiles take shared memory, too.
MASKED = (BY_POINTERS[0], PrefillConfig(128, 64, 8, 2), *BY_POINTERS[1:])
# Tiles for calls with a mask tensor, wide heads and few queries.
MASKED_WIDE = PrefillConfig(64, 64, 8, 2)
# The largest number of keys of a sequence for which short tiles are faster: two programs share a
# multiprocessor, and one program computes while the other one starts.
SHORT_KEYS = 1024
# The fewest keys of a sequence for which specialised warps take less time, if all sequences have
# equally many keys.
SPECIALISED_KEYS = 3072
# For ragged sequences: the smallest average number of keys for which specialised warps take less
# time. It is smaller than SPECIALISED_KEYS, because the longest sequence determines the time.
SPECIALISED_AVERAGE = 768
# The fewest tiles of 128 queries for which a library's attention is faster than tilewright's
# kernel.
LIBRARY_TILES = 1024
# The fewest keys for which a library's attention is faster. With fewer keys, the copy of the keys
# that precedes the library's attention takes too large a part of the time.
LIBRARY_KEYS = 1024


def attention_config(
    problem: AttentionProblem, sizes: AttentionSizes, target: Target
) -> PrefillConfig:
    """Returns the tiles of a call that runs `mla_attention`."""
    reached = problem.tma and (problem.rope_tma or not problem.rope)
    if target.tmem_columns:
        return _in_tensor_memory(problem, sizes, reached)
    masked = problem.attn_mask != ""
    # Three programs on a multiprocessor take turns at the tensor core.
    turns = PrefillConfig(64, 64, 4, 3, tma=True, promote=True, maxnreg=168)
    if problem.is_fp8 and reached and _fits(problem, turns, target):
        if problem.v_by_key:
            return turns
        return PrefillConfig(128, KEYS if masked else 128, 8, 2, tma=True, promote=True)
    apart = PrefillConfig(128, 128, 4, 2, tma=True, warp_specialize=True, one_loop=True)
    if reached and _specialises(problem, sizes) and _fits(problem, apart, target):
        return apart
    tried = (*_short(problem, sizes, target), *(MASKED if masked else BY_POINTERS))
    fitting = (config for config in tried if _fits(problem, config, target))
    return replace(next(fitting, tried[-1]), promote=problem.is_fp8)


def _specialises(problem: AttentionProblem, sizes: AttentionSizes) -> bool:
    """Whether specialised warps are faster on Hopper.

    Triton 3.6 does not compile specialised warps with a mask tensor, or with a reduction over rows
    or sequences before the loop. Such a reduction is needed for positions in a tensor, and for too
    many sequences to sort. A result in fp32 (of one of several chunks) would need 64 KiB of shared
    memory in addition to the tiles of queries and keys, which is too much.
    """
    if problem.out == "fp32":
        return False
    if problem.is_fp8 or problem.attn_mask or problem.positioned:
        return False
    if not problem.ragged:
        return sizes.num_keys >= SPECIALISED_KEYS
    return problem.sequences <= MAX_SORTED and _average_keys(problem, sizes) >= SPECIALISED_AVERAGE


def _average_keys(problem: AttentionProblem, sizes: AttentionSizes) -> int:
    return sizes.num_keys // max(sizes.num_sequences, 1) if problem.ragged else sizes.num_keys


def _short(
    problem: AttentionProblem, sizes: AttentionSizes, target: Target
) -> tuple[PrefillConfig, ...]:
    """Returns the tiles for sequences with few keys; empty for other sequences.

    With a mask, the number of keys is the capacity of a cache. Queries may see few of these keys,
    so the number of queries serves as an estimate of how many keys they see.
    """
    masked, keys = problem.attn_mask != "", _average_keys(problem, sizes)
    if problem.is_fp8 or (min(keys, sizes.num_queries) if masked else keys) > SHORT_KEYS:
        return ()
    if masked and max(problem.blocks) > 128:
        return (MASKED_WIDE,) if sizes.num_queries <= MASKED_WIDE.block_m else ()
    programs = cdiv(sizes.num_queries, 64) * problem.num_heads
    programs *= 1 if problem.ragged else sizes.num_sequences
    # With 3 stages, a program has more keys in flight, but fewer programs fit a multiprocessor. On
    # an H200, MiniCPM3's attention to 2048 keys takes 75 us with 3 stages and 90 us with 2 stages
    # for 2 x 128 queries (160 programs). For 2 x 256 queries, it takes 99 us with 3 stages and 97
    # us with 2 stages.
    long = PrefillConfig(64, 64, 4, 3, one_loop=problem.ragged)
    resident = target.max_shared_bytes // long.shared_bytes(*_row_bytes(problem), problem.attn_mask)
    start_together = programs <= max(resident, 1) * target.num_sms
    return (long if start_together else replace(long, num_stages=2),)


def _in_tensor_memory(
    problem: AttentionProblem, sizes: AttentionSizes, reached: bool
) -> PrefillConfig:
    """Returns the tiles for chips with tensor memory. With Triton before 3.9, two products must not
    share an accumulator in tensor memory, so none of these tiles has `chained`."""
    wide, masked = max(problem.blocks) > 128, problem.attn_mask != ""
    if reached and not (masked or wide):
        # A partial result includes its log-sum-exp. Two loops would leave no registers for the
        # log-sum-exp.
        part = problem.has_lse
        return PrefillConfig(
            128, 64, 8, 2, tma=True, warp_specialize=True, one_loop=part, chained=False
        )
    if masked and sizes.num_queries <= 64:
        return PrefillConfig(64, 64, 8 if wide else 4, 2, tma=reached, chained=False)
    if wide:
        return PrefillConfig(128, 32, 8, 2, tma=reached, chained=False)
    return PrefillConfig(128, 64, 8, 2, tma=reached, chained=False)


def _fits(problem: AttentionProblem, config: PrefillConfig, target: Target) -> bool:
    return config.fits(*_row_bytes(problem), problem.attn_mask, target)


def _row_bytes(problem: AttentionProblem) -> tuple[int, int]:
    """Returns the number of bytes of a row of q, and of a row of keys plus a row of values."""
    nope, rope, v = problem.blocks
    rope = rope if problem.rope else 0
    size = ELEMENT_BYTES[problem.dtype]
    return (nope + rope) * size, (nope + rope + v) * size


def rotates_queries(problem: AttentionProblem, config: PrefillConfig) -> bool:
    """Whether the attention kernel rotates the queries that it loads. No query is rotated twice,
    because only one program loads each query.

    The kernel cannot rotate queries that a descriptor loads to shared memory, or whose rope columns
    do not fill their tile.
    """
    filled = problem.rope == problem.blocks[1]
    return filled and not (config.tma or config.warp_specialize or problem.is_fp8)


def library_gains(num_heads: int, sizes: AttentionSizes) -> bool:
    """Whether a library's attention over joined keys is faster than `mla_attention`.

    Callers use this function only if the library computes the same result, which holds for dense
    16-bit operands and a mask that depends only on shapes.
    """
    tiles = sizes.num_sequences * num_heads * cdiv(sizes.num_queries, 128)
    return tiles >= LIBRARY_TILES and sizes.num_keys >= LIBRARY_KEYS
