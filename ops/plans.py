"""What an attention op will run at given shapes: decided from metadata, without a GPU.

The same preparation as a launch, on meta tensors: a report names the kernels that a launch takes. A
tensor whose first element is not on a 16-byte boundary is known at the launch only, and gets a
kernel of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewright.codegen.qkv_plan import LoweringChoice, LoweringPlan
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import TARGETS
from tilewright.ops.contract import LoweringReport
from tilewright.ops.lowerings import (
    cached_epilogue_spec,
    cached_plan,
    prepare,
    prepare_store,
    project_and_plan,
    store_config,
)


def plan_fused_qkv_paged(a: Any, target: str) -> LoweringReport:
    """The lowering of a `fused_qkv_paged` call; `a` is a FusedQkvArguments of meta tensors."""
    call = prepare(a)
    plan = cached_plan(call.problem, TARGETS[target], call.rows is not None)

    def exact(choice: LoweringChoice) -> LoweringChoice:
        if choice.name != "library":
            return choice
        return replace(choice, specs=(project_and_plan(prepare(a), choice)[0],))

    plan = replace(plan, choices=tuple(exact(choice) for choice in plan.choices))
    if call.problem.num_tokens is not None:
        choice = plan.choice(call.problem.num_tokens)
        return LoweringReport(choice.name, choice.reason, choice.specs)
    return _by_token_count(plan)


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
