"""From the arguments of `moe_router` to a static problem of its kernels."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.moe.router_kernels import RouterProblem
from tilewright.ops.runtime.dtypes import TRITON_TYPES

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Columns of logits that a program holds, for each of its tokens; and slots, each of them a search.
MOST_COLUMNS = 1024
MOST_SLOTS = 32


def unsupported(a: Any) -> str | None:
    """Why the emitted kernels cannot take a call; None where they can. Metadata only."""
    tensors = (a.x, a.weight, a.bias, a.correction)
    dtypes = [t.dtype for t in tensors if t is not None]
    wrong = next((d for d in (*dtypes, a.result_dtype) if d not in KERNEL_DTYPES), None)
    if wrong is not None:
        return f"no kernel for {wrong}"
    if a.x.shape[1] == 0:
        return "no columns"
    columns = router_problem(a).columns
    if columns > MOST_COLUMNS:
        return f"{columns} columns of logits; at most {MOST_COLUMNS}"
    return f"{a.num_slots} slots; at most {MOST_SLOTS}" if a.num_slots > MOST_SLOTS else None


def router_problem(a: Any) -> RouterProblem:
    """The problem of a call; `a` is a MoeRouterArguments. Metadata only."""
    return RouterProblem(
        num_experts=a.num_experts,
        hidden=a.x.shape[1],
        num_slots=a.num_slots,
        scores=a.scores,
        num_groups=a.num_groups,
        top_groups=a.top_groups,
        group_top=a.group_top,
        normalise=a.normalise,
        norm_eps=float(a.norm_eps),
        norm_min=float(a.norm_min),
        scaling=float(a.scaling),
        x=TRITON_TYPES[a.x.dtype],
        weight="" if a.weight is None else TRITON_TYPES[a.weight.dtype],
        corrected=a.correction is not None,
    )
