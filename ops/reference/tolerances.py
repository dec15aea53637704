"""The errors allowed for fp32 accumulation with one rounding."""

from __future__ import annotations

import torch

from tilewright.ops.tolerance import Tolerance, rounded_once

ONE_ROUNDING = (
    "fp32 accumulation, then one rounding to the output dtype: half a unit in the last place of "
    "the exact value, plus an accumulation error that follows the size of the terms, not of their "
    "sum, and so is measured against the rms of the output"
)
TOLERANCES = {
    **rounded_once(2.0**-11, 2.0**-13, 2.0**-18, 2.0**-46),
    torch.float8_e4m3fn: Tolerance(relative=2.0**-4, of_rms=2.0**-11, absolute=2.0**-10),
    torch.float8_e5m2: Tolerance(relative=2.0**-3, of_rms=2.0**-11, absolute=2.0**-17),
}
