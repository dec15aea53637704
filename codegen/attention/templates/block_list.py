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
def listed_block(entries, place):
    """(number of the block, whether every query of the tile sees every key of it) of an entry."""
    entry = tl.load(entries + place)
    return entry >> 1, (entry & 1) != 0


@triton.jit
def listed_range(entries, count, low, high):
    """(place of the first, number) of the entries for blocks from `low` to before `high`."""
    first = 0
    end = 0
    for loaded in range(0, count, LOADED):
        places = loaded + tl.arange(0, LOADED)
        real = places < count
        blocks = tl.load(entries + places, mask=real, other=0) >> 1
        first += tl.sum((real & (blocks < low)).to(tl.int32), axis=0)
        end += tl.sum((real & (blocks < high)).to(tl.int32), axis=0)
    return first, tl.maximum(end - first, 0)
