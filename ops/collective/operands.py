"""From the arguments of sums over ranks to a static problem of their kernel."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.collective.plan import COLUMN_STEP, MOST_COLUMNS
from tilewright.codegen.collective.problem import ReduceProblem
from tilewright.ops.runtime.operands import operand, operand_of
from tilewright.ops.runtime.peers import obstacle

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def unsupported(a: Any) -> str | None:
    """Why no kernel takes a call, from metadata, the same on all ranks; None where one does."""
    if a.x.dtype not in KERNEL_DTYPES:
        return f"no kernel for {a.x.dtype}"
    columns = a.x.shape[1]
    if columns > MOST_COLUMNS or columns % COLUMN_STEP or columns == 0:
        return f"{columns} columns: expected a multiple of {COLUMN_STEP} up to {MOST_COLUMNS}"
    return obstacle(a.group) if a.num_ranks > 1 else None


def reduce_problem(a: Any, num_ranks: int) -> ReduceProblem:
    """The problem of a call; `a` is an AllReduceResidualNormArguments. Metadata and addresses
    only."""
    return ReduceProblem(
        n=a.x.shape[1],
        num_ranks=num_ranks,
        x=operand(a.x, a.x.stride(0)),
        residual=operand(a.residual, a.residual.stride(0)),
        norm_weight=operand_of(a.norm_weight, 0),
        norm_eps=a.norm_eps,
        norm_offset=a.norm_offset,
    )
