"""The lists of blocks that the op `mask_blocks` returns: for each tile of queries, the blocks of
keys that at least one query attends to. This module has the op's arguments, reference and kernel,
and the checks of a list that a caller passes to attention."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS, LOWEST, ORDINARY, QUERIES
from tilewright.codegen.attention.mask_kernels import (
    MASK_BLOCKS,
    MaskConfig,
    MaskProblem,
    blocks_per_part,
    mask_config,
    numbers_per_tile,
)
from tilewright.codegen.kernel import Statics
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target
from tilewright.ops.attention.masks import largest_power
from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_dtype,
    check_operand,
    check_shape,
    holds,
    readable,
)
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.operands import mask_bytes
from tilewright.ops.runtime.program import Buffer, Outcome, SplitK, Step, Steps

NAME = "mask_blocks"
# The largest number of keys of a mask. An entry of a list is 2 * (number of the block) + (whether
# the block is whole), and kernels count keys in 32-bit integers.
MOST_KEYS = 2**30


@dataclass(frozen=True)
class MaskBlocksArguments:
    """The arguments of `mask_blocks`, for B sequences, H heads, S queries and K keys.

    - `attn_mask` [B or 1, H or 1, S or 1, K], with any strides: a bool mask has True for a visible
      key. A mask of numbers is added to the logits, and -inf hides a key.
    - `hide_lowest`: whether numbers of at most -1.75 E also hide keys. They do so only in tiles of
      128 queries in which every query has at least one number of -E / 8 or more. E is the largest
      power of two of the mask's dtype; `torch.finfo(dtype).min` is almost -2 E. Boolean masks are
      not affected.

    Set `hide_lowest` only if a key with such a number has no weight beside keys with ordinary
    numbers. This requires that logits are at most E / 2, that the mask alone determines which keys
    are visible, and that the mask has one column for each key.

    The result is int32 [.., .., ceil(S / 128), 1 + ceil(K / 64)]. For each tile of 128 queries, the
    result has the number of blocks of 64 keys that at least one query attends to, then these blocks
    in ascending order, then zeros. A block is given as 2 * its number, plus 1 if the block is
    whole. A block is whole if it has 64 keys, if every query of the tile attends to all of them,
    and if a mask of numbers adds zero to their logits.
    """

    attn_mask: torch.Tensor
    _: KW_ONLY
    hide_lowest: bool = False


def validate(a: MaskBlocksArguments) -> None:
    check_shape(NAME, "attn_mask", a.attn_mask, "[B, H, S, K]", (None,) * 4)
    check_dtype(NAME, "attn_mask", a.attn_mask, (torch.bool, *FLOAT_DTYPES))
    keys = a.attn_mask.shape[3]
    if not holds(keys <= MOST_KEYS):
        raise ArgumentError(NAME, "attn_mask", f"at most {MOST_KEYS} keys", keys)


def validate_values(a: MaskBlocksArguments) -> None:
    """Checks nothing: every value is valid."""


def blocks_shape(mask: torch.Tensor) -> tuple[Any, Any, Any, Any]:
    """Returns the shape of the list of blocks of a mask."""
    batch, heads, queries, keys = mask.shape
    return batch, heads, (queries + QUERIES - 1) // QUERIES, 1 + (keys + KEYS - 1) // KEYS


def fake(a: MaskBlocksArguments) -> torch.Tensor:
    return a.attn_mask.new_empty(blocks_shape(a.attn_mask), dtype=torch.int32)


def reference(a: MaskBlocksArguments) -> torch.Tensor:
    """Computes the following for tile t of 128 queries and block b of 64 keys:

        seen[t, b] = any(mask[128 t:, 64 b:] != -inf)
        whole[t, b] = all(mask[128 t:, 64 b:] == 0)            and there are 64 keys
        out[t] = n, then 2 b + whole[t, b] of the n blocks that are seen, then zeros

    mask[128 t:, 64 b:] stands for the mask at the queries of tile t and the keys of block b. In a
    boolean mask, a key is seen where the mask is True, and a block is whole if the mask is True in
    all of it. With hide_lowest, if all(any(mask[128 t:] >= -E / 8, keys)):

        seen[t, b] = any(mask[128 t:, 64 b:] > -1.75 E)
    """
    mask, made = a.attn_mask, fake(a).zero_()
    if mask.dtype != torch.bool:
        seen_pairs, whole_pairs = mask != float("-inf"), mask == 0
    else:
        seen_pairs = whole_pairs = mask
    seen = _tiled(seen_pairs, spare_query=False).any(3).any(-1)
    whole = _tiled(whole_pairs, spare_query=True).all(3).all(-1)
    if unit := _unit(a):
        higher = _tiled(~(mask <= LOWEST * unit), spare_query=False).any(3).any(-1)
        ordinary = _tiled(mask >= ORDINARY * unit, spare_query=True).flatten(-2).any(-1).all(-1)
        seen = torch.where(ordinary[..., None], higher, seen)
    # Put the visible blocks first, in their order, and then the other blocks.
    order = (~seen).int().argsort(dim=-1, stable=True)
    entries = torch.where(seen, 2 * torch.arange(seen.shape[-1], device=mask.device) + whole, 0)
    made[..., 0] = seen.sum(-1)
    made[..., 1:] = entries.gather(-1, order)
    return made


def _tiled(pairs: torch.Tensor, *, spare_query: bool) -> torch.Tensor:
    """Splits [B, H, S, K] into [B, H, tiles, QUERIES, blocks, KEYS]. Queries that are added as
    padding get the value `spare_query`, and keys that are added get False."""
    *outer, queries, keys = pairs.shape
    rows, columns = cdiv(queries, QUERIES) * QUERIES, cdiv(keys, KEYS) * KEYS
    full = pairs.new_zeros((*outer, rows, columns))
    full[..., queries:, :keys] = spare_query
    full[..., :queries, :keys] = pairs
    return full.unflatten(-2, (-1, QUERIES)).unflatten(-1, (-1, KEYS))


def _unit(a: MaskBlocksArguments) -> float:
    """Returns the largest power of two of the mask's dtype if the lowest numbers of the mask hide
    keys; else 0."""
    hides = a.hide_lowest and a.attn_mask.dtype != torch.bool
    return largest_power(a.attn_mask.dtype) if hides else 0.0


# --- the kernel -----------------------------------------------------------------------------------


def unsupported(a: MaskBlocksArguments) -> str | None:
    """Returns why the emitted kernel cannot compute a call; None if it can. Reads only metadata."""
    dtype = a.attn_mask.dtype
    return f"no kernel for {dtype}" if dtype == torch.float64 else None


def mask_blocks_steps(a: MaskBlocksArguments, target: Target) -> Steps:
    """Performs the steps of a `mask_blocks` call."""
    mask = mask_bytes(a.attn_mask)
    batch, heads, query_tiles, columns = shape = blocks_shape(mask)
    tiles, key_blocks = batch * heads * query_tiles, columns - 1
    rows = next_power_of_2(min(mask.shape[2], QUERIES))
    dtype = TRITON_TYPES[mask.dtype]
    problem = MaskProblem(dtype, rows, next_power_of_2(key_blocks), _unit(a))
    config, statics = _mask_kernel(problem, tiles, target)
    out = yield Buffer(shape, torch.int32)
    flags, counters = yield SplitK(tiles, numbers_per_tile(problem, config, key_blocks))
    dense = mask.shape[3] <= 1 or mask.stride(3) == 1
    known: dict[str, Constant] = {"column_stride": 1} if dense else {}
    values = {
        "mask": mask,
        "out": out,
        "flags": flags,
        "counters": counters,
        "num_heads": heads,
        "num_queries": mask.shape[2],
        "num_keys": mask.shape[3],
        "query_tiles": query_tiles,
        "key_blocks": key_blocks,
        "blocks_per_part": blocks_per_part(config, key_blocks),
        "parts": config.parts,
    }
    grid = (tiles, config.parts)
    yield launch(MASK_BLOCKS, target, grid, values, statics, **known)
    return Outcome(out, "mask blocks", config)


@cache
def _mask_kernel(problem: MaskProblem, tiles: int, target: Target) -> tuple[MaskConfig, Statics]:
    """Returns the tile sizes for a mask, and the constants of the kernel."""
    config = mask_config(problem, tiles, target)
    return config, Statics(problem, config, keys=KEYS, queries=QUERIES, **problem.bounds)


def list_steps(
    mask: torch.Tensor, target: Target, *, hide_lowest: bool
) -> Generator[Step, Any, torch.Tensor]:
    """Performs the steps that compute the list of blocks of a mask, for a call that has no list. If
    the mask is expanded along a dimension, the list has length one there."""
    for dim in range(3):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, min(mask.shape[dim], 1))
    done = yield from mask_blocks_steps(MaskBlocksArguments(mask, hide_lowest=hide_lowest), target)
    assert isinstance(done.result, torch.Tensor)
    return done.result


def check_mask_blocks(op: str, mask: torch.Tensor | None, blocks: torch.Tensor | None) -> None:
    """Checks a given list of blocks against its mask. Reads only metadata. Raises ArgumentError."""
    if blocks is None:
        return
    if mask is None:
        raise ArgumentError(op, "mask_blocks", "None, since attn_mask is None", "a tensor")
    letters, shape, dtypes = "of mask_blocks(attn_mask)", blocks_shape(mask), (torch.int32,)
    check_operand(op, "mask_blocks", blocks, letters, shape, dtypes, mask.device, dense=True)


def check_mask_blocks_values(
    op: str, mask: torch.Tensor | None, blocks: torch.Tensor | None, *, hide_lowest: bool
) -> None:
    """Checks that a list of blocks belongs to its mask, if the values may be read. They may be read
    if they are on the CPU, or if TILEWRIGHT_DEBUG=1 is set. hide_lowest: whether a list that was
    computed with hide_lowest is accepted, too. Raises ArgumentError."""
    if mask is None or blocks is None or not readable((blocks,)):
        return
    own = [MaskBlocksArguments(mask, hide_lowest=hides) for hides in {False, hide_lowest}]
    if not any(torch.equal(blocks, reference(arguments)) for arguments in own):
        raise ArgumentError(op, "mask_blocks", "mask_blocks(attn_mask)", "another list")
