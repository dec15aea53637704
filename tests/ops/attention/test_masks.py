"""Tests windows of masks: which sizes a call accepts."""

from types import SimpleNamespace

import pytest

from tilewright.ops.attention.masks import MASKS, WINDOWED, check_mask
from tilewright.ops.checks import ArgumentError

MOST = 2**31 - 1


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("window", [-1, 0, 1, MOST, MOST + 1])
def test_a_windowed_mask_has_a_window_and_others_have_none(mask, window):
    given = SimpleNamespace(mask=mask, window=window)
    if 1 <= window <= MOST if mask in WINDOWED else window == 0:
        check_mask("op", given)
    else:
        with pytest.raises(ArgumentError, match="window"):
            check_mask("op", given)
