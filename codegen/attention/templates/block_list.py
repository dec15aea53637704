"""How kernels of attention read a list of blocks (codegen/attention/blocks.py)."""

import triton
import triton.language as tl

# Entries that are looked at together.
LOADED: tl.constexpr = tl.constexpr(256)


@triton.jit
def tile_list(
    blocks_ptr, sequence, head, first_row, sequence_stride, head_stride, tile_stride,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """(pointer to the first entry, number of entries) of the tile that has a query."""
    own = blocks_ptr + sequence.to(tl.int64) * sequence_stride + head.to(tl.int64) * head_stride
    own += (first_row // QUERIES).to(tl.int64) * tile_stride
    return own + 1, tl.load(own)


@triton.jit
def listed_key(entries, step, KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key of a step over the blocks of a list, each taken BLOCK_N keys at a time."""
    PARTS: tl.constexpr = KEYS // BLOCK_N
    return (tl.load(entries + step // PARTS) >> 1) * KEYS + step % PARTS * BLOCK_N


@triton.jit
def listed_range(entries, count, first_block, whole_block, num_whole, num_blocks):
    """(place of the first, place of the first whole, number of whole, number of all) of the entries
    for num_blocks blocks from first_block on, and the block of the first whole.

    Whole are the first such that follow each other on the list and in memory, and are whole, too,
    by what else masks: those of num_whole blocks from whole_block on. So a loop over them reads no
    list, and its loads do not wait for one.
    """
    first = 0
    end = 0
    run = count
    run_end = count
    shift = 0
    for loaded in range(0, count, LOADED):
        places = loaded + tl.arange(0, LOADED)
        real = places < count
        entry = tl.load(entries + places, mask=real, other=0)
        block = entry >> 1
        real = real & (block < first_block + num_blocks)
        first += tl.sum((real & (block < first_block)).to(tl.int32), axis=0)
        end += tl.sum(real.to(tl.int32), axis=0)
        whole = real & ((entry & 1) != 0) & (block >= whole_block)
        whole = whole & (block < whole_block + num_whole)
        run = tl.minimum(run, tl.min(tl.where(whole, places, count), axis=0))
        shift += tl.sum(tl.where(whole & (places == run), block - places, 0), axis=0)
        after = (places > run) & ~(whole & (block - places == shift))
        run_end = tl.minimum(run_end, tl.min(tl.where(after, places, count), axis=0))
    # Where none is whole, the others start at the first.
    found = run < end
    whole_first = tl.where(found, run, first)
    num_listed = tl.where(found, run_end - run, 0)
    return first, whole_first, num_listed, end - first, whole_first + shift
