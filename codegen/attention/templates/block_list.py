"""Finds the blocks of keys that a tile of queries visits. They follow from the positions and, if
there is a mask tensor, from its list of blocks (codegen/attention/blocks.py)."""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.tiles import block_of_step, block_range

# The number of list entries that are loaded together.
LOADED: tl.constexpr = tl.constexpr(256)


@triton.jit
def listed_range(entries, count, first_block, whole_block, num_whole, num_blocks):
    """Finds the list entries that belong to num_blocks blocks, starting at first_block.

    A whole entry is a block in which no mask hides a key. The function considers only the whole
    entries among the num_whole blocks from whole_block on. It finds the first run of such entries
    that are adjacent on the list and whose blocks are adjacent in memory. A loop over this run does
    not have to read the list, so its loads of keys do not wait for loads of the list.

    Returns (index of the first entry that belongs to the blocks, index of the run's first entry,
    number of entries in the run, number of all entries that belong to the blocks, block of the
    run's first entry).
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
    # If no entry is whole, the run is empty and starts at the first entry.
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
    """Returns the blocks of BLOCK_N keys that a tile of queries visits. first_row: the first query
    of the tile.

    The result has six items: a pointer to the tile's entries of the list, or None; the first block;
    the first whole block; how many whole blocks there are; how many blocks there are; the index of
    the first whole block among the blocks of the sequence. If there is a list of blocks
    (blocks_ptr), its blocks have KEYS keys, and the second and the third item are indices into the
    list.
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
    """Returns the first key that a step reads. The steps go over the blocks that `blocks_to_visit`
    returned. Whole blocks come first, unless IN_ORDER."""
    block = first + step if IN_ORDER else block_of_step(step, first, whole, num_whole)
    if entries is None:
        return block * BLOCK_N
    else:
        PARTS: tl.constexpr = KEYS // BLOCK_N
        return (tl.load(entries + block // PARTS) >> 1) * KEYS + block % PARTS * BLOCK_N
