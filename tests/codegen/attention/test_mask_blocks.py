"""Tests the `mask_blocks` kernel on Triton's interpreter, and how a mask is divided for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter
from tilewright.codegen.attention.mask_kernels import (
    PROGRAMS_PER_SM,
    MaskConfig,
    MaskProblem,
    blocks_per_part,
    mask_config,
)
from tilewright.codegen.targets import SM90
from tilewright.ops.attention.block_lists import (
    MaskBlocksArguments,
    mask_blocks_steps,
    reference,
)
from tilewright.ops.runtime.program import drive

SMALL = replace(SM90, num_sms=3)


def check(mask, target=SMALL, *, hide_lowest=False):
    """Checks every number of the list that the kernel writes."""
    a = MaskBlocksArguments(mask, hide_lowest=hide_lowest)
    done = drive(mask_blocks_steps(a, target), Interpreter(target))
    assert torch.equal(done.outcome.result, reference(a))
    return done


def scattered(shape, dtype, seed=0):
    """Returns a mask with blocks that have no keys, few keys or all keys. Tiles and blocks mix
    these kinds in every way."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.rand(shape[0], shape[1], shape[2] // 90 + 1, shape[3] // 50 + 1, 1, 1,
                       generator=generator)  # fmt: skip
    kinds = kinds.expand(*kinds.shape[:4], 90, 50).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    draws = torch.rand(shape, generator=generator)
    kinds = kinds[:, :, : shape[2], : shape[3]]
    seen = torch.where(kinds < 0.3, 2.0, torch.where(kinds < 0.6, -1.0, draws)) < 0.001
    if dtype == torch.bool:
        return seen
    return torch.zeros(shape, dtype=dtype).masked_fill(~seen, float("-inf"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 1, 700), (2, 1, 5, 64), (1, 2, 129, 333), (1, 1, 300, 129), (3, 1, 2, 6400)],
    ids=str,
)
def test_every_number_of_every_list(shape, dtype):
    check(scattered(shape, dtype))


def with_lowest(shape, dtype, seed=0):
    """Returns a mask like `scattered`, whose hidden keys have -inf, the lowest number, or a number
    next to the lowest. A few rows have no other numbers."""
    mask = scattered(shape, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor([float("-inf"), 1.0, 0.8, 0.87], dtype=torch.float64)
    numbers[1:] *= torch.finfo(dtype).min
    each = numbers[torch.randint(4, shape[:3], generator=generator)].to(dtype)
    mask = torch.where(mask == 0, mask, each[..., None])
    blind = torch.rand(shape[:3], generator=generator) < 0.004
    mask[..., 0] = torch.where(blind, mask[..., 0], 0.5)
    return mask


LISTS = [(4, 3, 1, 700), (2, 1, 5, 64), (1, 2, 129, 333), (1, 1, 700, 1500)]


@pytest.mark.parametrize(
    ("shape", "sms", "dtype"),
    [
        (shape, (3, 132)[(row + column) % 2], dtype)
        for row, shape in enumerate(LISTS)
        for column, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32))
    ],
    ids=str,
)
def test_every_number_of_every_list_where_the_lowest_hide(shape, sms, dtype):
    """Tests every list for masks in which the lowest number hides keys. Some tiles are divided into
    parts, and some have a row that holds only the lowest number. The cases are all pairs of a
    shape, a number of multiprocessors and a dtype."""
    mask, target = with_lowest(shape, dtype), replace(SM90, num_sms=sms)
    check(mask, target, hide_lowest=True)
    check(scattered(shape, torch.bool), target, hide_lowest=True)


def test_parts_tell_each_other_which_rows_have_an_ordinary_number():
    """Every part has rows without an ordinary number. One row of the first tile has no ordinary
    number in any part."""
    mask = torch.full((1, 1, 256, 4096), torch.finfo(torch.float16).min, dtype=torch.float16)
    rows = torch.arange(256)
    mask[..., rows, rows * 16] = 0
    mask[..., 100, :] = torch.finfo(torch.float16).min
    target = replace(SM90, num_sms=132)
    program = check(mask, target, hide_lowest=True)
    assert program.specs[0].constant("SPLIT")
    assert program.outcome.result[..., 0].tolist() == [[[64, 32]]]


def test_more_blocks_than_are_written_at_a_time():
    mask = scattered((1, 1, 1, 140_000), torch.bool)
    program = check(mask)
    assert program.specs[0].constant("LISTED") < 140_000 // 64


@pytest.mark.parametrize(
    "view",
    [
        lambda m: m.mT.contiguous().mT,
        lambda m: m.transpose(0, 2).contiguous().transpose(0, 2),
        lambda m: m[..., ::2],
        lambda m: m[:, :, 1:, 3:],
        lambda m: m[:, :1, :1, :1].expand(-1, -1, 5, 200),
    ],
    ids=["keys apart", "heads apart", "every second", "off the boundary", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16], ids=str)
def test_masks_of_any_strides(view, dtype):
    check(view(scattered((2, 2, 140, 300), dtype, seed=1)))


def test_parts_of_a_tile_come_together_and_leave_their_counters_at_zero():
    """The number of parts does not divide the blocks of the tile, so the last part is smaller than
    the others."""
    target = replace(SM90, num_sms=132)
    program = check(scattered((1, 1, 256, 1100), torch.bool), target)
    assert program.specs[0].constant("SPLIT")
    (counters,) = [answer[1] for step, answer in program.steps if type(step).__name__ == "SplitK"]
    assert counters.tolist() == [0, 0]


def problem(rows, key_blocks, dtype="u8"):
    return MaskProblem(dtype, rows, key_blocks)


@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("key_blocks", [1, 32, 128, 2048])
@pytest.mark.parametrize("tiles", [1, 8, 64, 100_000])
def test_a_mask_is_cut_where_tiles_are_few_and_large(rows, key_blocks, tiles):
    config = mask_config(problem(rows, key_blocks), tiles, SM90)
    wanted = PROGRAMS_PER_SM * SM90.num_sms
    assert tiles * config.parts < wanted + tiles
    large = rows * key_blocks * 64 >= 4 * 16384
    assert (config.parts > 1) == (large and tiles < wanted)


def test_parts_cover_all_blocks():
    for key_blocks in range(40):
        for config in (MaskConfig(1, 3), MaskConfig(4, 3), MaskConfig(2, 1)):
            each = blocks_per_part(config, key_blocks)
            assert each % config.blocks == 0
            assert each * config.parts >= key_blocks
