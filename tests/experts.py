"""What tests of `fused_moe` and `grouped_matmul` share."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewright.codegen.targets import SM100
from tilewright.ops.contract import Tolerance
from tilewright.ops.grouped.arguments import GroupedMatmulArguments

# Few programs, so that the interpreter is done soon: each takes several tiles.
SMALL_SM100 = replace(SM100, num_sms=3)
# One rounding of the result, where the weights need none.
ONE_ROUNDING = {
    torch.bfloat16: Tolerance(2.0**-8, 2.0**-16),
    torch.float16: Tolerance(2.0**-11, 2.0**-16),
    torch.float32: Tolerance(2.0**-20, 2.0**-18),
}
WIDENED = {"x", "x_scale", "bias", "expert_weights", "gate_bias", "up_bias", "down_bias"}


def as_double(a):
    """The call whose reference computes in float64; codes stay codes."""
    given = {name: value for name, value in vars(a).items() if name in WIDENED}
    wide = {n: v.double() for n, v in given.items() if v is not None and v.element_size() > 1}
    if isinstance(a, GroupedMatmulArguments):
        wide["out_dtype"] = torch.float64
    return replace(a, **wide)


def dequantized(weight, dtype):
    """The weights of all experts, [E, N, K] in dtype."""
    experts = range(weight.shape[0])
    return torch.stack([weight.expert(e, dtype).dequantize(dtype) for e in experts])
