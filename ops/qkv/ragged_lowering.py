"""The CUDA lowering of `fused_qkv_matmul_kv_cache_paged_ragged`: that of `fused_qkv_paged`."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.contract import LoweringReport
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.launch import Again, repeatable_fused_qkv_paged
from tilewright.ops.qkv.plans import plan_fused_qkv_paged
from tilewright.ops.qkv.qkv_cache import FusedQkvArguments
from tilewright.ops.qkv.qkv_matmul_ragged import RaggedQkvArguments, as_fused_qkv


def launch(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The op on CUDA tensors; see RaggedQkvArguments."""
    return repeatable(*args, **kwargs)[0]


def repeatable(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Again | None]:
    """Also what makes the same call again; None where that takes more than one kernel."""
    a = RaggedQkvArguments(*args, **kwargs)
    fused = as_fused_qkv(a)
    positional, named = qkv_cache.OP.split(fused)
    q, again = repeatable_fused_qkv_paged(*positional, **named)
    if again is None or _copied_scales(a, fused):
        return q.flatten(1), None
    return q.flatten(1), lambda *_, **__: again().flatten(1)


def _copied_scales(a: RaggedQkvArguments, fused: FusedQkvArguments) -> bool:
    """Whether the scales are a copy that ends with this call (blocks across projections)."""
    if a.weight_scale is None or fused.q_scale is None:
        return False
    copied, given = (t.untyped_storage().data_ptr() for t in (fused.q_scale, a.weight_scale))
    return copied != given


def plan(a: RaggedQkvArguments, target: str) -> LoweringReport:
    """The lowering of a call; `a` may hold meta tensors."""
    return plan_fused_qkv_paged(as_fused_qkv(a), target)
