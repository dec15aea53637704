"""Templates that the emitter must refuse, because it cannot emit them exactly. Each has a different
reason."""

import triton
import triton.language as tl
from triton.language.extra import cuda

NOT_CONSTANT = [1, 2, 3]


@triton.jit
def early(value, n):
    if n > 3:
        return value
    return value + 1


@triton.jit
def storing(pointer, value):
    tl.store(pointer, value)
    return value


@triton.jit
def forever(value):
    return forever(value)


@triton.jit
def return_in_branch(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr, early(tl.load(x_ptr), n))


@triton.jit
def effect_inside_expression(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + 1, tl.load(x_ptr) + storing(x_ptr, n))


@triton.jit
def waiting(value):
    cuda.gdc_wait()
    return value


@triton.jit
def unknown_effect_inside_expression(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + 1, tl.load(x_ptr) + waiting(n))


@triton.jit
def recursion(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr, forever(n))


@triton.jit
def chained_comparison(x_ptr, n, BLOCK: tl.constexpr):
    if 0 < n < 5:
        tl.store(x_ptr, n)


@triton.jit
def assertion(x_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK % 32 == 0, "whole warps")
    tl.store(x_ptr, n)


@triton.jit
def undecidable_assertion(x_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(n > 0)
    tl.store(x_ptr, n)


@triton.jit
def constant_under_runtime_control(x_ptr, n, BLOCK: tl.constexpr):
    if n > 3:
        BLOCK = 7
    tl.store(x_ptr, BLOCK)


@triton.jit
def unknown_name(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr, undefined_helper(n))  # noqa: F821


@triton.jit
def subscript(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.arange(0, BLOCK)[3])


@triton.jit
def comprehension(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr, len([n for _ in (1, 2)]))


@triton.jit
def division_by_zero(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr, n + BLOCK // 0)


@triton.jit
def loop_over_tuple(x_ptr, n, BLOCK: tl.constexpr):
    for value in (1, 2):
        tl.store(x_ptr, value)


@triton.jit
def helper_in_conditional(x_ptr, n, BLOCK: tl.constexpr):
    value = storing(x_ptr, n) if n > 2 else 0
    tl.store(x_ptr, value)


@triton.jit
def plain(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), n)
