"""Tests which weights are the rows of one tensor, so that one product computes all their
columns."""

from __future__ import annotations

import torch

from tilewright.ops.formats.weight_rows import weight_rows

HEADS, GROUP, D, K = 2, 3, 4, 8


def packed():
    """Returns weights in one tensor, in which the heads of Q, K and V of each group follow each
    other."""
    return torch.empty(HEADS, GROUP + 2, D, K)


def test_rows_without_a_gap_are_told_with_their_places():
    whole = packed()
    rows = weight_rows(whole[:, :GROUP], whole[:, GROUP], whole[:, GROUP + 1])
    assert rows is not None
    assert rows.total == HEADS * (GROUP + 2) * D
    assert rows.firsts == (0, GROUP * D, (GROUP + 1) * D)
    assert rows.steps == (((GROUP + 2) * D, D), ((GROUP + 2) * D,), ((GROUP + 2) * D,))


def test_a_weight_that_is_left_out_leaves_no_gap():
    whole = packed()[:, : GROUP + 1].contiguous()
    assert weight_rows(whole[:, :GROUP], whole[:, GROUP], None) is not None
    assert weight_rows(packed()[:, :GROUP], None, None) is None


def test_rows_in_between_that_no_weight_has_are_a_gap():
    whole = packed()
    assert weight_rows(whole[:, : GROUP - 1], whole[:, GROUP], whole[:, GROUP + 1]) is None


def test_rows_that_two_weights_have_are_none():
    whole = packed()
    assert weight_rows(whole[:, :GROUP], whole[:, GROUP], whole[:, GROUP]) is None


def test_tensors_of_their_own_are_none():
    assert weight_rows(*(torch.empty(HEADS, D, K) for _ in range(3))) is None
    one, other = torch.empty(2 * D, K), torch.empty(2 * D, K)
    assert weight_rows(one[:D], one[D:], None) is not None
    assert weight_rows(one[:D], other[D:], None) is None


def test_rows_of_two_layouts_are_none():
    whole = torch.empty(2 * D, D)
    assert weight_rows(whole[:D], whole[D:], None) is not None
    assert weight_rows(whole[:D], whole[D:].T, None) is None


def test_rows_that_begin_at_another_column_are_none():
    wide = torch.empty(2 * D, K + 1)
    assert weight_rows(wide[:D, :K], wide[D:, :K], None) is not None
    assert weight_rows(wide[:D, :K], wide[D:, 1:], None) is None


def test_rows_that_share_elements_are_none():
    held, step = torch.empty(2 * D * K), K - 1
    parts = [held.as_strided((D, K), (step, 1), first * step) for first in (0, D)]
    assert weight_rows(*parts, None) is None
