"""Routes sorted by expert: a counting sort in one launch, or in two for many routes.

A route is one slot of one token, number `t * S + s`. Routes of an expert keep their order, so the
result does not depend on which program runs when. A route of expert -1 has no place.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_experts(ids_ptr, chunk, num_routes, NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """(routes of a chunk, their experts, whether they have one), each [CHUNK]."""
    routes = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + routes, mask=routes < num_routes, other=-1).to(tl.int32)
    return routes, ids, (ids >= 0) & (ids < NUM_EXPERTS)


@triton.jit
def moe_count(
    ids_ptr, counts_ptr, num_routes,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """counts [chunks, EXPERTS]: the routes of each expert in each chunk. Grid (chunks,)."""
    chunk = tl.program_id(0)
    _, ids, placed = chunk_experts(ids_ptr, chunk, num_routes, NUM_EXPERTS, CHUNK)
    counts = tl.histogram(tl.maximum(ids, 0), EXPERTS, mask=placed)
    tl.store(counts_ptr + chunk * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit
def moe_order(
    ids_ptr, counts_ptr, order_ptr, ends_ptr, num_routes, num_chunks,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS_PER_LOAD: tl.constexpr, ROUTES_PER_STEP: tl.constexpr,
):  # fmt: skip
    """order [routes]: the route at each sorted place; ends [NUM_EXPERTS]: where each expert ends.

    Grid (chunks,). counts is what `moe_count` wrote; None where one chunk holds all routes.
    EXPERTS is the power of two that covers NUM_EXPERTS.
    """
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    routes, ids, placed = chunk_experts(ids_ptr, chunk, num_routes, NUM_EXPERTS, CHUNK)
    if counts_ptr is None:
        total = tl.histogram(tl.maximum(ids, 0), EXPERTS, mask=placed)
        before = tl.zeros((EXPERTS,), tl.int32)
    else:
        total = tl.zeros((EXPERTS,), tl.int32)
        before = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, num_chunks, CHUNKS_PER_LOAD):
            chunks = first + tl.arange(0, CHUNKS_PER_LOAD)
            counts = tl.load(
                counts_ptr + chunks[:, None] * EXPERTS + experts[None, :],
                mask=(chunks < num_chunks)[:, None], other=0,
            )  # fmt: skip
            total += tl.sum(counts, axis=0)
            before += tl.sum(tl.where((chunks < chunk)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if chunk == 0:
        tl.store(ends_ptr + experts, ends, mask=experts < NUM_EXPERTS)
    # A route's place: after all lower experts, after its expert's routes in earlier chunks, and
    # after those that precede it in its own.
    place = tl.gather(ends - total + before, tl.maximum(ids, 0), 0)
    for first in range(0, CHUNK, ROUTES_PER_STEP):
        others = chunk * CHUNK + first + tl.arange(0, ROUTES_PER_STEP)
        other_ids = tl.load(ids_ptr + others, mask=others < num_routes, other=-1).to(tl.int32)
        same = (ids[:, None] == other_ids[None, :]) & (others[None, :] < routes[:, None])
        place += tl.sum(same.to(tl.int32), axis=1)
    tl.store(order_ptr + place, routes, mask=placed)
