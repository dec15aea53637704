"""How an MLA attention call is computed: by what the chip has, the operands' width and the extents.
The bounds are where two ways took equal time on an H200."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.attention.blocks import KEYS
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.attention.problem import AttentionSizes
from tilewright.codegen.mla.attention_kernels import MAX_SORTED, AttentionProblem
from tilewright.codegen.targets import Target

# Where all warps load; the first that fits.
BY_POINTERS = (
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 32, 8, 2),
    PrefillConfig(64, 64, 4, 2),
    PrefillConfig(64, 32, 4, 1),
)
# With a mask tensor, whose tiles take shared memory too; of wide heads, few queries.
MASKED = (BY_POINTERS[0], PrefillConfig(128, 64, 8, 2), *BY_POINTERS[1:])
MASKED_WIDE = PrefillConfig(64, 64, 8, 2)
# Up to so many keys of a sequence short tiles are better: two programs on a multiprocessor, of
# which one works while the other starts.
SHORT_KEYS = 1024
# Specialised warps take less time from so many keys of a sequence on; of ragged ones on average,
# as their time is that of the longest.
SPECIALISED_KEYS = 3072
SPECIALISED_AVERAGE = 768
# A library's attention takes less time than ours from so many tiles of 128 queries on.
LIBRARY_TILES = 1024
# And from so many keys on: below, what goes before it is too much of the work.
LIBRARY_KEYS = 1024


def attention_config(
    problem: AttentionProblem, sizes: AttentionSizes, target: Target
) -> PrefillConfig:
    """The tiles of a call that runs our kernel."""
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
    """Whether producers and consumers are better apart, on Hopper.

    Triton 3.6 does not compile it with a reduction over rows or sequences before the loop: of
    positions in a tensor, or where sequences are too many to be sorted; nor with a mask tensor. A
    result in fp32 (of one chunk of several) gets 64 KiB of shared memory there that the tiles of
    queries and keys do not leave.
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
    """Tiles for sequences of few keys. A mask comes with a cache's capacity of keys, of which its
    queries may see few: they are taken for as many as there are queries."""
    masked, keys = problem.attn_mask != "", _average_keys(problem, sizes)
    if problem.is_fp8 or (min(keys, sizes.num_queries) if masked else keys) > SHORT_KEYS:
        return ()
    if masked and max(problem.blocks) > 128:
        return (MASKED_WIDE,) if sizes.num_queries <= MASKED_WIDE.block_m else ()
    programs = cdiv(sizes.num_queries, 64) * problem.num_heads
    programs *= 1 if problem.ragged else sizes.num_sequences
    # With a multiprocessor each, programs are better off with more keys on the way.
    stages = 3 if programs <= target.num_sms else 2
    return (PrefillConfig(64, 64, 4, stages, one_loop=problem.ragged),)


def _in_tensor_memory(
    problem: AttentionProblem, sizes: AttentionSizes, reached: bool
) -> PrefillConfig:
    """Before Triton 3.9 two products may not go to one accumulator."""
    wide, masked = max(problem.blocks) > 128, problem.attn_mask != ""
    if reached and not (masked or wide):
        # A part has its log-sum-exp too, for which two loops leave no registers.
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
    nope, rope, v = problem.blocks
    rope = rope if problem.rope else 0
    size = ELEMENT_BYTES[problem.dtype]
    return config.fits((nope + rope) * size, (nope + rope + v) * size, problem.attn_mask, target)


def rotates_queries(problem: AttentionProblem, config: PrefillConfig) -> bool:
    """Whether the kernel rotates the queries that it loads; each has one program to load it.

    Not where a descriptor brings them to shared memory, nor where both members of a pair leave
    columns of the tile between them.
    """
    filled = problem.rope == problem.blocks[1]
    return filled and not (config.tma or config.warp_specialize or problem.is_fp8)


def library_gains(num_heads: int, sizes: AttentionSizes) -> bool:
    """Whether a library's attention over joined keys takes less time than our kernel.

    Asked only where it computes the same: dense 16-bit operands, a mask of shapes alone.
    """
    tiles = sizes.num_sequences * num_heads * cdiv(sizes.num_queries, 128)
    return tiles >= LIBRARY_TILES and sizes.num_keys >= LIBRARY_KEYS
