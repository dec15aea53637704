"""Sorts routes by expert with a counting sort. This takes one launch for few routes, and three
launches for many routes.

A route is one slot of one token. Its number is `t * S + s`. The routes of an expert keep their
order, so the result does not depend on the order in which programs run. A route with expert -1 is
left out.
"""

import triton
import triton.language as tl


@triton.jit
def placed_experts(ids_ptr, routes, bound, NUM_EXPERTS: tl.constexpr):
    """Returns (expert of each route, whether the route has an expert and comes before `bound`)."""
    ids = tl.load(ids_ptr + routes, mask=routes < bound, other=-1).to(tl.int32)
    return ids, (ids >= 0) & (ids < NUM_EXPERTS)


@triton.jit
def moe_count(
    ids_ptr, counts_ptr, num_routes,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Performs step 1 of 3 of the counting sort of routes by expert: counts the routes of each
    expert in each chunk, and stores the numbers to counts [chunks, EXPERTS]. Grid (chunks,)."""
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    routes = chunk * CHUNK + tl.arange(0, CHUNK)
    ids, placed = placed_experts(ids_ptr, routes, num_routes, NUM_EXPERTS)
    counts = tl.histogram(tl.maximum(ids, 0), EXPERTS, mask=placed)
    tl.store(counts_ptr + chunk * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit
def moe_scan(
    counts_ptr, total_ptr, num_chunks,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNKS_PER_LOAD: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Performs step 2 of 3 of the counting sort of routes by expert: replaces each count by the sum
    of the counts of all earlier chunks, in place. Stores the sums over all chunks to total
    [EXPERTS].

    Grid (EXPERTS / BLOCK_E,).
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, num_chunks, CHUNKS_PER_LOAD):
        chunks = first + tl.arange(0, CHUNKS_PER_LOAD)
        places = counts_ptr + chunks[:, None] * EXPERTS + experts[None, :]
        mask = (chunks < num_chunks)[:, None]
        counts = tl.load(places, mask=mask, other=0)
        tl.store(places, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(total_ptr + experts, total)


@triton.jit
def moe_order(
    ids_ptr, counts_ptr, total_ptr, order_ptr, ends_ptr, num_routes,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    ROUTES_PER_LOAD: tl.constexpr, ROUTES_PER_STEP: tl.constexpr, ROW_BLOCK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Performs step 3 of 3 of the counting sort of routes by expert, or the whole sort. Stores the
    route at each sorted place to order [routes], and the end of each expert's routes to ends
    [NUM_EXPERTS].

    Grid (chunks,).

    Args:
        counts, total: The results of `moe_scan`. If they are None, every program counts all routes
            itself.
        ROW_BLOCK: If ROW_BLOCK is not 0, NUM_EXPERTS more numbers are stored after the ends: for
            each expert, the number of its first block. A block has ROW_BLOCK rows, and every expert
            starts a new block.
        EXPERTS: NUM_EXPERTS, rounded up to a power of two.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    routes = chunk * CHUNK + tl.arange(0, CHUNK)
    ids, placed = placed_experts(ids_ptr, routes, num_routes, NUM_EXPERTS)
    if counts_ptr is None:
        total = tl.zeros((EXPERTS,), tl.int32)
        before = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, num_routes, ROUTES_PER_LOAD):
            others = first + tl.arange(0, ROUTES_PER_LOAD)
            other_ids, there = placed_experts(ids_ptr, others, num_routes, NUM_EXPERTS)
            other_ids = tl.maximum(other_ids, 0)
            total += tl.histogram(other_ids, EXPERTS, mask=there)
            earlier = there & (others < chunk * CHUNK)
            before += tl.histogram(other_ids, EXPERTS, mask=earlier)
    else:
        total = tl.load(total_ptr + experts)
        before = tl.load(counts_ptr + chunk * EXPERTS + experts)
    ends = tl.cumsum(total, axis=0)
    if chunk == 0:
        tl.store(ends_ptr + experts, ends, mask=experts < NUM_EXPERTS)
        if ROW_BLOCK > 0:
            blocks = (total + ROW_BLOCK - 1) // ROW_BLOCK
            firsts = tl.cumsum(blocks, axis=0) - blocks
            tl.store(ends_ptr + NUM_EXPERTS + experts, firsts, mask=experts < NUM_EXPERTS)
    # A route comes after the routes of all lower experts, after the routes of its own expert in
    # earlier chunks, and after the earlier routes of its own expert in its own chunk.
    place = tl.gather(ends - total + before, tl.maximum(ids, 0), 0)
    for first in tl.static_range(0, CHUNK, ROUTES_PER_STEP):
        others = chunk * CHUNK + first + tl.arange(0, ROUTES_PER_STEP)
        other_ids = tl.load(ids_ptr + others, mask=others < num_routes, other=-1).to(tl.int32)
        same = (ids[:, None] == other_ids[None, :]) & (others[None, :] < routes[:, None])
        place += tl.sum(same.to(tl.int32), axis=1)
    tl.store(order_ptr + place, routes, mask=placed)
