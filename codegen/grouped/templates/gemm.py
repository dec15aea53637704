"""Computes grouped GEMMs over rows that are sorted by expert, and the schedule of tiles that the
kernels of mixtures of experts also use.

`grouped_gemm` is the kernel of `grouped_matmul`, in which row i of the result belongs to row i of
x. In the down projection of a mixture of experts, it stores each row at the index of its route, so
that the rows of a token are adjacent.

The kernels are persistent. To find the expert of a tile, a program compares the tile's number with
all running sums of the experts' tile counts at once. Therefore no schedule is built beforehand, and
an expert without rows costs nothing. The tiles of an expert are consecutive. The expert's row
blocks are the innermost loop, so that a weight is read once.

If SWAPPED, the weight's rows are on the tensor core's M side. This is faster for few rows per
expert, where reading the weights takes almost all of the time.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.expert_weights import block_scales, dequantize_tile
from tilewright.codegen.templates.scale_numbers import bfloat16_parts


@triton.jit
def expert_tiles(ends_ptr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
                 BLOCK_M: tl.constexpr):  # fmt: skip
    """Returns (first row, end of the rows, number of row blocks) of every expert, each
    [EXPERTS]."""
    experts = tl.arange(0, EXPERTS)
    real = experts < NUM_EXPERTS
    end = tl.load(ends_ptr + experts, mask=real, other=0)
    start = tl.load(ends_ptr + experts - 1, mask=real & (experts > 0), other=0)
    return start, end, tl.where(real, (end - start + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def tile_place(tile, start, end, blocks, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
               TILES_N: tl.constexpr):  # fmt: skip
    """Returns (expert, first row, end of the expert's rows, column tile) of one tile."""
    last = tl.cumsum(blocks, axis=0) * TILES_N
    expert = tl.sum((last <= tile).to(tl.int32), axis=0)
    chosen = tl.arange(0, EXPERTS) == expert
    own_blocks = tl.sum(tl.where(chosen, blocks, 0), axis=0)
    within = tile - tl.sum(tl.where(chosen, last - blocks * TILES_N, 0), axis=0)
    first = tl.sum(tl.where(chosen, start, 0), axis=0) + within % own_blocks * BLOCK_M
    return expert, first, tl.sum(tl.where(chosen, end, 0), axis=0), within // own_blocks


@triton.jit
def searched_place(tile, ends_ptr, NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
                   TILES_N: tl.constexpr, SEARCH_STEPS: tl.constexpr):  # fmt: skip
    """Returns the same values as `tile_place`, by a binary search.

    The search runs over the numbers of the experts' first blocks, which `moe_order` stores after
    the ends. `tile_place` uses a reduction instead, and Triton before 3.9 cannot specialise warps
    in a loop that has a reduction. 2 ** SEARCH_STEPS is at least NUM_EXPERTS.
    """
    block = tile // TILES_N
    expert = tile * 0
    for step in tl.static_range(SEARCH_STEPS):
        later = expert + 2 ** (SEARCH_STEPS - 1 - step)
        first = tl.load(ends_ptr + NUM_EXPERTS + later, mask=later < NUM_EXPERTS, other=2**31 - 1)
        expert = tl.where(first <= block, later, expert)
    first_block = tl.load(ends_ptr + NUM_EXPERTS + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    own_blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    within = tile - first_block * TILES_N
    return expert, start + within % own_blocks * BLOCK_M, end, within // own_blocks


@triton.jit
def tile_of_zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAPPED: tl.constexpr):
    """Returns fp32 zeros [BLOCK_M, BLOCK_N], transposed if SWAPPED."""
    if SWAPPED:
        return tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        return tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def add_product(accumulator, x, weight, SWAPPED: tl.constexpr):
    """Returns accumulator + x @ weight^T. If SWAPPED, accumulator and result are transposed."""
    if SWAPPED:
        return tl.dot(weight, x.T, accumulator)
    else:
        return tl.dot(x, weight.T, accumulator)


@triton.jit
def add_decoded(accumulator, x, weight, SWAPPED: tl.constexpr):
    """Returns the result of `add_product` for a weight from `dequantize_tile`. If x is fp16 and the
    weight is bf16, each number of x is replaced by two bf16 numbers in separate columns, whose sum
    is this number."""
    if x.dtype == tl.float16 and weight.dtype == tl.bfloat16:
        high, low = bfloat16_parts(x.to(tl.float32))
        x = tl.reshape(tl.join(high, low), (x.shape[0], 2 * x.shape[1]))
        weight = tl.reshape(tl.join(weight, weight), (weight.shape[0], 2 * weight.shape[1]))
    return add_product(accumulator, x, weight, SWAPPED)


@triton.jit
def add_row_bias(values, bias_ptr, expert, columns, column_mask, EXPERT_STRIDE: tl.constexpr,
                 STRIDE: tl.constexpr):  # fmt: skip
    """Returns values [rows, columns] + bias[expert, columns]. If bias_ptr is None, returns
    values."""
    if bias_ptr is not None:
        bias = tl.load(
            bias_ptr + expert * EXPERT_STRIDE + columns * STRIDE, mask=column_mask, other=0.0
        )
        values += bias.to(tl.float32)[None, :]
    return values


@triton.jit
def with_factor_and_bias(values, factor_ptr, bias_ptr, expert, columns, column_mask,
                         EXPERT_STRIDE: tl.constexpr, STRIDE: tl.constexpr):  # fmt: skip
    """Returns values [rows, columns] times the expert's factor, plus its bias. Either pointer may
    be None."""
    if factor_ptr is not None:
        values *= tl.load(factor_ptr + expert)
    return add_row_bias(values, bias_ptr, expert, columns, column_mask, EXPERT_STRIDE, STRIDE)


@triton.jit
def store_tile(values, ptr, rows, row_mask, columns, column_mask, STRIDE: tl.constexpr):
    """Rounds values [rows, columns] and stores them to rows that are STRIDE elements apart."""
    tl.store(
        ptr + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :],
        values.to(ptr.dtype.element_ty),
        mask=row_mask[:, None] & column_mask[None, :],
    )


