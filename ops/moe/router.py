"""`moe_router`: chooses the experts of each token in a mixture, and their weights.

Both results are arguments of `fused_moe`. If there is no weight, x has the logits. No intermediate
result is rounded, so the op distinguishes two experts even if a graph in bfloat16 would round their
logits to one number. Among equal numbers, the expert with the lower index comes first (torch.topk
guarantees no order), and NaN is greater than all numbers.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.codegen.moe.router_kernels import RouterProblem
from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_choice,
    check_number,
    check_operand,
    holds,
)
from tilewright.ops.contract import (
    EXACT,
    FusedOp,
    Tolerance,
    emitted_kernel,
    register,
    rounded_once,
)
from tilewright.ops.moe.router_cases import ROUTER_CASES, sample_router
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.sampling import sampler_of

NAME = "moe_router"
SCORES = ("softmax", "softmax_of_chosen", "sigmoid", "logits")
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The largest number of columns of logits for which there is a kernel. A program holds all of them
# for each of its tokens.
MOST_COLUMNS = 1024
# The largest number of slots for which there is a kernel. Each slot requires a search.
MOST_SLOTS = 32
ERROR_MODEL = (
    "Logits are accumulated in fp32. Their error leads to an error of the weights, which is "
    "measured against the rms of the weights. Then the weights are rounded once. The experts are "
    "those of an exact computation, unless scores are too close to tell apart."
)
TOLERANCES = {
    **rounded_once(2.0**-16, 2.0**-16),
    torch.float32: Tolerance(relative=2.0**-18, of_rms=2.0**-18),
    torch.float64: Tolerance(relative=2.0**-47, of_rms=2.0**-46),
    torch.int64: EXACT,
}


@dataclass(frozen=True)
class MoeRouterArguments:
    """The arguments of `moe_router`, for T tokens, K columns, E experts, S slots (top-k) and G
    groups.

    - `x` [T, K]: the input, or the logits [T, E] if there is no weight.
    - `weight` [E, K] or None, with any strides.
    - `num_slots`: the number of experts of each token, S.
    - `bias` [E]: added to the logits.
    - `scores`: one of SCORES. "softmax_of_chosen" chooses by logits, and computes the softmax over
      the chosen experts only.
    - `correction` [E]: added to the scores for the choice, but not for the weights.
    - `num_groups`: the number of groups, G. The E experts form G consecutive groups of equal size.
    - `top_groups`, `group_top`: the choice is limited to top_groups groups. These are the groups
      for which the sum of the group_top (1 or 2) largest numbers of the group is largest.
    - `normalise`: whether the weights of a token are divided by their sum + norm_eps, or by
      norm_min if that is larger. After that, the weights are multiplied by `scaling`.
    - `weights_dtype`: the dtype of the weights; None for x's dtype.

    The results are weights [T, S], and ids int64 [T, S].
    """

    x: torch.Tensor
    weight: torch.Tensor | None
    num_slots: int
    _: KW_ONLY
    bias: torch.Tensor | None = None
    scores: str = "softmax"
    correction: torch.Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    normalise: bool = False
    norm_eps: float = 0.0
    norm_min: float = 0.0
    scaling: float = 1.0
    weights_dtype: torch.dtype | None = None

    @property
    def num_experts(self) -> Any:
        """E, the number of experts."""
        return self.x.shape[1] if self.weight is None else self.weight.shape[0]

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the weights in the result."""
        return self.x.dtype if self.weights_dtype is None else self.weights_dtype


def validate(a: MoeRouterArguments) -> None:
    letters, device = "[T, K]" if a.weight is not None else "[T, E]", a.x.device
    check_operand(NAME, "x", a.x, letters, (None, None), FLOAT_DTYPES, dense=True)
    if a.weight is not None:
        sizes = (None, a.x.shape[1])
        check_operand(NAME, "weight", a.weight, "[E, K]", sizes, FLOAT_DTYPES, device)
    for name, vector in (("bias", a.bias), ("correction", a.correction)):
        if vector is not None:
            check_operand(NAME, name, vector, "[E]", (a.num_experts,), FLOAT_DTYPES, device)
    check_choice(NAME, "scores", a.scores, SCORES)
    check_choice(NAME, "weights_dtype", a.weights_dtype, (None, *FLOAT_DTYPES))
    check_number(NAME, "norm_eps", a.norm_eps, 0.0)
    check_number(NAME, "norm_min", a.norm_min, 0.0)
    check_number(NAME, "scaling", a.scaling)
    _check_groups(a)


