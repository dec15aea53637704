"""Sample inputs of `moe_router`. The cases are small and random, and rounding does not change which
experts are chosen. Together the cases use every option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.sampling import Sampler

# The distance between logits. It is so large that rounding does not change the choice.
SPREAD = 0.25


@dataclass(frozen=True)
class RouterCase:
    """One case of `moe_router`. The fields that are not listed here are the sizes and the arguments
    of the op.

    Attributes:
        weight_dtype: The dtype of the weight; None for `dtype`.
        given: Whether x has the logits.
        transposed: Whether the weight is stored as [K, E].
    """

    name: str
    num_tokens: int = 3
    hidden: int = 96
    num_experts: int = 12
    num_slots: int = 2
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = torch.float32
    scores: str = "softmax"
    bias: bool = False
    correction: bool = False
    groups: tuple[int, int, int] = (1, 1, 1)
    normalise: bool = False
    norm_eps: float = 0.0
    norm_min: float = 0.0
    scaling: float = 1.0
    given: bool = False
    transposed: bool = False


ROUTER_CASES = (
    RouterCase("softmax", weights_dtype=None),
    RouterCase("normalised", num_experts=16, num_slots=4, normalise=True, dtype=torch.float16),
    RouterCase("sigmoid", scores="sigmoid", correction=True, normalise=True, norm_eps=1e-20,
               scaling=2.5, weight_dtype=torch.float32),
    RouterCase("groups_of_two", scores="sigmoid", correction=True, groups=(4, 2, 2), num_slots=5,
               normalise=True, norm_eps=1e-20, scaling=2.5, num_experts=24),
    RouterCase("groups_of_one", groups=(5, 2, 1), num_experts=15, num_slots=4, scaling=16.0),
    RouterCase("two_without_correction", groups=(4, 3, 2), num_experts=16, num_slots=3),
    RouterCase("of_chosen", scores="softmax_of_chosen", bias=True, num_slots=4,
               weights_dtype=torch.bfloat16),
    RouterCase("logits", scores="logits", num_slots=1, weights_dtype=None),
    RouterCase("least", normalise=True, norm_min=0.9, num_slots=3, dtype=torch.float32,
               correction=True),
    RouterCase("given", given=True, num_experts=20, num_slots=3, bias=True, normalise=True),
    RouterCase("given_groups", given=True, dtype=torch.float32, scores="sigmoid", correction=True,
               groups=(3, 1, 2)),
    RouterCase("one_token", num_tokens=1, hidden=80, normalise=True),
    RouterCase("transposed", transposed=True, num_tokens=17, hidden=72),
    RouterCase("many_tokens", num_tokens=150, num_experts=24, hidden=200, normalise=True),
    RouterCase("many_wide", num_tokens=70, weight_dtype=torch.float32, normalise=True, bias=True),
    RouterCase("all_experts", num_experts=4, num_slots=4, normalise=True),
    RouterCase("no_tokens", num_tokens=0),
    RouterCase("double", dtype=torch.float64, weights_dtype=None, normalise=True),
)  # fmt: skip


def sample_router(case: RouterCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `moe_router` by name.

    The rows of the weight are nearly orthogonal. x is the sum of these rows, multiplied by logits,
    which are shuffled multiples of SPREAD.
    """
    sampler = Sampler(device, seed)
    experts, tokens = case.num_experts, case.num_tokens
    steps = [sampler.permutation(experts).double() for _ in range(tokens)]
    logits = torch.stack(steps) if steps else torch.zeros(0, experts, dtype=torch.float64)
    logits = (logits - experts / 2) * SPREAD
    bias = _vector(case.bias, sampler, case)
    x, weight = logits, None
    if not case.given:
        drawn = torch.randn(case.hidden, experts, generator=sampler.generator, dtype=torch.float64)
        rows = torch.linalg.qr(drawn).Q.T
        x = logits @ rows
        weight = rows.to(case.weight_dtype or case.dtype).to(sampler.device)
        weight = weight.T.contiguous().T if case.transposed else weight
    num_groups, top_groups, group_top = case.groups
    return {
        "x": x.to(case.dtype).to(sampler.device),
        "weight": weight,
        "num_slots": case.num_slots,
        "bias": bias,
        "scores": case.scores,
        "correction": _vector(case.correction, sampler, case),
        "num_groups": num_groups,
        "top_groups": top_groups,
        "group_top": group_top,
        "normalise": case.normalise,
        "norm_eps": case.norm_eps,
        "norm_min": case.norm_min,
        "scaling": case.scaling,
        "weights_dtype": case.weights_dtype,
    }


def _vector(there: bool, sampler: Sampler, case: RouterCase) -> torch.Tensor | None:
    """Returns a vector of numbers that are small compared with the distance between logits; None if
    the case has no such vector."""
    if not there:
        return None
    return sampler.normal(case.num_experts, dtype=case.dtype, scale=SPREAD / 16)
