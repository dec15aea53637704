"""Reduces a sum that several programs compute in parts. Each program stores its part, and the last
program adds the parts."""

import triton
import triton.language as tl


@triton.jit
def arrive(counter_ptr, SPLITS: tl.constexpr):
    """Counts a program that has stored its part. Returns whether it is the last of SPLITS programs.
    The last program resets the counter to zero for the next launch."""
    # The stores of all threads must be done before the atomic of one thread.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def sum_of_parts(parts, offsets, mask, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Returns the sum of SPLITS parts, added in a fixed order. The parts are SIZE elements
    apart."""
    total = tl.load(parts + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    for index in tl.static_range(1, SPLITS):
        total += tl.load(parts + index * SIZE + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    return total
