"""What the programs of one tile share where they split a sum: parts in memory, and who is last."""

import triton
import triton.language as tl


@triton.jit
def arrive(counter_ptr, SPLITS: tl.constexpr):
    """Whether a program, its part stored, is the last of SPLITS; the counter is left at zero for
    the next launch."""
    # All threads' stores come before the one thread's atomic.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def sum_of_parts(parts, offsets, mask, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """The sum of SPLITS parts that lie SIZE elements apart, in their order."""
    total = tl.load(parts + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    for index in tl.static_range(1, SPLITS):
        total += tl.load(parts + index * SIZE + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    return total
