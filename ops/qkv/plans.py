"""What an attention op will run at given shapes: decided from metadata, without a GPU.

The same preparation as a launch, on meta tensors: a report names the kernels that a launch takes. A
tensor whose first element is not on a 16-byte boundary is known at the launch only, and gets a
kernel of its own.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.qkv.plan import LoweringChoice, LoweringPlan
from tilewright.codegen.qkv.tune import bucket
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import TARGETS
from tilewright.ops.contract import LoweringReport
from tilewright.ops.qkv.lowering import (
    FusedCall,
    cached_epilogue_spec,
    cached_plan,
    prepare,
    prepare_store,
    project_and_plan,
    store_config,
)
from tilewright.ops.qkv.tuning import case_of, device_for, measured_choice
from tilewright.ops.runtime.device import device_target


def plan_fused_qkv_paged(a: Any, target: str) -> LoweringReport:
    """The lowering of a `fused_qkv_paged` call; `a` is a FusedQkvArguments of meta tensors."""
    if a.static_tokens and a.x.shape[0] == 0:
        return LoweringReport("nothing", "no tokens, no launch")
    call = prepare(a)
    plan = cached_plan(call.problem, TARGETS[target], call.rows is not None)
    if a.tune:
        plan = _tuned(plan, call, target)

    def exact(choice: LoweringChoice) -> LoweringChoice:
        if choice.name != "library":
            return choice
        epilogue, _ = project_and_plan(prepare(a), choice)
        return replace(choice, specs=(epilogue, *choice.specs[1:]))

    plan = replace(plan, choices=tuple(exact(choice) for choice in plan.choices))
    if call.problem.num_tokens is not None:
        choice = plan.choice(call.problem.num_tokens)
        return LoweringReport(choice.name, choice.reason, choice.specs)
    return _by_token_count(plan)


def _tuned(plan: LoweringPlan, call: FusedCall, target: str) -> LoweringPlan:
    """The plan with what was measured here; measured now for the token count of the call."""
    index = device_for(target)
    here = None if index is None else device_target(torch.device("cuda", index))
    if index is None or here is None:
        return plan
    present = case_of(call, here)

    def best(choice: LoweringChoice) -> LoweringChoice:
        tokens = plan.problem.num_tokens or choice.max_tokens or bucket(sys.maxsize)
        case = replace(present, num_tokens=tokens)
        found = measured_choice(call.a, case, index, measure=case == present)
        if found is None:
            return replace(choice, reason=f"{choice.reason}; not measured here yet")
        return replace(found, max_tokens=choice.max_tokens)

    return replace(plan, choices=tuple(best(choice) for choice in plan.choices))


def _by_token_count(plan: LoweringPlan) -> LoweringReport:
    """One kernel per bucket of token counts, chosen at launch."""
    names = list(dict.fromkeys(c.name for c in plan.choices))
    specs: dict[str, KernelSpec] = {s.name: s for c in plan.choices for s in c.specs}
    return LoweringReport(" / ".join(names) + " by token count", str(plan), tuple(specs.values()))


def plan_paged_kv_store(a: Any, target: str) -> LoweringReport:
    """The lowering of a `paged_kv_store` call; `a` is a KvStoreArguments of meta tensors."""
    problem, _ = prepare_store(a)
    config = store_config(problem.finish, a.k.shape[0], TARGETS[target])
    spec = cached_epilogue_spec(problem, config, target)
    return LoweringReport("store", f"one kernel writes the named slots, {config}", (spec,))
