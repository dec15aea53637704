"""Computes the experts of a few tokens without tensor cores. Each route is computed separately, and
nothing is sorted.

A program of `moe_up_dotted` computes a few rows of gate and up of one expert, for one route. A
program of `moe_down_dotted` computes a few rows of all experts of one token, multiplies the
products by the weights of the routes, and adds them, always in the same order. Weights do not pass
through shared memory, so many small programs keep the memory busy.

A tile of weights [rows, slots, words] is reshaped to [rows, slots * words], and so are the rows of
x. Therefore one sum adds the products of all slots. A word holds eight 4-bit codes or four 8-bit
codes, or it is one 16-bit number.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.activation import activate
from tilewright.codegen.templates.dots import (
    code_sums,
    dense_sums,
    number_sums,
    parts_of_x,
    sums_unit,
)
from tilewright.codegen.templates.fp4 import e8m0_value
from tilewright.codegen.templates.fp8_groups import quantized_groups
from tilewright.codegen.templates.streaming import prefetch_rows


@triton.jit
def experts_of(ids_ptr, routes, mask, NUM_EXPERTS: tl.constexpr):
    """Returns (the expert of each route as int64, whether the route has an expert). The expert is 0
    if the route has none."""
    ids = tl.load(ids_ptr + routes, mask=mask, other=-1).to(tl.int64)
    there = (ids >= 0) & (ids < NUM_EXPERTS)
    return tl.where(there, ids, 0), there


@triton.jit
def load_words(lines, there, first, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads words [rows, slots * WORDS] of each line, starting at the word with number `first`.

    lines: pointers [rows, slots]. Words past COLUMNS, and words of slots without an expert, are
    zero.
    """
    ROWS: tl.constexpr = lines.shape[0]
    SLOTS: tl.constexpr = lines.shape[1]
    columns = first + tl.arange(0, WORDS)
    words = tl.load(
        lines[:, :, None] + columns[None, None, :],
        mask=there[None, :, None] & (columns < COLUMNS)[None, None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    return tl.reshape(words, (ROWS, SLOTS * WORDS))


@triton.jit
def load_run_scales(
    scale_ptr, experts, there, first_row, last_row, first,
    ROWS: tl.constexpr, RUNS: tl.constexpr, SPAN: tl.constexpr, K: tl.constexpr,
    STRIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loads the scales of runs of SPAN columns, starting at column `first`. The result is fp32
    [ROWS, slots * RUNS], or [1, slots * RUNS] if all rows share a scale. BLOCK: how many rows and
    columns share a scale."""
    SLOTS: tl.constexpr = experts.shape[0]
    SCALE_ROWS: tl.constexpr = 1 if BLOCK[0] % ROWS == 0 else ROWS
    WIDTH: tl.constexpr = 1 if BLOCK[1] >= K else RUNS
    rows = tl.minimum(first_row + tl.arange(0, SCALE_ROWS), last_row) // BLOCK[0]
    columns = first + tl.arange(0, WIDTH) * SPAN
    blocks = columns // BLOCK[1]
    lines = scale_ptr + (experts * STRIDES[0])[None, :] + (rows * STRIDES[1])[:, None]
    mask = there[None, :, None] & (columns < K)[None, None, :]
    values = tl.load(lines[:, :, None] + (blocks * STRIDES[2])[None, None, :], mask=mask, other=0.0)
    if scale_ptr.dtype.element_ty == tl.uint8:
        scales = e8m0_value(values.to(tl.int32))
    elif scale_ptr.dtype.element_ty == tl.float8e4nv:
        scales = values.to(tl.float16).to(tl.float32)
    else:
        scales = values.to(tl.float32)
    scales = tl.broadcast_to(scales, (SCALE_ROWS, SLOTS, RUNS))
    return tl.reshape(scales, (SCALE_ROWS, SLOTS * RUNS))


@triton.jit
def load_x(
    x_ptr, starts, there, first, K: tl.constexpr, BLOCK_K: tl.constexpr, PER: tl.constexpr,
    CODED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Loads columns of x, starting at column `first` of the rows at `starts`, as fp32 [slots *
    BLOCK_K / PER, PER]. Columns past K are zero. CODED: x is rounded to e4m3 codes with a scale for
    each GROUP columns, and converted back."""
    SLOTS: tl.constexpr = starts.shape[0]
    columns = first + tl.arange(0, BLOCK_K)
    x = tl.load(
        x_ptr + starts[:, None] + columns[None, :],
        mask=there[:, None] & (columns < K)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    if CODED:
        codes, scales = quantized_groups(x, 0.0, GROUP, BLOCK_K)
        numbers = codes.to(tl.float16).to(tl.float32)
        numbers = tl.reshape(numbers, (SLOTS, BLOCK_K // GROUP, GROUP)) * scales[:, :, None]
        x = tl.reshape(numbers, (SLOTS, BLOCK_K))
    return tl.reshape(x, (SLOTS * BLOCK_K // PER, PER))


@triton.jit
def factors_of_x(x, INTEGERS: tl.constexpr, BYTES: tl.constexpr, RUN: tl.constexpr):
    """Returns the factors by which `add_sums` multiplies weights. If INTEGERS, these are the result
    of `parts_of_x`. If not, they are x itself and powers that are 1."""
    if INTEGERS:
        return parts_of_x(x, RUN, False, False, BYTES)
    else:
        power = tl.full((x.shape[0] // RUN,), 1.0, tl.float32)
        return x, x, x, x, x, x, x, power, power


@triton.jit
def add_sums(
    product, words, scales, low0, low1, low2, high0, high1, high2, total, power,
    rest, PER: tl.constexpr, INTEGERS: tl.constexpr, BYTES: tl.constexpr, ZERO: tl.constexpr,
    SCALED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Adds the sum of each run of words to product [rows, runs], and returns the result. Each sum
    is multiplied by `power`, by its scale if SCALED, and by `rest`, in this order."""
    if INTEGERS:
        sums = code_sums(
            words, low0, low1, low2, high0, high1, high2, total,
            PER, len(BYTES) > 0, ZERO, BYTES, RUN,
        )  # fmt: skip
    elif PER == 4:
        sums = number_sums(words, low0, False, "", RUN)
    else:
        sums = dense_sums(words, low0, RUN)
    if SCALED:
        sums *= (power * sums_unit("", BYTES))[None, :]
        sums *= scales
    return product + sums * rest[None, :]


@triton.jit
def column_of(ptr, expert, there, rows, EXPERT_STRIDE: tl.constexpr, STRIDE: tl.constexpr):
    """Loads one number, such as a bias, for each row of each expert, as fp32 [rows, slots]."""
    places = (expert * EXPERT_STRIDE)[None, :] + (rows * STRIDE)[:, None]
    mask = tl.broadcast_to(there[None, :], places.shape)
    return tl.load(ptr + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def moe_up_dotted(
    x_ptr, ids_ptr, gate_weight_ptr, up_weight_ptr, gate_scale_ptr, up_scale_ptr,
    gate_factor_ptr, up_factor_ptr, gate_bias_ptr, up_bias_ptr, hidden_ptr,
    NUM_SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    X_STRIDE: tl.constexpr, GATE_STRIDES: tl.constexpr, UP_STRIDES: tl.constexpr,
    GATE_SCALE_STRIDES: tl.constexpr, UP_SCALE_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, PER: tl.constexpr, INTEGERS: tl.constexpr, BYTES: tl.constexpr,
    ZERO: tl.constexpr, RUN: tl.constexpr,
    CODED: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LETS_IN: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes the gate and up projections of a few tokens' experts: hidden [routes, INNER] =
    activation(x @ Wgate^T) * (x @ Wup^T), for routes that have an expert.

    Grid (cdiv(INNER, BLOCK_N), routes). Weights are [E, INNER, words], and a word holds PER
    columns.

    Args:
        up_weight: If it is None, the activation is not gated.
        SCALE_BLOCK: How many rows and columns share a scale.
        RUN: How many words share a sum and a scale.
        INTEGERS: Whether words hold 4-bit codes, which `code_sums` multiplies as integers minus
            ZERO or as the numbers in BYTES. If not, words hold float8 (e4m3) or 16-bit numbers.
        CODED: Whether x is rounded to e4m3 codes with a scale for each GROUP columns.
        LETS_IN: Whether the next kernel may start early.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        if LETS_IN:
            tl.extra.cuda.gdc_launch_dependents()
    GATED: tl.constexpr = up_weight_ptr is not None
    SCALED: tl.constexpr = gate_scale_ptr is not None
    WORDS: tl.constexpr = BLOCK_K // PER
    RUNS: tl.constexpr = WORDS // RUN
    COLUMNS: tl.constexpr = HIDDEN // PER
    SPAN: tl.constexpr = RUN * PER
    first_row = tl.program_id(0) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    route = tl.program_id(1)
    routes = route + tl.arange(0, 1)
    experts, there = experts_of(ids_ptr, routes, routes >= 0, NUM_EXPERTS)
    # Rows past the last row read the last row again. They are not stored.
    inside = tl.minimum(rows, INNER - 1)
    lines = gate_weight_ptr + (experts * GATE_STRIDES[0])[None, :]
    lines += (inside * GATE_STRIDES[1])[:, None]
    if GATED:
        up_lines = up_weight_ptr + (experts * UP_STRIDES[0])[None, :]
        up_lines += (inside * UP_STRIDES[1])[:, None]
    starts = (routes // NUM_SLOTS).to(tl.int64) * X_STRIDE
    product = tl.zeros((BLOCK_N, RUNS), tl.float32)
    up_product = product
    scales = product
    up_scales = product
    for first in range(0, HIDDEN, BLOCK_K):
        words = load_words(lines, there, first // PER, WORDS, COLUMNS)
        if GATED:
            up_words = load_words(up_lines, there, first // PER, WORDS, COLUMNS)
        if SCALED:
            scales = load_run_scales(
                gate_scale_ptr, experts, there, first_row, INNER - 1, first, BLOCK_N, RUNS, SPAN,
                HIDDEN, GATE_SCALE_STRIDES, SCALE_BLOCK,
            )  # fmt: skip
        if SCALED and GATED:
            up_scales = load_run_scales(
                up_scale_ptr, experts, there, first_row, INNER - 1, first, BLOCK_N, RUNS, SPAN,
                HIDDEN, UP_SCALE_STRIDES, SCALE_BLOCK,
            )  # fmt: skip
        x = load_x(x_ptr, starts, there, first, HIDDEN, BLOCK_K, PER, CODED, GROUP)
        low0, low1, low2, high0, high1, high2, total, power, rest = factors_of_x(
            x, INTEGERS, BYTES, RUN
        )
        product = add_sums(
            product, words, scales, low0, low1, low2, high0, high1, high2, total, power,
            rest, PER, INTEGERS, BYTES, ZERO, SCALED, RUN,
        )  # fmt: skip
        if GATED:
            up_product = add_sums(
                up_product, up_words, up_scales, low0, low1, low2, high0, high1, high2, total,
                power, rest, PER, INTEGERS, BYTES, ZERO, SCALED, RUN,
            )  # fmt: skip
    gate = tl.sum(product, axis=1)[:, None]
    up = gate
    if gate_factor_ptr is not None:
        gate *= tl.load(gate_factor_ptr + experts)[None, :]
    if gate_bias_ptr is not None:
        gate += column_of(gate_bias_ptr, experts, there, inside, BIAS_STRIDES[0], BIAS_STRIDES[1])
    if GATED:
        up = tl.sum(up_product, axis=1)[:, None]
        if up_factor_ptr is not None:
            up *= tl.load(up_factor_ptr + experts)[None, :]
        if up_bias_ptr is not None:
            up += column_of(up_bias_ptr, experts, there, inside, BIAS_STRIDES[2], BIAS_STRIDES[3])
    value = activate(gate, up, ACTIVATION, ALPHA, LIMIT, GATED)
    places = routes.to(tl.int64)[None, :] * INNER + rows[:, None]
    tl.store(
        hidden_ptr + places, value.to(hidden_ptr.dtype.element_ty),
        mask=(rows < INNER)[:, None] & there[None, :],
    )  # fmt: skip


@triton.jit
def moe_down_dotted(
    hidden_ptr, ids_ptr, weights_ptr, down_weight_ptr, down_scale_ptr, down_factor_ptr,
    down_bias_ptr, out_ptr,
    NUM_SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    DOWN_STRIDES: tl.constexpr, DOWN_SCALE_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr,
    WEIGHTS_STRIDES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, PER: tl.constexpr, INTEGERS: tl.constexpr, BYTES: tl.constexpr,
    ZERO: tl.constexpr, RUN: tl.constexpr,
    CODED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, LINE: tl.constexpr,
    LINES: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes the down projections of a few tokens' experts, multiplies them by weights, and adds
    them: out [T, HIDDEN] = sum over slots of weights [T, S] * (hidden [T * S, INNER] @ Wdown^T).

    Grid (cdiv(HIDDEN, BLOCK_N), T). A step multiplies BLOCK_S slots and BLOCK_K columns. A slot
    without an expert adds nothing, because its row of hidden was never written. LINES: how many
    lines of memory of each row a program prefetches before `hidden` is ready. A line has LINE words
    (128 bytes). `moe_up_dotted` explains the other arguments.
    """
    SCALED: tl.constexpr = down_scale_ptr is not None
    WORDS: tl.constexpr = BLOCK_K // PER
    RUNS: tl.constexpr = WORDS // RUN
    COLUMNS: tl.constexpr = INNER // PER
    SPAN: tl.constexpr = RUN * PER
    first_row = tl.program_id(0) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    inside = tl.minimum(rows, HIDDEN - 1)
    token = tl.program_id(1)
    if LAUNCH_PDL:
        if LINES > 0:
            # The ids may not have been written yet, but prefetching is only a hint, and ids are
            # bounded.
            slots = tl.arange(0, BLOCK_S)
            experts, there = experts_of(
                ids_ptr, token * NUM_SLOTS + slots, slots < NUM_SLOTS, NUM_EXPERTS
            )
            lines = down_weight_ptr + (experts * DOWN_STRIDES[0])[None, :]
            lines += (inside * DOWN_STRIDES[1])[:, None]
            prefetch_rows(tl.reshape(lines, (BLOCK_N * BLOCK_S,)), 0, COLUMNS, LINES, LINE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    product = tl.zeros((BLOCK_N, BLOCK_S * RUNS), tl.float32)
    scales = product
    bias = tl.zeros((BLOCK_N,), tl.float32)
    for first_slot in range(0, NUM_SLOTS, BLOCK_S):
        slots = first_slot + tl.arange(0, BLOCK_S)
        routes = token * NUM_SLOTS + slots
        experts, there = experts_of(ids_ptr, routes, slots < NUM_SLOTS, NUM_EXPERTS)
        lines = down_weight_ptr + (experts * DOWN_STRIDES[0])[None, :]
        lines += (inside * DOWN_STRIDES[1])[:, None]
        weight = tl.load(
            weights_ptr + token * WEIGHTS_STRIDES[0] + slots * WEIGHTS_STRIDES[1],
            mask=there, other=0.0,
        ).to(tl.float32)  # fmt: skip
        if down_bias_ptr is not None:
            own = column_of(down_bias_ptr, experts, there, inside, BIAS_STRIDES[0], BIAS_STRIDES[1])
            bias += tl.sum(own * weight[None, :], axis=1)
        if down_factor_ptr is not None:
            weight *= tl.load(down_factor_ptr + experts)
        weight = tl.reshape(tl.broadcast_to(weight[:, None], (BLOCK_S, RUNS)), (BLOCK_S * RUNS,))
        starts = routes.to(tl.int64) * INNER
        for first in range(0, INNER, BLOCK_K):
            words = load_words(lines, there, first // PER, WORDS, COLUMNS)
            if SCALED:
                scales = load_run_scales(
                    down_scale_ptr, experts, there, first_row, HIDDEN - 1, first, BLOCK_N, RUNS,
                    SPAN, INNER, DOWN_SCALE_STRIDES, SCALE_BLOCK,
                )  # fmt: skip
            x = load_x(hidden_ptr, starts, there, first, INNER, BLOCK_K, PER, CODED, GROUP)
            low0, low1, low2, high0, high1, high2, total, power, rest = factors_of_x(
                x, INTEGERS, BYTES, RUN
            )
            product = add_sums(
                product, words, scales, low0, low1, low2, high0, high1, high2, total,
                power, rest * weight, PER, INTEGERS, BYTES, ZERO, SCALED, RUN,
            )  # fmt: skip
    value = tl.sum(product, axis=1) + bias
    out = out_ptr + token.to(tl.int64) * HIDDEN + rows
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=rows < HIDDEN)
