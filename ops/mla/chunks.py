"""Chunks of a ragged batch's keys: all sequences' keys in a row, cut every `buffer_size` rows."""

from __future__ import annotations

import torch

Plan = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def row_ends(
    row_offsets: torch.Tensor, cache_lengths: torch.Tensor, page_size: int = 1
) -> torch.Tensor:
    """Where each sequence's rows begin and end, in whole pages: int64 [B + 1]."""
    lengths = cache_lengths.to(torch.int64) + row_offsets.to(torch.int64).diff()
    rows = -(-lengths // page_size) * page_size
    return torch.nn.functional.pad(rows.cumsum(0), (1, 0))


def cut(
    row_offsets: torch.Tensor,
    cache_lengths: torch.Tensor,
    buffer_size: int,
    max_chunks: int,
    page_size: int = 1,
) -> Plan:
    """(buffer_row_offsets [C, B + 1], cache_offsets [C, B + 1], buffer_lengths [C]) in int32, as
    `mla_prefill_plan` gives them."""
    ends = row_ends(row_offsets, cache_lengths, page_size)
    first = torch.arange(max_chunks, device=ends.device)[:, None] * buffer_size
    rows = (ends - first).clamp(0, buffer_size)
    starts = torch.minimum((first - ends[:-1]).clamp(min=0), ends.diff())
    starts = torch.nn.functional.pad(starts, (0, 1))
    lengths = rows[:, -1]
    unused = (lengths == 0) & (first.flatten() > 0)
    lengths = torch.where(unused, -1, lengths)
    return rows.to(torch.int32), starts.to(torch.int32), lengths.to(torch.int32)
