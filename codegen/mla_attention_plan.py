"""Which attention kernel an MLA call runs: by what the chip has, the operands' width and the tiles'
number. The bounds are where two forms took equal time on an H200."""

from __future__ import annotations

from tilewright.codegen.mla_attention_kernels import (
    AttentionConfig,
    AttentionProblem,
    AttentionSizes,
)
from tilewright.codegen.qkv_heads import ELEMENT_BYTES
from tilewright.codegen.targets import Target

# Share of the L2 cache that the keys and values of one group of heads may take.
L2_SHARE = 0.6


def attention_config(
    problem: AttentionProblem, sizes: AttentionSizes, target: Target
) -> AttentionConfig:
    """The tiles of a call."""
    if not (problem.tma and (problem.rope_tma or not problem.rope)):
        return _by_pointers(problem, target)
    chained = not target.tmem_columns
    if _tile_bytes(problem, 128, 64, 2) > target.max_shared_bytes:
        return AttentionConfig(64, 32, 4, 2, chained=chained)
    if target.tmem_columns:
        return AttentionConfig(128, 64, 8, 2, warp_specialize=True, chained=chained)
    return AttentionConfig(128, 64, 4, 2, warp_specialize=True, one_loop=True)


def _by_pointers(problem: AttentionProblem, target: Target) -> AttentionConfig:
    chained = not target.tmem_columns
    for block_m, block_n, warps, stages in ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2)):
        if _tile_bytes(problem, block_m, block_n, stages) <= target.max_shared_bytes:
            return AttentionConfig(block_m, block_n, warps, stages, tma=False, chained=chained)
    return AttentionConfig(64, 32, 4, 1, tma=False, chained=chained)


def _tile_bytes(problem: AttentionProblem, block_m: int, block_n: int, stages: int) -> int:
    """Shared memory of q's tile and of the stages of keys and values, with some for the rest."""
    nope, rope, v = problem.blocks
    rope = rope if problem.rope else 0
    size = ELEMENT_BYTES[problem.dtype]
    tiles = block_m * (nope + rope) + stages * block_n * (nope + rope + v)
    return tiles * size + 4096


def head_group(problem: AttentionProblem, sizes: AttentionSizes, target: Target) -> int:
    """Heads (of a dense batch: pairs of sequence and head) whose tiles run side by side.

    As many as the L2 cache holds keys and values of: then each is read from memory once, and the
    heaviest tiles of all of them come first.
    """
    pairs = problem.num_heads * (1 if problem.ragged else max(sizes.num_sequences, 1))
    kept = max(sizes.num_keys, 1) * problem.key_bytes
    fitting = max(int(L2_SHARE * target.l2_bytes / kept), 1)
    return min(pairs, fitting)
