"""Small templates with expressions and statements that the emitter must fold, drop, inline, unroll
or keep."""

import math

import triton
import triton.language as tl
from sample_templates.helpers import activate, clamp, double_and_half

LOG2E = tl.constexpr(math.log2(math.e))
UNUSED = object()


@triton.jit
def vector_add(x_ptr, y_ptr, out_ptr, n, ALPHA: tl.constexpr, BLOCK: tl.constexpr):
    """Computes out = x + ALPHA * y over n elements."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, x + ALPHA * y, mask=mask)


@triton.jit
def gemm(
    a_ptr, b_ptr, c_ptr, bias_ptr, m,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Computes c[m, N] = activation(a[m, K] @ b[N, K]^T + bias). Inputs and output are bf16, and
    the arithmetic is fp32."""
    tl.static_assert(K % 8 == 0, "rows are loaded in whole vectors")
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    rows = tile // TILES_N * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < m
    column_mask = columns < N
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        inner_mask = inner < K
        a = tl.load(
            a_ptr + rows[:, None] * K + inner[None, :],
            mask=row_mask[:, None] & inner_mask[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + columns[:, None] * K + inner[None, :],
            mask=column_mask[:, None] & inner_mask[None, :],
            other=0.0,
        )
        accumulator = tl.dot(a, b.T, accumulator)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=column_mask, other=0.0)
        accumulator += bias[None, :].to(tl.float32)
    accumulator = activate(accumulator, ACTIVATION)
    tl.store(
        c_ptr + rows[:, None] * N + columns[None, :],
        accumulator.to(c_ptr.dtype.element_ty),
        mask=row_mask[:, None] & column_mask[None, :],
    )


@triton.jit
def tma_gemm(
    a_ptr, b_ptr, c_ptr, m,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Computes c[m, N] = a[m, K] @ b[N, K]^T with descriptors, in a persistent loop over tiles."""
    a_desc = tl.make_tensor_descriptor(a_ptr, [m, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(c_ptr, [m, N], [N, 1], [BLOCK_M, BLOCK_N])
    tiles = tl.cdiv(m, BLOCK_M) * (N // BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), tiles, tl.num_programs(0),
        flatten=True, warp_specialize=WARP_SPECIALIZE,
    ):  # fmt: skip
        row = tile // (N // BLOCK_N) * BLOCK_M
        column = tile % (N // BLOCK_N) * BLOCK_N
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            a = a_desc.load([row, start])
            b = b_desc.load([column, start])
            accumulator = tl.dot(a, b.T, accumulator)
        c_desc.store([row, column], accumulator.to(tl.bfloat16))


@triton.jit
def softmax_rows(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """Computes out = softmax(SCALE * x) over rows of WIDTH elements, with one row per program."""
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    row = tl.program_id(0) * WIDTH
    x = tl.load(x_ptr + row + columns, mask=mask, other=float("-inf")).to(tl.float32)
    scaled = (x - tl.max(x, axis=0)) * (SCALE * LOG2E)
    weights = tl.exp2(scaled)
    tl.store(out_ptr + row + columns, weights / tl.sum(weights, axis=0), mask=mask)


@triton.jit
def branches(
    x_ptr, out_ptr, n, limit,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, MODE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Has run-time and compile-time branches, loops of both kinds, and helpers with equal local
    names."""
    tile = tl.program_id(0)
    if tile * BLOCK >= n:
        return
    offsets = tile * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    doubled, half = double_and_half(value)
    result = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        if step % 2 == 0:
            result += doubled * step
        else:
            result -= half
    if MODE == "add":
        result = result + value
    elif MODE in ("mul", "product"):
        result = result * value
    count = 0
    while count < limit:
        result += 1.0
        count += 1
    factor = 3.0
    if limit <= 2:
        factor *= 0.5
        factor /= 3.0
    for _ in range(limit):
        result = result * factor if CLAMP is None else clamp(result * factor, CLAMP)
    tl.store(out_ptr + offsets, result, mask=offsets < n)


@triton.jit
def index_games(x_ptr, out_ptr, rows, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Has index arithmetic that can be folded: out[i] = x[i] + group of i. rows is a multiple of
    16."""
    lane = tl.arange(0, WIDTH)
    row = tl.program_id(0)
    offsets = row * WIDTH + lane
    group = offsets // WIDTH
    within = offsets % WIDTH
    same = (offsets * GROUP) // GROUP * 1 + 0
    inside = (within < WIDTH) & (group * GROUP // GROUP < rows) & (lane >= 0)
    x = tl.load(x_ptr + same, mask=inside, other=0)
    tl.store(out_ptr + group * WIDTH + within, x + group, mask=inside)


@triton.jit
def strided_sum(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Computes out[0] = sum of x[:n]. n is a multiple of 16, so blocks of 16 are never cut."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(out_ptr, tl.sum(total, axis=0))


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def reduce_with(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Passes a helper function as an argument instead of calling it."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.reduce(x, 0, _larger))


@triton.jit
def sums_of_rows(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums out = x [ROWS, COLUMNS] over columns, with an axis counted from the end and a positional
    mask."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :])
    sums = tl.where(COLUMNS > 0, tl.sum(x, axis=-1), tl.zeros((ROWS,), tl.int32))
    tl.store(out_ptr + rows, sums, rows < ROWS)


@triton.jit
def exchanged_pairs(x_ptr, out_ptr, PAIRS: tl.constexpr):
    """Exchanges the members of pairs: out[2 * i] = x[2 * i + 1] and out[2 * i + 1] = x[2 * i]."""
    x = tl.load(x_ptr + tl.arange(0, 2 * PAIRS))
    first, second = tl.split(tl.reshape(x, (PAIRS, 2)))
    place, other = 2 * tl.arange(0, PAIRS), 2 * tl.arange(0, PAIRS) + 1
    place, other = other, place
    tl.store(out_ptr + place, first, mask=place < 2 * PAIRS)
    tl.store(out_ptr + other, second, mask=other < 2 * PAIRS)
