"""The flat GPTQ buffer of Modular MAX: uint8 [R, N], before any repacking, little endian.

    words    uint32 [K / 8, N]   nibble i of word (j, n) is the code of row n, column 8 j + i
    scales   fp16   [K / g, N]
    zeros    uint32 [K / g, N / 8], optional: nibble i of word (j, m) is the zero point of row
             8 m + i; without zeros, the zero point is 8

The sections are stored one after another. R is the smallest number of rows of N bytes that holds
all sections. Without zeros, R is exactly K / g * (2 + g / 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.ops.formats.quantized_weight import pack_nibbles

#: The zero point of a symmetric buffer.
SYMMETRIC_ZERO = 8


@dataclass(frozen=True)
class GptqSections:
    """Views of the sections of a buffer, with rows as the first dimension: words int32 [N, K / 8],
    scales fp16 [N, K / g], and zeros int32 [N / 8, K / g] or None."""

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


def buffer_rows(hidden: int, group_size: int, has_zp: bool) -> int:
    """Returns R, the number of rows of a buffer with K = hidden."""
    halves = hidden + 4 * (hidden // group_size) + (hidden // group_size if has_zp else 0)
    return -(-halves // 2)


def sections(buffer: torch.Tensor, hidden: int, group_size: int, has_zp: bool) -> GptqSections:
    """Returns the sections of a contiguous buffer [R, N]. N must be a multiple of 8, and K a
    multiple of 8 and of the group size."""
    rows, flat, groups = buffer.shape[1], buffer.view(-1), hidden // group_size
    ends = [rows * hidden // 2]
    ends.append(ends[0] + 2 * groups * rows)
    ends.append(ends[1] + groups * rows // 2)
    words = flat[: ends[0]].view(torch.int32).view(hidden // 8, rows).T
    scales = flat[ends[0] : ends[1]].view(torch.float16).view(groups, rows).T
    zeros = None
    if has_zp:
        zeros = flat[ends[1] : ends[2]].view(torch.int32).view(groups, rows // 8).T
    return GptqSections(words, scales, zeros)


def pack_buffer(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """Packs codes [N, K] 0..15, scales [N, K / g] and zeros [N, K / g] 0..15 into a buffer."""
    rows, hidden = codes.shape
    parts = [
        pack_nibbles(codes, torch.int32, 1).T.contiguous(),
        scales.to(torch.float16).T.contiguous(),
    ]
    if zeros is not None:
        parts.append(pack_nibbles(zeros, torch.int32, 0).T.contiguous())
    flat = torch.cat([part.view(torch.uint8).flatten() for part in parts])
    count = buffer_rows(hidden, hidden // scales.shape[1], zeros is not None)
    buffer = flat.new_zeros(count * rows)
    buffer[: flat.numel()] = flat
    return buffer.view(count, rows)
