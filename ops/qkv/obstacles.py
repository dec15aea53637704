"""Which arguments the emitted kernels of the attention ops take."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.ops.qkv.quantized_operands import differences

#: The module of the ops' steps and plans.
STEPS = "tilewright.ops.qkv.lowering"
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FP8_DTYPES)


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
