"""Tests which entries of a list of blocks a program visits, by comparison with a loop over the list
in Python."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from tilewright.codegen.attention.templates.block_list import (
    blocks_to_visit,
    key_of_step,
    listed_range,
)
from tilewright.codegen.build.interpreter import interpret


@triton.jit
def found(entries, out, count, first_block, whole_block, num_whole, num_blocks):
    first, whole, num_listed, number, block = listed_range(
        entries, count, first_block, whole_block, num_whole, num_blocks
    )
    tl.store(out, first)
    tl.store(out + 1, whole)
    tl.store(out + 2, num_listed)
    tl.store(out + 3, number)
    tl.store(out + 4, block)


@triton.jit
def visited(
    blocks, out, num_keys, IN_ORDER: tl.constexpr, KEYS: tl.constexpr, BLOCK_N: tl.constexpr
):
    sequence, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entries, first, whole, num_whole, num_blocks, _ = blocks_to_visit(
        blocks, 0, 0, 0, sequence, head, row, 0, 0, 0, num_keys, 0, "none", 0, 16, KEYS, BLOCK_N
    )
    tl.store(out, num_whole)
    for step in range(num_blocks):
        key = key_of_step(step, entries, first, whole, num_whole, IN_ORDER, KEYS, BLOCK_N)
        tl.store(out + 1 + step, key)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("block_n", [8, 16, 32])
def test_every_part_of_a_listed_block_is_visited_once(block_n, in_order):
    """Checks that every part of a block of 32 keys is visited once. Whole blocks come first, unless
    all blocks come in order."""
    listed = {1: 0, 3: 1, 4: 1, 6: 0}  # maps a listed block to whether it is whole
    blocks = torch.tensor([4, *(2 * block + whole for block, whole in listed.items())])
    keys = [key for block in listed for key in range(32 * block, 32 * block + 32, block_n)]
    whole = [key for key in keys if 96 <= key < 160]
    out = torch.full((len(keys) + 1,), -1, dtype=torch.int32)
    interpret(visited)[(1, 1, 1)](blocks.int(), out, 256, in_order, 32, block_n)
    count, *found_keys = out.tolist()
    assert count == len(whole)
    assert sorted(found_keys) == keys
    assert found_keys == keys if in_order else found_keys[:count] == whole


def expected(entries, first_block, whole_block, num_whole, num_blocks):
    """Returns the five numbers that the function under test should return.

    They are the place of the first entry, the place of the first whole block, the number of whole
    blocks in a row, the number of all blocks, and the number of the first whole block. If there is
    no whole block, its place and number mean nothing.
    """
    blocks = [entry >> 1 for entry in entries]
    within = [at for at, b in enumerate(blocks) if first_block <= b < first_block + num_blocks]
    first = sum(b < first_block for b in blocks)
    free = [
        at
        for at in within
        if entries[at] & 1 and whole_block <= blocks[at] < whole_block + num_whole
    ]
    run = 0
    while run < len(free) and free[run] - free[0] == blocks[free[run]] - blocks[free[0]] == run:
        run += 1
    return first, (free or [first])[0], run, len(within), blocks[free[0]] if free else None


@pytest.mark.parametrize("count", [0, 1, 7, 255, 256, 257, 600])
def test_the_run_of_whole_blocks_is_the_first_in_list_and_memory(count):
    draw = random.Random(count)
    runs = set()
    for _ in range(24):
        most = count + draw.choice((0, 1, count // 8 + 1))  # lists with gaps and without gaps
        blocks = sorted(draw.sample(range(most), count))
        often = draw.choice((0.2, 0.9, 1.0))
        entries = [2 * block + (draw.random() < often) for block in blocks]
        first_block = draw.randrange(most + 1)
        num_blocks = draw.randrange(most + 2 - first_block)
        whole_block = first_block + draw.randrange(num_blocks + 1)
        num_whole = draw.randrange(first_block + num_blocks - whole_block + 1)
        ranges = (first_block, whole_block, num_whole, num_blocks)
        out = torch.full((5,), -1, dtype=torch.int32)
        listed = torch.tensor([*entries, -1], dtype=torch.int32)
        interpret(found)[(1,)](listed, out, count, *ranges)
        *told, block = out.tolist()
        *places, named = expected(entries, *ranges)
        assert told == places, (entries, ranges)
        assert named in (None, block), (entries, ranges)
        runs.add((min(told[2], 2), told[1] > told[0]))
    if count > 1:
        assert {(0, False), (2, True)} <= runs
