"""Helpers of the tests of `fused_moe` and `grouped_matmul`."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewright.codegen.targets import SM100
from tilewright.ops.contract import Tolerance
from tilewright.ops.grouped.arguments import GroupedMatmulArguments

# With few multiprocessors, there are few programs with several tiles each, which take less time in
# the interpreter.
SMALL_SM100 = replace(SM100, num_sms=3)
# The size of one rounding of the result, for weights that are not rounded.
ONE_ROUNDING = {
    torch.bfloat16: Tolerance(2.0**-8, 2.0**-16),
    torch.float16: Tolerance(2.0**-11, 2.0**-16),
    torch.float32: Tolerance(2.0**-20, 2.0**-18),
}
WIDENED = {"x", "x_scale", "bias", "expert_weights", "gate_bias", "up_bias", "down_bias"}


def as_double(a):
    """Returns the call with float64 tensors, so that its reference computes in float64. Codes stay
    as they are."""
    given = {name: value for name, value in vars(a).items() if name in WIDENED}
    wide = {n: v.double() for n, v in given.items() if v is not None and v.element_size() > 1}
    if isinstance(a, GroupedMatmulArguments):
        wide["out_dtype"] = torch.float64
    return replace(a, **wide)


def dequantized(weight, dtype):
    """Returns the dequantised weights of all experts, [E, N, K] in `dtype`."""
    experts = range(weight.shape[0])
    return torch.stack([weight.expert(e, dtype).dequantize(dtype) for e in experts])
