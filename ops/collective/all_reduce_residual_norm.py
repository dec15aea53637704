"""`all_reduce_residual_norm`: sums the ranks' parts of a linear, adds the residual, and computes
the norm of the sum for the linears of the next layer.

Every rank gets the same bits. If the ranks share memory, the op uses it. Otherwise, the op calls
the collective of the original graph, and one kernel that computes the other steps.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.codegen.collective.plan import COLUMN_STEP, MOST_COLUMNS, most_tokens
from tilewright.ops.checks import FLOAT_DTYPES, HALVES, ArgumentError, check_operand
from tilewright.ops.collective.cases import REDUCE_CASES, sample_reduce
from tilewright.ops.contract import FusedOp, emitted_kernel, register, rounded_once
from tilewright.ops.groups import Group
from tilewright.ops.reference.norm import RowNorm
from tilewright.ops.runtime.peers import obstacle
from tilewright.ops.sampling import sampler_of

NAME = "all_reduce_residual_norm"
ERROR_MODEL = (
    "Sums and norm are computed in fp32, and each result is rounded once. If the ranks share no "
    "memory, the sum over ranks is computed and rounded by the same collective as in the graph."
)


@dataclass(frozen=True)
class AllReduceResidualNormArguments:
    """The arguments of `all_reduce_residual_norm`, for T tokens and N columns.

    - `x` [T, N]: this rank's part of a sum over ranks.
    - `residual` [T, N] of x's dtype. It is the same on all ranks.
    - `norm_weight` [N] of x's dtype or float32. If it is given, the norm multiplies by norm_offset
      + norm_weight.
    - `group`: the name of the process group, as functional collectives expect it; "" if num_ranks
      is 1.
    - `num_ranks`: the size of the group.

    The result is the sum including the residual, and its RMS norm. Both are new tensors [T, N] of
    x's dtype. All ranks must make the same calls in the same order, and each rank must use one
    stream.
    """

    x: torch.Tensor
    residual: torch.Tensor
    norm_weight: torch.Tensor | None
    _: KW_ONLY
    group: str = ""
    num_ranks: int = 1
    norm_eps: float = 1e-6
    norm_offset: float = 0.0

    norm = Group(RowNorm)


def validate(a: AllReduceResidualNormArguments) -> None:
    check_operand(NAME, "x", a.x, "[T, N]", (None, None), FLOAT_DTYPES, dense=True)
    form = "[T, N]", tuple(a.x.shape), (a.x.dtype,), a.x.device
    check_operand(NAME, "residual", a.residual, *form, dense=True)
    a.norm.check(NAME, a.x, "[N]", a.x.shape[1])
    if a.num_ranks < 1:
        raise ArgumentError(NAME, "num_ranks", "at least 1", a.num_ranks)
    if (a.group != "") != (a.num_ranks > 1):
        expected = f"the name of a group of {a.num_ranks}" if a.num_ranks > 1 else "'' for one rank"
        raise ArgumentError(NAME, "group", expected, a.group)


def reference(a: AllReduceResidualNormArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the following in fp32 (float64 for float64 x), and rounds each result once:

        summed = residual + all_reduce(x)
        normed = summed / sqrt(mean(summed²) + norm_eps) * (norm_offset + norm_weight)

    `normed` is computed from `summed` before `summed` is rounded.
    """
    compute = torch.promote_types(a.x.dtype, torch.float32)
    total = a.x.to(compute)
    if a.num_ranks > 1:
        total = torch.ops._c10d_functional.all_reduce(total.contiguous(), "sum", a.group)
        total = torch.ops._c10d_functional.wait_tensor(total)
    total = total + a.residual.to(compute)
    normed = a.norm.apply(total)
    return total.to(a.x.dtype).contiguous(), normed.to(a.x.dtype).contiguous()


def unsupported(a: AllReduceResidualNormArguments) -> str | None:
    """Returns why no kernel can compute a call; None if a kernel can. Reads only metadata. The
    answer is the same on all ranks."""
    columns = a.x.shape[1]
    if columns > MOST_COLUMNS or columns % COLUMN_STEP or columns == 0:
        return f"{columns} columns: expected a multiple of {COLUMN_STEP} up to {MOST_COLUMNS}"
    return obstacle(a.group) if a.num_ranks > 1 else None


def slower(*, tokens: Any, columns: int, ranks: int) -> str | None:
    """Returns why the library's all-reduce is faster; None if the kernel is at least as fast."""
    most = most_tokens(columns, ranks)
    if most is None or not isinstance(tokens, int) or tokens <= most:
        return None
    return f"more than {most} tokens of {ranks} ranks: the library's ring sends less data"


sample_inputs = sampler_of(AllReduceResidualNormArguments, sample_reduce)

OP = register(
    FusedOp(
        name=NAME,
        arguments=AllReduceResidualNormArguments,
        returns="(Tensor, Tensor)",
        validate=validate,
        reference=reference,
        lowerings=(
            emitted_kernel(
                "tilewright.ops.collective.lowering:all_reduce_residual_norm_steps",
                unsupported,
                HALVES,
            ),
        ),
        cases=REDUCE_CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"x", "residual"}),
        tolerances=rounded_once(2.0**-16, 2.0**-16, 2.0**-20, 2.0**-48),
        error_model=ERROR_MODEL,
        slower=slower,
    )
)
