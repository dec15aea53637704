"""Decides for which arguments of the attention ops there is an emitted kernel."""

from __future__ import annotations

import torch

from tilewright.ops.formats.code_operands import differences
from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.ops.qkv.arguments import FusedQkvArguments, KvStoreArguments

#: The module that has the steps and plans of the ops.
STEPS = "tilewright.ops.qkv.lowering"
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FP8_DTYPES)


def kernel_obstacle(a: FusedQkvArguments | KvStoreArguments) -> str | None:
    """Returns why no emitted kernel can compute an attention op with these arguments; None if a
    kernel can."""
    dtype = a.k_cache.dtype
    if dtype not in KERNEL_DTYPES:
        return f"no kernel for {dtype}"
    if a.cos is not None and a.sin is not None and a.cos.dtype != a.sin.dtype:
        return f"cos is {a.cos.dtype}, but sin is {a.sin.dtype}"
    return None


def projection_obstacle(a: FusedQkvArguments) -> str | None:
    """Returns why no emitted kernel can compute an op that projects, with these arguments; None if
    a kernel can."""
    obstacle = kernel_obstacle(a)
    if obstacle is None and a.is_coded:
        return differences(a.projections) or None
    return obstacle
