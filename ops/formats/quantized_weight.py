"""Conversions of quantised weights: packs and unpacks codes of 4 bits, and expands the values that
the elements of a block share.

A nibble is an unsigned code 0..15. A word has two nibbles (uint8) or eight (int32). `order` gives
the places of the nibbles: with `per` nibbles in a word, element `i * per + j` begins at bit
`4 * order[j]` of word i. AWQ's int32 words have the order [0, 4, 1, 5, 2, 6, 3, 7]. All other
formats have ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.codegen.formats import AWQ_ORDER as AWQ_ORDER


def nibbles_per_word(dtype: torch.dtype) -> int:
    """Returns the number of nibbles in a word: 2 for uint8, 8 for int32."""
    return 2 * dtype.itemsize


def unpack_nibbles(words: torch.Tensor, axis: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Unpacks uint8 or int32 words along `axis` into codes, as int32."""
    shifts = torch.tensor(_order(words.dtype, order), device=words.device) * 4
    along = words.movedim(axis, -1).to(torch.int64)
    codes = (along.unsqueeze(-1) >> shifts) & 15
    return codes.flatten(-2).movedim(-1, axis).to(torch.int32)


def pack_nibbles(
    codes: torch.Tensor, dtype: torch.dtype, axis: int, order: Sequence[int] = ()
) -> torch.Tensor:
    """Packs codes 0..15 into words of `dtype`. The result is contiguous. This is the inverse of
    `unpack_nibbles`.

    Raises ValueError if the axis does not fill whole words.
    """
    per = nibbles_per_word(dtype)
    if codes.shape[axis] % per:
        raise ValueError(f"codes: expected a multiple of {per} on axis {axis}, got {codes.shape}")
    shifts = torch.tensor(_order(dtype, order), device=codes.device) * 4
    along = codes.movedim(axis, -1).to(torch.int64).unflatten(-1, (-1, per))
    words = (along << shifts).sum(dim=-1)
    if dtype == torch.int32:
        words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(dtype).movedim(-1, axis).contiguous()


def _order(dtype: torch.dtype, order: Sequence[int]) -> list[int]:
    return list(order) or list(range(nibbles_per_word(dtype)))


def expand_blocks(blocks: torch.Tensor, shape: Sequence[int], block: Sequence[int]) -> torch.Tensor:
    """Expands one value for each block [ceil(rows / bn), ceil(columns / bk)] to one value for each
    element of `shape`."""
    for axis in range(2):
        if blocks.shape[axis] == 1:
            continue
        blocks = blocks.repeat_interleave(block[axis], dim=axis).narrow(axis, 0, shape[axis])
    return blocks.expand(*shape)


def zeros_are_packed(zero: torch.Tensor, rows: int, block: Sequence[int]) -> bool:
    """Whether each int32 word of `zero` holds the zeros of eight rows, as its shape shows."""
    return zero.dtype == torch.int32 and zero.shape[0] * 8 * block[0] == rows
