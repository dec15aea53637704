"""Tests the meaning of `mask_blocks`, and the calls that it refuses."""

from __future__ import annotations

import pytest
import torch

from tilewright.codegen.attention.blocks import LOGIT, LOWEST, ORDINARY
from tilewright.codegen.attention.templates import softmax
from tilewright.ops import ArgumentError
from tilewright.ops.attention.block_lists import MaskBlocksArguments, reference
from tilewright.ops.attention.masks import largest_power
from tilewright.ops.contract import get_op

OP = get_op("mask_blocks")
INF = float("inf")


def listed(mask, **options):
    """Returns [(block, whole), ...] of every tile, in the order of the result."""
    made = OP.torch_op(mask, **options).flatten(0, 2).tolist()
    return [[divmod(entry, 2) for entry in row[1 : 1 + row[0]]] for row in made]


def test_a_block_is_listed_once_some_query_sees_one_key_of_it():
    mask = torch.zeros(1, 1, 130, 256, dtype=torch.bool)
    mask[..., 127, 200] = mask[..., 128, 0] = True
    assert listed(mask) == [[(3, 0)], [(0, 0)]]


def test_a_block_is_whole_where_all_queries_that_are_there_see_all_of_its_keys():
    mask = torch.ones(1, 1, 130, 200, dtype=torch.bool)
    mask[..., 5, 70] = False
    # The last tile has two queries, and the last block has eight keys.
    assert listed(mask) == [[(0, 1), (1, 0), (2, 1), (3, 0)], [(0, 1), (1, 1), (2, 1), (3, 0)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_of_numbers_that_are_added_minus_infinity_alone_hides(dtype):
    """Only minus infinity hides a key in an added mask. A row that holds only the lowest finite
    number gives the average of all keys, so its keys are seen."""
    mask = torch.zeros(1, 1, 1, 320, dtype=dtype)
    mask[..., 0:64] = -INF
    mask[..., 64:128] = torch.finfo(dtype).min
    mask[..., 128] = float("nan")
    mask[..., 192] = 0.5
    mask[..., 256:] = -0.0
    assert listed(mask) == [[(1, 0), (2, 0), (3, 0), (4, 1)]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_lowest_numbers_hide_where_every_query_of_a_tile_has_an_ordinary_one(dtype):
    lowest = torch.finfo(dtype).min
    mask = torch.full((1, 1, 130, 192), lowest, dtype=dtype)
    mask[..., 0] = 0
    assert listed(mask, hide_lowest=True) == [[(0, 0)], [(0, 0)]]
    assert listed(mask) == [[(0, 0), (1, 0), (2, 0)]] * 2
    mask[..., 5, 70] = lowest / 2  # neither ordinary nor lowest
    mask[..., 128, 0] = lowest
    everything = [(0, 0), (1, 0), (2, 0)]
    assert listed(mask, hide_lowest=True) == [[(0, 0), (1, 0)], everything]
    mask[..., 128, 0] = lowest / 8  # too low to hide the other keys
    assert listed(mask, hide_lowest=True)[1] == everything
    mask[..., 128, 1] = -INF
    mask[..., 128, 2] = 0
    assert listed(mask, hide_lowest=True)[1] == [(0, 0)]


def test_numbers_that_are_not_numbers_are_seen_and_hide_nothing():
    mask = torch.full((1, 1, 2, 192), torch.finfo(torch.float32).min)
    mask[..., 0] = 0
    mask[..., 1, 100] = float("nan")
    assert listed(mask, hide_lowest=True) == [[(0, 0), (1, 0)]]
    mask[..., 1, 0] = float("nan")
    assert listed(mask, hide_lowest=True) == [[(0, 0), (1, 0), (2, 0)]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_hides_leaves_no_weight_in_either_base(dtype):
    """Tests the limits: the largest number that hides a key, the smallest number that does not, and
    logits that are as far apart as they may be."""
    unit = largest_power(dtype)
    sums = torch.tensor([LOWEST + LOGIT, ORDINARY - LOGIT], dtype=torch.float64) * unit
    assert sums.float().softmax(0).tolist() == [0.0, 1.0]
    logits = torch.tensor([LOGIT, -LOGIT], dtype=torch.float64) * unit * softmax.LOG2E.value
    numbers = torch.tensor([LOWEST, ORDINARY]) * unit * softmax.LOG2E.value
    kernel = logits.float() + numbers.float().clamp_min(softmax.LOWEST.value)
    assert (kernel - kernel.max()).exp2().tolist() == [0.0, 1.0]


def test_what_comes_after_the_list_is_zeros():
    mask = torch.zeros(2, 1, 1, 256, dtype=torch.bool)
    mask[1, ..., 64:128] = True
    assert OP.torch_op(mask).flatten(0, 2).tolist() == [[0, 0, 0, 0, 0], [1, 3, 0, 0, 0]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor(True), r"attn_mask: expected shape \[B, H, S, K\] = .*, got shape \[\]"),
        (torch.ones(3, 4, dtype=torch.bool), r"attn_mask: expected shape \[B, H, S, K\]"),
        (torch.ones(1, 1, 3, 4, dtype=torch.int32), "attn_mask: expected dtype torch.bool or"),
        (torch.ones(1, dtype=torch.bool).expand(1, 1, 1, 2**30 + 1), "at most 1073741824 keys"),
    ],
)
def test_what_no_list_is_made_of(mask, message):
    with pytest.raises(ArgumentError, match=f"mask_blocks: .*{message}"):
        OP.torch_op(mask)


def test_sizes_may_be_dynamic():
    """One traced graph serves other numbers of queries and keys, too."""
    torch._dynamo.reset()
    compiled = torch.compile(OP.torch_op, backend="aot_eager", dynamic=True, fullgraph=True)
    for queries, keys in ((3, 70), (200, 333)):
        mask = torch.rand(2, 1, queries, keys) < 0.01
        assert torch.equal(compiled(mask), reference(MaskBlocksArguments(mask)))
