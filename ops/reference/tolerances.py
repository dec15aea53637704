"""The errors that are allowed for fp32 accumulation with one rounding."""

from __future__ import annotations

import torch

from tilewright.ops.tolerance import Tolerance, rounded_once

ONE_ROUNDING = (
    "Sums are accumulated in fp32, then each result is rounded once to its dtype, by at most half a"
    " unit in the last place. The error of the accumulation depends on the size of the terms and "
    "not on the size of their sum, so it is measured against the rms of the output."
)
TOLERANCES = {
    **rounded_once(2.0**-11, 2.0**-13, 2.0**-18, 2.0**-46),
    torch.float8_e4m3fn: Tolerance(relative=2.0**-4, of_rms=2.0**-11, absolute=2.0**-10),
    torch.float8_e5m2: Tolerance(relative=2.0**-3, of_rms=2.0**-11, absolute=2.0**-17),
}
