"""The CUDA lowering of `fused_qkv_matmul_kv_cache_paged_ragged`: that of `fused_qkv_paged`."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops import qkv_cache
from tilewright.ops.contract import LoweringReport
from tilewright.ops.launches import launch_fused_qkv_paged
from tilewright.ops.plans import plan_fused_qkv_paged
from tilewright.ops.qkv_matmul_ragged import RaggedQkvArguments, as_fused_qkv


def launch(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The op on CUDA tensors; see RaggedQkvArguments."""
    positional, named = qkv_cache.OP.split(as_fused_qkv(RaggedQkvArguments(*args, **kwargs)))
    return launch_fused_qkv_paged(*positional, **named).flatten(1)


def plan(a: RaggedQkvArguments, target: str) -> LoweringReport:
    """The lowering of a call; `a` may hold meta tensors."""
    return plan_fused_qkv_paged(as_fused_qkv(a), target)
