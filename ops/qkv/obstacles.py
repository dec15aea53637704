"""What the attention ops' lowerings share: which arguments the emitted kernel takes, and the
errors that fp32 accumulation with one rounding may make."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.contract import Lowering, Tolerance
from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.ops.qkv.quantized_operands import differences

KERNEL_MODULE = "tilewright.ops.qkv.launch"
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FP8_DTYPES)

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


def kernel_obstacle(arguments: Any) -> str | None:
    """None, or why no emitted kernel takes these arguments of an attention op."""
    dtype = arguments.k_cache.dtype
    if dtype not in KERNEL_DTYPES:
        return f"no kernel for {dtype}"
    if arguments.cos is not None and arguments.cos.dtype != arguments.sin.dtype:
        return f"cos of {arguments.cos.dtype}, sin of {arguments.sin.dtype}"
    if getattr(arguments, "weight_format", "dense") != "dense":
        return differences(arguments) or None
    return None


def emitted_kernel(function: str) -> Lowering:
    """The lowering by the emitted kernel that `launch_<function>` of the kernel module launches."""
    return Lowering(
        "emitted_kernel",
        f"{KERNEL_MODULE}:launch_{function}",
        frozenset({"cuda"}),
        kernel_obstacle,
        repeatable=f"{KERNEL_MODULE}:repeatable_{function}",
    )