def _check_groups(a: MoeRouterArguments) -> None:
    experts, groups = a.num_experts, a.num_groups
    if groups < 1 or not holds(experts % groups == 0) or not holds(experts >= groups):
        expected = f"a number that divides {experts} experts"
        raise ArgumentError(NAME, "num_groups", expected, groups)
    if not 1 <= a.top_groups <= groups:
        raise ArgumentError(NAME, "top_groups", f"1 to {groups} groups", a.top_groups)
    if a.group_top not in (1, 2) or not holds(experts >= a.group_top * groups):
        expected = f"1 or 2, and no more than the {experts // groups} experts of a group"
        raise ArgumentError(NAME, "group_top", expected, a.group_top)
    most = experts // groups * a.top_groups
    if a.num_slots < 1 or not holds(a.num_slots <= most):
        expected = f"1 to {most}, the experts of top_groups groups"
        raise ArgumentError(NAME, "num_slots", expected, a.num_slots)


def fake(a: MoeRouterArguments) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (a.x.shape[0], a.num_slots)
    weights = a.x.new_empty(shape, dtype=a.result_dtype)
    return weights, a.x.new_empty(shape, dtype=torch.int64)


def reference(a: MoeRouterArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the following in fp32 (float64 for float64 x) for each token t:

        logits = x[t] @ weight^T + bias
        scores = softmax(logits), sigmoid(logits), or logits
        choice = scores + correction                 -inf outside of the best groups
        ids[t] = top num_slots of choice             descending; of equals, the lower expert first
        w      = scores[ids[t]]                      the softmax of these with softmax_of_chosen
        w      = w / max(sum(w) + norm_eps, norm_min)    only with normalise
        weights[t] = w * scaling

    If scores have the same order as logits (there is no correction, and groups are ranked by their
    best expert), the choice uses logits. In this case, scores that round to the same number are
    still distinguished. NaN is greater than all numbers.
    """
    compute = torch.promote_types(a.x.dtype, torch.float32)
    logits = a.x.to(compute)
    if a.weight is not None:
        logits = logits @ a.weight.to(compute).T
    if a.bias is not None:
        logits = logits + a.bias.to(compute)
    scores = _SCORES[a.scores](logits)
    choice = scores if a.correction is None else scores + a.correction.to(compute)
    grouped = a.top_groups < a.num_groups
    if a.correction is None and not (grouped and a.group_top == 2):
        choice = logits
    if grouped:
        choice = torch.where(_kept(a, choice), choice, -torch.inf)
    ids = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, : a.num_slots]
    weights = scores.gather(1, ids)
    if a.scores == "softmax_of_chosen":
        weights = weights.softmax(1)
    if a.normalise:
        total = weights.sum(1, keepdim=True) + a.norm_eps
        weights = weights / (total.clamp(min=a.norm_min) if a.norm_min > 0 else total)
    return (weights * a.scaling).to(a.result_dtype), ids.clone(
        memory_format=torch.contiguous_format
    )


_SCORES = {
    "softmax": lambda logits: logits.softmax(1),
    "softmax_of_chosen": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "logits": lambda logits: logits,
}


def _kept(a: MoeRouterArguments, choice: torch.Tensor) -> torch.Tensor:
    """Returns which experts belong to the best groups, [T, E]."""
    size = choice.shape[1] // a.num_groups
    groups = choice.view(-1, a.num_groups, size)
    groups = torch.where(groups.isnan(), torch.inf, groups)
    best = groups.topk(a.group_top, 2).values.sum(2)
    order = torch.sort(best, dim=1, descending=True, stable=True).indices[:, : a.top_groups]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, order, True)
    return kept.repeat_interleave(size, 1)


def unsupported(a: MoeRouterArguments) -> str | None:
    """Returns why the emitted kernels cannot compute a call; None if they can. Reads only
    metadata."""
    tensors = (a.x, a.weight, a.bias, a.correction)
    dtypes = [t.dtype for t in tensors if t is not None]
    wrong = next((d for d in (*dtypes, a.result_dtype) if d not in KERNEL_DTYPES), None)
    if wrong is not None:
        return f"no kernel for {wrong}"
    if a.x.shape[1] == 0:
        return "no columns"
    columns = router_problem(a).columns
    if columns > MOST_COLUMNS:
        return f"{columns} columns of logits are more than {MOST_COLUMNS}"
    if a.num_slots > MOST_SLOTS:
        return f"{a.num_slots} slots are more than {MOST_SLOTS}"
    return None


def router_problem(a: MoeRouterArguments) -> RouterProblem:
    """Returns the problem of a call. Reads only metadata."""
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


sample_inputs = sampler_of(MoeRouterArguments, sample_router)


OP = register(
    FusedOp(
        name=NAME,
        arguments=MoeRouterArguments,
        returns="(Tensor, Tensor)",
        validate=validate,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel("tilewright.ops.moe.router_lowering:moe_router_steps", unsupported),
        ),
        cases=ROUTER_CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"x"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
    )
)
