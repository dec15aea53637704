"""`mla_prefill_plan`: divides the keys of a ragged batch into chunks that fit a buffer of latents.

The keys of all sequences are numbered as rows, one sequence after another. Chunk c has the rows
from c * buffer_size up to (c + 1) * buffer_size. If page_size is given, each sequence takes whole
pages of rows, including the unused end of its last page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.ops.cache.ragged_batch import INDEX_DTYPES, check_row_offsets
from tilewright.ops.checks import (
    INT32_MAX,
    ArgumentError,
    check_operand,
    first,
    readable,
)
from tilewright.ops.contract import EXACT, FusedOp, register
from tilewright.ops.mla.cases import PLAN_CASES, PlanCase

NAME = "mla_prefill_plan"
Plan = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: The largest number of chunks. The result has a row for every chunk, used or not.
MAX_CHUNKS = 2**16


@dataclass(frozen=True)
class PlanArguments:
    """The arguments of `mla_prefill_plan`, for B sequences and C = max_chunks.

    - `input_row_offsets` [B + 1], `cache_lengths` [B]: as in `mla_prefill_branch_fp8`.
    - `buffer_size`: the number of rows of a chunk, a multiple of page_size, less than 2^31.
    - `max_chunks`: at most MAX_CHUNKS, because the result has a row for each chunk.

    The results are int32:

    - `buffer_row_offsets` [C, B + 1]: in chunk c, the keys of sequence b take the rows from
      buffer_row_offsets[c, b] to buffer_row_offsets[c, b + 1] of the buffer.
    - `cache_offsets` [C, B + 1]: the position, in its sequence, of the first key that sequence b
      has in chunk c. The last column is 0.
    - `buffer_lengths` [C]: the number of rows that each chunk uses; -1 for chunks that are not
      needed. For a batch without keys, the length of the first chunk is 0.

    If the keys do not fit into max_chunks chunks, the op raises ArgumentError. If the lengths are
    on a GPU, this is checked only with TILEWRIGHT_DEBUG=1. Without this check, the last keys are in
    no chunk.
    """

    input_row_offsets: torch.Tensor
    cache_lengths: torch.Tensor
    buffer_size: int
    max_chunks: int = 16
    page_size: int = 1


def validate(a: PlanArguments) -> None:
    check_operand(NAME, "cache_lengths", a.cache_lengths, "[B]", (None,), INDEX_DTYPES)
    form = "[B + 1]", (a.cache_lengths.shape[0] + 1,), INDEX_DTYPES, a.cache_lengths.device
    check_operand(NAME, "input_row_offsets", a.input_row_offsets, *form)
    bounded = ("max_chunks", a.max_chunks, MAX_CHUNKS), ("page_size", a.page_size, INT32_MAX)
    for name, number, most in bounded:
        if not 1 <= number <= most:
            raise ArgumentError(NAME, name, f"at least 1, at most {most}", number)
    if not 1 <= a.buffer_size <= INT32_MAX or a.buffer_size % a.page_size:
        expected = f"a positive multiple of page_size = {a.page_size} up to {INT32_MAX}"
        raise ArgumentError(NAME, "buffer_size", expected, a.buffer_size)


def validate_values(a: PlanArguments) -> None:
    if not readable((a.input_row_offsets, a.cache_lengths)):
        return
    _check_lengths(a)
    ends = row_ends(a.input_row_offsets, a.cache_lengths, a.page_size)
    total, room = int(ends[-1]), a.buffer_size * a.max_chunks
    if total > room:
        expected = f"room for {total} rows of keys (buffer_size * max_chunks)"
        raise ArgumentError(NAME, "buffer_size", expected, f"{a.buffer_size} * {a.max_chunks}")


def _check_lengths(a: PlanArguments) -> None:
    """Checks that offsets do not decrease, and that each sequence has from 0 to INT32_MAX keys."""
    offsets, cached = (t.to(torch.int64) for t in (a.input_row_offsets, a.cache_lengths))
    check_row_offsets(NAME, "input_row_offsets", offsets, int(offsets[-1]), "the number of tokens")
    wrong = first((cached < 0) | (cached > INT32_MAX - offsets.diff()))
    if wrong is not None:
        expected = f"at least 0 tokens, and at most {INT32_MAX} together with the new tokens"
        raise ArgumentError(NAME, "cache_lengths", expected, f"{int(cached[wrong])} at {wrong}")


def fake(a: PlanArguments) -> Plan:
    shape = (a.max_chunks, a.input_row_offsets.shape[0])
    made = [a.cache_lengths.new_empty(shape, dtype=torch.int32) for _ in range(2)]
    return made[0], made[1], a.cache_lengths.new_empty(a.max_chunks, dtype=torch.int32)


def reference(a: PlanArguments) -> Plan:
    """Computes the following integers exactly for each chunk c and sequence b:

        length[b] = cache_lengths[b] + new tokens of b, rounded up to whole pages
        start[b] = sum of length[:b]
        buffer_row_offsets[c, b] = clamp(start[b] - c * buffer_size, 0, buffer_size)
        cache_offsets[c, b] = clamp(c * buffer_size - start[b], 0, length[b])
        buffer_lengths[c] = buffer_row_offsets[c, B]      -1 where that is 0 and c > 0

    The op has no other lowering. A call runs a few small PyTorch kernels, and one call for each
    forward pass of the model suffices.
    """
    given = (a.input_row_offsets, a.cache_lengths)
    return cut(*given, a.buffer_size, a.max_chunks, a.page_size)


def row_ends(
    row_offsets: torch.Tensor, cache_lengths: torch.Tensor, page_size: int = 1
) -> torch.Tensor:
    """Returns the offsets of the sequences' rows, int64 [B + 1]: a 0, followed by the end of each
    sequence. Each sequence takes whole pages of rows."""
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
    """Returns (buffer_row_offsets [C, B + 1], cache_offsets [C, B + 1], buffer_lengths [C]) in
    int32. The length of a chunk that is not needed is 0 here, not -1."""
    ends = row_ends(row_offsets, cache_lengths, page_size)
    first = torch.arange(max_chunks, device=ends.device)[:, None] * buffer_size
    rows = (ends - first).clamp(0, buffer_size)
    starts = torch.minimum((first - ends[:-1]).clamp(min=0), ends.diff())
    starts = torch.nn.functional.pad(starts, (0, 1))
    lengths = rows[:, -1]
    unused = (lengths == 0) & (first.flatten() > 0)
    lengths = torch.where(unused, -1, lengths)
    return rows.to(torch.int32), starts.to(torch.int32), lengths.to(torch.int32)


def sample_inputs(
    case: PlanCase, device: str | torch.device = "cpu", seed: int = 0
) -> PlanArguments:
    """Returns the arguments of a case."""
    new = torch.tensor((0, *case.new_tokens)).cumsum(0)
    cached = torch.tensor(case.cached_tokens, dtype=torch.int64)
    new, cached = (t.to(case.index_dtype).to(device) for t in (new, cached))
    return PlanArguments(new, cached, case.buffer_size, case.max_chunks, case.page_size)


OP = register(
    FusedOp(
        name=NAME,
        arguments=PlanArguments,
        returns="(Tensor, Tensor, Tensor)",
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(),
        cases=PLAN_CASES,
        sample_inputs=sample_inputs,
        tolerances={torch.int32: EXACT},
        error_model="None: results are integers, the same on every device.",
    )
)


def mla_prefill_plan(
    input_row_offsets: torch.Tensor,
    cache_lengths: torch.Tensor,
    buffer_size: int,
    max_chunks: int = 16,
    page_size: int = 1,
) -> Plan:
    """Calls the op: returns (buffer_row_offsets [C, B + 1], cache_offsets [C, B + 1],
    buffer_lengths [C]) for `mla_prefill_branch_fp8`. See PlanArguments. Raises ArgumentError.

        >>> rows, starts, lengths = mla_prefill_plan(
        ...     torch.tensor([0, 10, 40]), torch.tensor([0, 0]), buffer_size=32, max_chunks=2)
        >>> rows.tolist(), starts.tolist(), lengths.tolist()
        ([[0, 10, 32], [0, 0, 8]], [[0, 0, 0], [10, 22, 0]], [32, 8])
    """
    return OP.torch_op(input_row_offsets, cache_lengths, buffer_size, max_chunks, page_size)
