"""The sequence and the position of each query."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.cache.addressing import ragged_sequences
from tilewright.ops.cache.ragged_batch import INDEX_DTYPES
from tilewright.ops.checks import (
    INT32_MAX,
    ArgumentError,
    check_device,
    check_dtype,
    check_operand,
    first,
    holds,
    shape_text,
)


def sequences(a: Any) -> Any:
    """Returns B, the number of sequences."""
    return a.num_sequences if a.row_offsets is None else a.row_offsets.shape[0] - 1


def room(a: Any) -> Any:
    """Returns K, the number of keys that a sequence has room for."""
    return a.k.shape[1] * (1 if a.block_table is None else a.block_table.shape[1])


def token_sequences(
    num_tokens: int,
    row_offsets: torch.Tensor | None,
    num_sequences: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sequence of each token, and the token's index in the sequence, like
    `ragged_sequences`. If row_offsets is None, all sequences have the same number of tokens."""
    if row_offsets is not None:
        return ragged_sequences(row_offsets, num_tokens)
    token = torch.arange(num_tokens, device=device)
    run = max(num_tokens // max(num_sequences, 1), 1)
    return token // run, token % run


def token_positions(
    num_tokens: int,
    row_offsets: torch.Tensor | None,
    num_sequences: int,
    positions: torch.Tensor | None,
    cache_lengths: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Returns the position of each token, int64 [T].

    The position of a token is given by `positions` [T], or by [T / B] if all sequences share the
    positions. If positions is None, token i of sequence b has the position cache_lengths[b] + i, or
    i if cache_lengths is None too.
    """
    if positions is not None:
        repeats = num_tokens // max(positions.shape[0], 1)
        return positions.to(torch.int64).repeat(max(repeats, 1))[:num_tokens]
    sequence, place = token_sequences(num_tokens, row_offsets, num_sequences, device)
    if cache_lengths is None or num_tokens == 0:
        return place
    lengths = cache_lengths.to(torch.int64)
    return place + lengths[sequence.clamp(0, lengths.shape[0] - 1)]


def positions_of(a: Any) -> torch.Tensor:
    """Returns the position of each query, int64 [T]."""
    batch = (a.row_offsets, a.num_sequences, a.positions, a.cache_lengths)
    return token_positions(a.q.shape[0], *batch, a.q.device)


def check_runs(op: str, a: Any, *, each: bool = False) -> Any:
    """Checks the arguments that say which sequence each query of q [T, ..] belongs to, and its
    position. Returns B. Reads only metadata. Raises ArgumentError.

    each: whether `positions` must have a position for every token.
    """
    num_tokens = a.q.shape[0]
    if a.row_offsets is not None:
        form = "[B + 1]", (None,), INDEX_DTYPES, a.q.device
        check_operand(op, "row_offsets", a.row_offsets, *form)
        if not holds(a.row_offsets.shape[0] >= 1):
            raise ArgumentError(op, "row_offsets", "B + 1 offsets", "none")
    elif not (
        holds(a.num_sequences >= 1)
        and holds(a.num_sequences <= INT32_MAX)
        and holds(num_tokens % a.num_sequences == 0)
    ):
        expected = f"a divisor of T = {num_tokens}, since row_offsets is None"
        raise ArgumentError(op, "num_sequences", expected, a.num_sequences)
    batch = sequences(a)
    if a.cache_lengths is not None:
        form = "[B]", (batch,), INDEX_DTYPES, a.q.device
        check_operand(op, "cache_lengths", a.cache_lengths, *form)
    if a.positions is not None:
        rows = a.positions.shape[0] if a.positions.dim() == 1 else None
        shared = a.row_offsets is None and not each
        fits = rows is not None and (
            holds(rows == num_tokens) or (shared and holds(rows * batch == num_tokens))
        )
        if not fits:
            expected = f"shape [T] = [{num_tokens}]" + (f" or [T / {batch}]" if shared else "")
            raise ArgumentError(op, "positions", expected, f"shape {shape_text(a.positions.shape)}")
        check_dtype(op, "positions", a.positions, INDEX_DTYPES)
        check_device(op, "positions", a.positions, a.q.device)
    return batch


def check_positions(op: str, argument: str, positions: torch.Tensor, rows: int) -> None:
    """Checks that the tables of cos and sin have a row for each position. Raises ArgumentError."""
    where = first((positions < 0) | (positions >= rows))
    if where is not None:
        expected = f"positions from 0 to {rows - 1}, the rows of cos and sin"
        raise ArgumentError(op, argument, expected, f"{int(positions[where])} of token {where}")
