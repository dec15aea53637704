"""Which blocks of keys a tile of queries visits: by positions, and by the list of blocks of a mask
tensor (codegen/attention/blocks.py)."""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.tiles import block_of_step, block_range

# Entries that are looked at together.
LOADED: tl.constexpr = tl.constexpr(256)


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


@triton.jit
def blocks_to_visit(
    blocks_ptr, sequence_stride, head_stride, tile_stride, sequence, head, first_row, lowest,
    highest, key_start, own_keys, lead,
    MASK: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(entries of the tile that has query first_row or None, first block, first whole block, number
    of whole, number of all, where in memory the first whole block lies) in blocks of BLOCK_N keys.

    With blocks_ptr, a list of blocks of KEYS keys, the blocks are places on the list.
    """
    if blocks_ptr is None:
        first, whole, num_whole, num_blocks = block_range(
            lowest, highest, key_start, own_keys, lead, MASK, WINDOW, BLOCK_N
        )
        return None, first, whole, num_whole, num_blocks, whole
    else:
        PARTS: tl.constexpr = KEYS // BLOCK_N
        first, whole, num_whole, num_blocks = block_range(
            lowest, highest, key_start, own_keys, lead, MASK, WINDOW, KEYS
        )
        own = blocks_ptr + sequence.to(tl.int64) * sequence_stride
        own += head.to(tl.int64) * head_stride + (first_row // QUERIES).to(tl.int64) * tile_stride
        entries = own + 1
        first, whole, num_whole, num_blocks, block = listed_range(
            entries, tl.load(own), first, whole, num_whole, num_blocks
        )
        return (
            entries, first * PARTS, whole * PARTS, num_whole * PARTS, num_blocks * PARTS,
            block * PARTS,
        )  # fmt: skip


@triton.jit
def key_of_step(
    step, entries, first, whole, num_whole, IN_ORDER: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first key of a step over the blocks of `blocks_to_visit`: whole ones come first, unless
    IN_ORDER."""
    block = first + step if IN_ORDER else block_of_step(step, first, whole, num_whole)
    if entries is None:
        return block * BLOCK_N
    else:
        PARTS: tl.constexpr = KEYS // BLOCK_N
        return (tl.load(entries + block // PARTS) >> 1) * KEYS + block % PARTS * BLOCK_N
