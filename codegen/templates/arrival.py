"""The last of several programs that share a result: it finishes what the others began."""

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
