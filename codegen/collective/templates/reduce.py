"""Computes a sum over ranks, adds the residual and applies its norm in one kernel. The ranks
exchange rows through memory that all of them can access.

Each rank has a ring of two slots for each program and each other rank. A program performs these
steps for a row:

1. It writes its row into its slot on every other rank.
2. It sets a flag for each of these slots.
3. It waits for the flags of the other ranks.
4. It adds the rows in the order of ranks, so that all ranks get the same bits.

A program writes to the same slot again two rows later. By then, the other rank has read the slot:
that rank has sent the row in between, and a rank sends a row only after it has read the previous
rows of all ranks.

A program waits only for programs with the same number on other ranks, and a GPU starts programs in
order. Therefore the first unfinished program is running on every rank, however many programs there
are.
"""

import triton
import triton.language as tl


@triton.jit
def words_of(peers_ptr, to, of, block, step, RANKS: tl.constexpr, WORDS: tl.constexpr):
    """Returns a pointer into the memory of rank `to`, to the WORDS 64-bit words that rank `of`
    writes for a row."""
    base = tl.multiple_of(tl.load(peers_ptr + to).to(tl.pointer_type(tl.int64)), 16)
    return base + ((block * 2 + (step & 1)) * RANKS + of) * WORDS


@triton.jit
def slot_of(
    peers_ptr, to, of, block, step, dtype,
    N: tl.constexpr, RANKS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Returns a pointer to the slot in the memory of rank `to` for a row of rank `of`. A number
    takes 16 bits. FLAGS: the number of 64-bit words of all flags, which are stored before the
    slots. Every slot begins at a multiple of 16 bytes."""
    words = words_of(peers_ptr, to, of, block, step, RANKS, N // 4) + FLAGS
    return tl.multiple_of(words.to(tl.pointer_type(dtype)), 16)


@triton.jit
def give_up(tries, LIMIT: tl.constexpr):
    """Ends the kernel with an error after LIMIT reads of a flag, because the other rank has then
    probably ended."""
    if tries >= LIMIT:
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r,r", [tries], tl.int32, False, 1)


@triton.jit
def wait_for(flag_ptr, step, LIMIT: tl.constexpr):
    """Waits until a flag has the number of the row. After that, this rank sees the data that the
    other rank wrote before the flag."""
    tries = 0
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") != step:
        tries += 1
        give_up(tries, LIMIT)
    tl.debug_barrier()


@triton.jit
def sum_over_ranks(
    x, columns, there, peers_ptr, rank, block, step,
    N: tl.constexpr, RANKS: tl.constexpr, FLAGS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Returns the sum of the ranks' rows in fp32."""
    for to in range(RANKS):
        if to != rank:
            slot = slot_of(peers_ptr, to, rank, block, step, x.dtype, N, RANKS, FLAGS)
            tl.store(slot + columns, x, mask=there)
    # The stores of all threads must be complete before one thread writes the flags.
    tl.debug_barrier()
    for to in range(RANKS):
        if to != rank:
            flag = words_of(peers_ptr, to, rank, block, step, RANKS, 1)
            tl.atomic_xchg(flag, step.to(tl.int64), sem="release", scope="sys")
    own = x.to(tl.float32)
    total = tl.zeros_like(own)
    for of in range(RANKS):
        part = own
        if of != rank:
            wait_for(words_of(peers_ptr, rank, of, block, step, RANKS, 1), step, LIMIT)
            slot = slot_of(peers_ptr, rank, of, block, step, x.dtype, N, RANKS, FLAGS)
            # Bypass the L1 cache, which may still have an earlier row.
            row = tl.load(slot + columns, mask=there, other=0.0, cache_modifier=".cg")
            part = row.to(tl.float32)
        total += part
    return total


@triton.jit
def all_reduce_residual_norm(
    x_ptr, residual_ptr, norm_weight_ptr, summed_ptr, normed_ptr, peers_ptr, steps_ptr,
    rank, num_tokens,
    N: tl.constexpr, X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
    NORM_STRIDE: tl.constexpr, NORM_EPS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, RANKS: tl.constexpr, FLAGS: tl.constexpr, LIMIT: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes summed [T, N] = residual + the sum of x over all ranks, and normed = summed /
    rms(summed) * (NORM_OFFSET + norm_weight). The norm uses `summed` before it is rounded.

    Grid (up to T,). Each program strides over the rows by the grid size.

    Args:
        peers_ptr: The addresses of the memory of all ranks. If there is only one rank, this and
            steps_ptr are not read.
        steps_ptr: How many rows each program has sent so far.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    there = columns < N
    row = block.to(tl.int64)
    if RANKS > 1:
        step = tl.load(steps_ptr + block)
    for _ in range(block, num_tokens, tl.num_programs(0)):
        x = tl.load(x_ptr + row * X_STRIDE + columns, mask=there, other=0.0)
        residual = tl.load(residual_ptr + row * RESIDUAL_STRIDE + columns, mask=there, other=0.0)
        total = x.to(tl.float32)
        if RANKS > 1:
            step += 1
            total = sum_over_ranks(
                x, columns, there, peers_ptr, rank, block, step, N, RANKS, FLAGS, LIMIT
            )
        total += residual.to(tl.float32)
        tl.store(summed_ptr + row * N + columns, total.to(summed_ptr.dtype.element_ty), mask=there)
        normed = total * tl.rsqrt(tl.sum(total * total, axis=0) / N + NORM_EPS)
        if norm_weight_ptr is not None:
            factor = tl.load(norm_weight_ptr + columns * NORM_STRIDE, mask=there, other=0.0)
            normed *= factor.to(tl.float32) + NORM_OFFSET
        tl.store(normed_ptr + row * N + columns, normed.to(normed_ptr.dtype.element_ty), mask=there)
        row += tl.num_programs(0)
    if RANKS > 1:
        tl.store(steps_ptr + block, step)