@triton.jit
def store_part(
    accumulator, y_ptr, places, row_mask, factor_ptr, bias_ptr, expert, first_n,
    HIDDEN: tl.constexpr, PART: tl.constexpr, BIAS_STRIDES: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """Multiplies PART columns of a tile by the factor, adds the bias, and stores them to rows of
    y."""
    if SWAPPED:
        accumulator = tl.trans(accumulator)
    columns = first_n + tl.arange(0, PART)
    column_mask = columns < HIDDEN
    value = with_factor_and_bias(
        accumulator, factor_ptr, bias_ptr, expert, columns, column_mask, BIAS_STRIDES[0],
        BIAS_STRIDES[1],
    )  # fmt: skip
    store_tile(value, y_ptr, places, row_mask, columns, column_mask, HIDDEN)


@triton.jit
def group_tiles(ends_ptr, expert_ids_ptr, num_rows, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr,
                NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Returns (first row, end of the rows, number of row blocks, number of row blocks without a
    weight, expert) of every group, each [GROUPS].

    If expert_ids_ptr is None, group g has expert g. Rows after the last end are one more group,
    which has no weight. Ends that are out of range are clamped, so that no access leaves the
    tensors.
    """
    groups = tl.arange(0, GROUPS)
    real = groups < NUM_GROUPS
    end = tl.load(ends_ptr + groups, mask=real, other=0).to(tl.int32)
    end = tl.where(real, tl.minimum(end, num_rows), num_rows)
    after_one = (groups > 0) & (groups <= NUM_GROUPS)
    start = tl.load(ends_ptr + groups - 1, mask=after_one, other=0).to(tl.int32)
    start = tl.maximum(start, 0)
    rows = tl.where(groups <= NUM_GROUPS, tl.maximum(end - start, 0), 0)
    blocks = (rows + BLOCK_M - 1) // BLOCK_M
    if expert_ids_ptr is None:
        expert = groups
        known = real
    else:
        expert = tl.load(expert_ids_ptr + groups, mask=real, other=-1).to(tl.int32)
        known = (expert >= 0) & (expert < NUM_EXPERTS)
    return start, end, tl.where(known, blocks, 0), tl.where(known, 0, blocks), expert


@triton.jit
def clear_rows(y_ptr, start, end, idle, GROUPS: tl.constexpr, HIDDEN: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Stores zeros to the rows of y that have no weight. These are the `idle` row blocks of all
    groups."""
    TILES_N: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    num_idle = tl.sum(idle, axis=0) * TILES_N
    for idle_tile in range(tl.program_id(0), num_idle, tl.num_programs(0)):
        _, idle_row, idle_end, idle_n = tile_place(
            idle_tile, start, end, idle, GROUPS, BLOCK_M, TILES_N
        )
        idle_rows = idle_row + tl.arange(0, BLOCK_M)
        idle_columns = idle_n * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(
            y_ptr + idle_rows.to(tl.int64)[:, None] * HIDDEN + idle_columns[None, :],
            tl.zeros((BLOCK_M, BLOCK_N), y_ptr.dtype.element_ty),
            mask=(idle_rows < idle_end)[:, None] & (idle_columns < HIDDEN)[None, :],
        )


@triton.jit
def grouped_gemm(
    x_ptr, order_ptr, ends_ptr, expert_ids_ptr, weight_ptr, scale_ptr, factor_ptr, bias_ptr, y_ptr,
    num_rows,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, X_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, N_MAJOR: tl.constexpr,
    FORMAT: tl.constexpr, PER_BYTE: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    SCALE_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAPPED: tl.constexpr,
    FLATTEN: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Grouped GEMM: y [num_rows, HIDDEN] = x [num_rows, INNER] @ weight[expert]^T. Rows of x are
    sorted by group, and weight is [experts, HIDDEN, INNER].

    The kernel is persistent, so the grid may have any size.

    Args:
        N_MAJOR: Whether the weight is stored as [experts, INNER, HIDDEN].
        order_ptr: For each sorted row, the index of the row of y to which it is stored. If it is
            None, each row keeps its index, group g has expert expert_ids[g], and rows without a
            weight are set to zero.
        GROUPS: A power of two greater than NUM_GROUPS. If order_ptr is given, it may also equal
            NUM_GROUPS.
        SEARCH_STEPS: As in `searched_place`; 0 unless warps are specialised. Specialised warps
            require order_ptr.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    x_desc = tl.make_tensor_descriptor(x_ptr, [num_rows, INNER], [X_STRIDE, 1], [BLOCK_M, BLOCK_K])
    if N_MAJOR:
        weight_desc = tl.make_tensor_descriptor(
            weight_ptr, [NUM_EXPERTS, INNER, HIDDEN], [EXPERT_STRIDE, ROW_STRIDE, 1],
            [1, BLOCK_K, BLOCK_N],
        )  # fmt: skip
    else:
        weight_desc = tl.make_tensor_descriptor(
            weight_ptr, [NUM_EXPERTS, HIDDEN, INNER // PER_BYTE], [EXPERT_STRIDE, ROW_STRIDE, 1],
            [1, BLOCK_N, BLOCK_K // PER_BYTE],
        )  # fmt: skip
    TILES_N: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    if order_ptr is None:
        start, end, blocks, idle, experts = group_tiles(
            ends_ptr, expert_ids_ptr, num_rows, NUM_GROUPS, GROUPS, NUM_EXPERTS, BLOCK_M
        )
    else:
        start, end, blocks = expert_tiles(ends_ptr, NUM_GROUPS, GROUPS, BLOCK_M)
    num_tiles = tl.sum(blocks, axis=0) * TILES_N
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0),
        flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE,
    ):  # fmt: skip
        if SEARCH_STEPS > 0:
            expert, first_row, last_row, tile_n = searched_place(
                tile, ends_ptr, NUM_GROUPS, BLOCK_M, TILES_N, SEARCH_STEPS
            )
        else:
            expert, first_row, last_row, tile_n = tile_place(
                tile, start, end, blocks, GROUPS, BLOCK_M, TILES_N
            )
        if expert_ids_ptr is not None:
            expert = tl.sum(tl.where(tl.arange(0, GROUPS) == expert, experts, 0), axis=0)
        accumulator = tile_of_zeros(BLOCK_M, BLOCK_N, SWAPPED)
        for column in range(0, INNER, BLOCK_K):
            # Rows after the expert's last row belong to the next expert. They are not stored.
            x = x_desc.load([first_row, column])
            if N_MAJOR:
                weight = weight_desc.load([expert, column, tile_n * BLOCK_N])
                weight = tl.reshape(weight, (BLOCK_K, BLOCK_N)).T
            else:
                weight = weight_desc.load([expert, tile_n * BLOCK_N, column // PER_BYTE])
                weight = tl.reshape(weight, (BLOCK_N, BLOCK_K // PER_BYTE))
            if FORMAT != "dense":
                weight_rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                scales = block_scales(
                    scale_ptr + expert * SCALE_STRIDES[0], weight_rows, weight_rows < HIDDEN,
                    column, INNER, BLOCK_K, SCALE_STRIDES, SCALE_BLOCK, FORMAT,
                )  # fmt: skip
                weight = dequantize_tile(
                    weight, scales, BLOCK_N, BLOCK_K, FORMAT, x_ptr.dtype.element_ty
                )
            accumulator = add_decoded(accumulator, x, weight, SWAPPED)
        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = rows < last_row
        places = rows
        if order_ptr is not None:
            places = tl.load(order_ptr + rows, mask=row_mask, other=0)
        store_part(
            accumulator, y_ptr, places, row_mask, factor_ptr, bias_ptr, expert, tile_n * BLOCK_N,
            HIDDEN, BLOCK_N, BIAS_STRIDES, SWAPPED,
        )  # fmt: skip
    if order_ptr is None:
        clear_rows(y_ptr, start, end, idle, GROUPS, HIDDEN, BLOCK_M, BLOCK_N)
