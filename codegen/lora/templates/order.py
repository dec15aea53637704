"""Sorts rows by adapter with a counting sort, in one launch. Rows without an adapter come last.

The rows of an adapter keep their order, so the result does not depend on the order in which
programs run.
"""

import triton
import triton.language as tl

from tilewright.codegen.lora.templates.rows import adapter_of_ids


@triton.jit
def ids_of_rows(ids_ptr, rows, num_rows, rows_per_id, NUM_ADAPTERS: tl.constexpr):
    """Returns the adapter of each row. For a row without an adapter, returns NUM_ADAPTERS."""
    ids = tl.load(ids_ptr + rows // rows_per_id, mask=rows < num_rows, other=-1)
    return adapter_of_ids(ids, NUM_ADAPTERS, NUM_ADAPTERS)


@triton.jit
def lora_order(
    ids_ptr, order_ptr, ends_ptr, num_rows, total_rows, rows_per_id,
    NUM_ADAPTERS: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS_PER_LOAD: tl.constexpr, ROWS_PER_STEP: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Sorts rows by LoRA adapter. Writes to order [total_rows] the row at each sorted place, and to
    ends [NUM_ADAPTERS] the end of each adapter's rows.

    Grid (cdiv(total_rows, CHUNK),). Each program counts all rows and finds the places of the rows
    of its chunk. GROUPS: a power of two greater than NUM_ADAPTERS.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * CHUNK
    groups = tl.arange(0, GROUPS)
    total = tl.zeros((GROUPS,), tl.int32)
    before = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, total_rows, ROWS_PER_LOAD):
        every = start + tl.arange(0, ROWS_PER_LOAD)
        ids = ids_of_rows(ids_ptr, every, num_rows, rows_per_id, NUM_ADAPTERS)
        total += tl.histogram(ids, GROUPS, mask=every < total_rows)
        before += tl.histogram(ids, GROUPS, mask=every < first)
    ends = tl.cumsum(total, axis=0)
    if first == 0:
        tl.store(ends_ptr + groups, ends, mask=groups < NUM_ADAPTERS)
    # A row comes after the rows of all lower adapters, after the rows of its own adapter in earlier
    # chunks, and after the earlier rows of its own adapter in its own chunk.
    rows = first + tl.arange(0, CHUNK)
    ids = ids_of_rows(ids_ptr, rows, num_rows, rows_per_id, NUM_ADAPTERS)
    place = tl.gather(ends - total + before, ids, 0)
    for step in range(0, CHUNK, ROWS_PER_STEP):
        others = first + step + tl.arange(0, ROWS_PER_STEP)
        other_ids = ids_of_rows(ids_ptr, others, num_rows, rows_per_id, NUM_ADAPTERS)
        same = (ids[:, None] == other_ids[None, :]) & (others[None, :] < rows[:, None])
        place += tl.sum(same.to(tl.int32), axis=1)
    tl.store(order_ptr + place, rows, mask=rows < total_rows)
