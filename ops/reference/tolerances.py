"""The errors that fp32 accumulation with one rounding may make."""

from __future__ import annotations

import torch

from tilewright.ops.contract import Tolerance

ONE_ROUNDING = (
    "fp32 accumulation, then one rounding to the output dtype: half a unit in the last place of "
    "the exact value, plus an accumulation error that follows the size of the terms, not of their "
    "sum, and so is measured against the rms of the output"
)
TOLERANCES = {
    torch.bfloat16: Tolerance(relative=2.0**-8, of_rms=2.0**-11),
    torch.float16: Tolerance(relative=2.0**-11, of_rms=2.0**-13),
    torch.float32: Tolerance(relative=2.0**-20, of_rms=2.0**-18),
    torch.float64: Tolerance(relative=2.0**-49, of_rms=2.0**-46),
    torch.float8_e4m3fn: Tolerance(relative=2.0**-4, of_rms=2.0**-11, absolute=2.0**-10),
    torch.float8_e5m2: Tolerance(relative=2.0**-3, of_rms=2.0**-11, absolute=2.0**-17),
}
