"""The router of a mixture of experts: computes the logits and scores of experts, chooses a few
experts, and returns their weights.

To choose, a program repeatedly takes the largest key. A key is an int32, and keys have the same
order as the numbers that they stand for. Therefore a warp finds the largest key with one
instruction, and the lowest column that has this key with one more instruction. Among equal experts,
the expert with the lowest number is chosen. NaN is greater than all numbers, as in torch.topk.

A row of logits has a column for each expert of each group. Groups are padded to a power of two:
column c belongs to expert c // GROUP * (NUM_EXPERTS // NUM_GROUPS) + c % GROUP.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.split_k import arrive

# A key that is lower than the keys of all numbers.
LOWEST_KEY = tl.constexpr(-(2**31))
# The sort key of NaN, which is greater than the sort keys of all other scores.
HIGHEST_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def sort_keys(numbers):
    """Returns int32 keys that have the same order as fp32 numbers. Both zeros have equal keys, and
    NaN has the largest key."""
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(numbers == numbers, keys, HIGHEST_KEY)


@triton.jit
def experts_of(columns, NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Returns (expert of each column, whether the column has an expert)."""
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    group = columns // GROUP
    place = columns % GROUP
    return group * SIZE + place, (group < NUM_GROUPS) & (place < SIZE)


@triton.jit
def load_logits(
    logits_ptr, bias_ptr, tokens, there, experts, real,
    BIAS_STRIDE: tl.constexpr, SPLITS: tl.constexpr, RUN: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Loads logits [tokens, experts] and returns their sums: SPLITS parts are added in order, and
    then the bias.

    Each part [RUN, ROW] has the logits of RUN tokens, and the parts of the same tokens are
    adjacent.
    """
    mask = there[:, None] & real[None, :]
    runs = (tokens // RUN).to(tl.int64) * (SPLITS * RUN * ROW)
    places = (runs + tokens % RUN * ROW)[:, None] + experts[None, :]
    # Bypass the L1 cache, because other multiprocessors may just have written the parts.
    logits = tl.load(logits_ptr + places, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        part = logits_ptr + split * RUN * ROW + places
        logits += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + experts * BIAS_STRIDE, mask=real, other=0.0)
        logits += bias.to(tl.float32)[None, :]
    return logits


@triton.jit
def kept_columns(
    choice, real,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Returns whether each column belongs to one of the TOP_GROUPS best groups. The best groups are
    the groups whose GROUP_TOP (1 or 2) best experts have the largest sum."""
    numbers = tl.where(choice == choice, choice, float("inf"))
    numbers = tl.where(real[None, :], numbers, float("-inf"))
    numbers = tl.reshape(numbers, (ROWS, GROUPS, GROUP))
    best = tl.max(numbers, axis=2)
    if GROUP_TOP == 2:
        places = tl.arange(0, GROUP)[None, None, :]
        first = tl.min(tl.where(numbers == best[:, :, None], places, GROUP), axis=2)
        others = tl.where(places == first[:, :, None], float("-inf"), numbers)
        best += tl.max(others, axis=2)
    groups = tl.arange(0, GROUPS)
    keys = tl.where((groups < NUM_GROUPS)[None, :], sort_keys(best), LOWEST_KEY)
    kept = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(keys, axis=1)
        first = tl.min(tl.where(keys == top[:, None], groups[None, :], GROUPS), axis=1)
        hit = groups[None, :] == first[:, None]
        kept = tl.where(hit, 1, kept)
        keys = tl.where(hit, LOWEST_KEY, keys)
    wide = tl.broadcast_to(kept[:, :, None], (ROWS, GROUPS, GROUP))
    return tl.reshape(wide, (ROWS, GROUPS * GROUP)) != 0


@triton.jit
def choose(
    logits, columns, real, correction_ptr, weights_ptr, ids_ptr, tokens, there,
    NUM_EXPERTS: tl.constexpr, NUM_SLOTS: tl.constexpr, SCORES: tl.constexpr,
    BY_LOGITS: tl.constexpr, CORRECTION_STRIDE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, NORMALISE: tl.constexpr,
    NORM_EPS: tl.constexpr, NORM_MIN: tl.constexpr, SCALING: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Chooses experts from logits [ROWS, GROUPS * GROUP], and stores weights and ids [tokens,
    NUM_SLOTS]."""
    experts, _ = experts_of(columns, NUM_EXPERTS, NUM_GROUPS, GROUP)
    scores = logits
    if SCORES == "sigmoid":
        scores = tl.sigmoid(logits)
    if SCORES == "softmax":
        top = tl.max(tl.where(real[None, :], logits, float("-inf")), axis=1)
        scores = tl.where(real[None, :], tl.exp(logits - top[:, None]), 0.0)
        scores = scores / tl.sum(scores, axis=1)[:, None]
    choice = scores
    if BY_LOGITS:
        choice = logits
    if correction_ptr is not None:
        correction = tl.load(correction_ptr + experts * CORRECTION_STRIDE, mask=real, other=0.0)
        choice += correction.to(tl.float32)[None, :]
    keys = tl.where(real[None, :], sort_keys(choice), LOWEST_KEY)
    if TOP_GROUPS < NUM_GROUPS:
        kept = kept_columns(
            choice, real, NUM_GROUPS, TOP_GROUPS, GROUP_TOP, GROUPS, GROUP, ROWS
        )  # fmt: skip
        keys = tl.where(kept, keys, LOWEST_KEY)
    slots = tl.arange(0, SLOTS)
    places = tl.zeros((ROWS, SLOTS), tl.int32)
    for slot in tl.static_range(NUM_SLOTS):
        top = tl.max(keys, axis=1)
        place = tl.min(tl.where(keys == top[:, None], columns[None, :], GROUPS * GROUP), axis=1)
        keys = tl.where(columns[None, :] == place[:, None], LOWEST_KEY, keys)
        places = tl.where((slots == slot)[None, :], place[:, None], places)
    weights = tl.gather(scores, places, 1)
    used = (slots < NUM_SLOTS)[None, :]
    if SCORES == "softmax_of_chosen":
        weights = tl.where(used, weights, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
    if NORMALISE:
        total = tl.sum(tl.where(used, weights, 0.0), axis=1) + NORM_EPS
        if NORM_MIN > 0.0:
            total = tl.maximum(total, NORM_MIN, propagate_nan=tl.PropagateNan.ALL)
        weights = weights / total[:, None]
    weights *= SCALING
    ids, _ = experts_of(places, NUM_EXPERTS, NUM_GROUPS, GROUP)
    out = tokens.to(tl.int64)[:, None] * NUM_SLOTS + slots[None, :]
    mask = there[:, None] & used
    tl.store(weights_ptr + out, weights.to(weights_ptr.dtype.element_ty), mask=mask)
    tl.store(ids_ptr + out, ids.to(tl.int64), mask=mask)


@triton.jit
def moe_choose(
    logits_ptr, bias_ptr, correction_ptr, weights_ptr, ids_ptr, num_tokens,
    NUM_EXPERTS: tl.constexpr, NUM_SLOTS: tl.constexpr, SCORES: tl.constexpr,
    BY_LOGITS: tl.constexpr, BIAS_STRIDE: tl.constexpr, CORRECTION_STRIDE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr,
    NORMALISE: tl.constexpr, NORM_EPS: tl.constexpr, NORM_MIN: tl.constexpr,
    SCALING: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr, RUN: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Chooses experts for a router from logits, and stores weights and ids [num_tokens, NUM_SLOTS].
    The logits are given whole, or as parts that have to be added.

    Grid (cdiv(num_tokens, ROWS),). SCORES: as in the op. BY_LOGITS: whether experts are chosen by
    their logits, because scores have the same order. SPLITS, RUN, ROW: as in `load_logits`.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = tokens < num_tokens
    columns = tl.arange(0, GROUPS * GROUP)
    experts, real = experts_of(columns, NUM_EXPERTS, NUM_GROUPS, GROUP)
    logits = load_logits(
        logits_ptr, bias_ptr, tokens, there, experts, real, BIAS_STRIDE, SPLITS, RUN, ROW
    )
    choose(
        logits, columns, real, correction_ptr, weights_ptr, ids_ptr, tokens, there, NUM_EXPERTS,
        NUM_SLOTS, SCORES, BY_LOGITS, CORRECTION_STRIDE, NUM_GROUPS, TOP_GROUPS, GROUP_TOP,
        NORMALISE, NORM_EPS, NORM_MIN, SCALING, GROUPS, GROUP, SLOTS, ROWS,
    )  # fmt: skip


@triton.jit
def moe_router(
    x_ptr, weight_ptr, bias_ptr, correction_ptr, weights_ptr, ids_ptr, workspace_ptr, counters_ptr,
    num_tokens,
    HIDDEN: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_STRIDES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, NUM_SLOTS: tl.constexpr, SCORES: tl.constexpr,
    BY_LOGITS: tl.constexpr, BIAS_STRIDE: tl.constexpr, CORRECTION_STRIDE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr,
    NORMALISE: tl.constexpr, NORM_EPS: tl.constexpr, NORM_MIN: tl.constexpr,
    SCALING: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    WIDENED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    EXPERT_TILES: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, CHOOSES: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies x [num_tokens, HIDDEN] by the weight of a router [NUM_EXPERTS, HIDDEN], chooses
    experts, and stores their weights and ids [num_tokens, NUM_SLOTS]. If not CHOOSES, the kernel
    only stores the parts of the logits to the workspace.

    Grid (cdiv(num_tokens, BLOCK_T) * EXPERT_TILES * SPLITS,). A program multiplies BLOCK_T tokens
    by BLOCK_E experts over STEPS * BLOCK_K columns. It stores a tile [BLOCK_T, BLOCK_E] to the
    workspace [token tile, SPLITS, BLOCK_T, EXPERT_TILES * BLOCK_E]. The last program of a token
    tile chooses experts for the tokens of the tile, ROWS tokens at a time. It adds the parts in a
    fixed order, so the result does not depend on which program was last. WIDENED: whether operands
    are multiplied as fp32.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: tl.constexpr = EXPERT_TILES * SPLITS
    ROW: tl.constexpr = EXPERT_TILES * BLOCK_E
    UNEVEN_K: tl.constexpr = BLOCK_K * STEPS * SPLITS != HIDDEN
    tile = tl.program_id(0) // PARTS
    expert_tile = tl.program_id(0) % EXPERT_TILES
    split = tl.program_id(0) % PARTS // EXPERT_TILES
    rows = tl.arange(0, BLOCK_T)
    tokens = tile * BLOCK_T + rows
    there = tokens < num_tokens
    experts = expert_tile * BLOCK_E + tl.arange(0, BLOCK_E)
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * X_STRIDE
    weight_rows = weight_ptr + experts[None, :] * WEIGHT_STRIDES[0]
    logits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        columns = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        x_mask = there[:, None]
        if UNEVEN_K:
            x_mask = x_mask & (columns < HIDDEN)[None, :]
        x = tl.load(x_rows + columns[None, :], mask=x_mask, other=0.0)
        places = weight_rows + columns[:, None] * WEIGHT_STRIDES[1]
        if UNEVEN_K or NUM_EXPERTS % BLOCK_E != 0:
            weight_mask = (experts < NUM_EXPERTS)[None, :] & (columns < HIDDEN)[:, None]
            weight = tl.load(places, mask=weight_mask, other=0.0)
        else:
            weight = tl.load(places)
        if WIDENED:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        logits = tl.dot(x, weight, logits, input_precision="ieee")
    parts = workspace_ptr + (tile * SPLITS + split).to(tl.int64) * (BLOCK_T * ROW)
    tl.store(parts + rows[:, None] * ROW + experts[None, :], logits, mask=there[:, None])
    if CHOOSES:
        is_last = arrive(counters_ptr + tile, PARTS)
        if is_last:
            wide = tl.arange(0, GROUPS * GROUP)
            own, real = experts_of(wide, NUM_EXPERTS, NUM_GROUPS, GROUP)
            left = num_tokens - tile * BLOCK_T
            for first in range(0, tl.minimum(BLOCK_T, left), ROWS):
                some = tile * BLOCK_T + first + tl.arange(0, ROWS)
                exist = first + tl.arange(0, ROWS) < left
                sums = load_logits(
                    workspace_ptr, bias_ptr, some, exist, own, real, BIAS_STRIDE, SPLITS, BLOCK_T,
                    ROW,
                )  # fmt: skip
                choose(
                    sums, wide, real, correction_ptr, weights_ptr, ids_ptr, some, exist,
                    NUM_EXPERTS, NUM_SLOTS, SCORES, BY_LOGITS, CORRECTION_STRIDE, NUM_GROUPS,
                    TOP_GROUPS, GROUP_TOP, NORMALISE, NORM_EPS, NORM_MIN, SCALING, GROUPS, GROUP,
                    SLOTS, ROWS,
                )  # fmt: skip
