"""The steps of the attention ops on a GPU, and their reports.

Plans and specs are cached by problem, so a later call with the same problem only looks them up.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.kernel import Statics
from tilewright.codegen.qkv.kernels import (
    EPILOGUE,
    EpilogueConfig,
    epilogue_grid,
    epilogue_statics,
)
from tilewright.codegen.qkv.plan import (
    LoweringChoice,
    LoweringPlan,
    epilogue_config,
    plan_fused_qkv,
)
from tilewright.codegen.qkv.problem import HeadEpilogue
from tilewright.codegen.qkv.tune import bucket
from tilewright.codegen.targets import Target, get_target
from tilewright.ops.contract import LoweringReport
from tilewright.ops.qkv import tuning
from tilewright.ops.qkv.arguments import FusedQkvArguments, KvStoreArguments, RaggedQkvArguments
from tilewright.ops.qkv.choices import choice_steps, specs_of
from tilewright.ops.qkv.operands import (
    FusedCall,
    input_strides,
    prepare,
    prepare_store,
    result_buffer,
)
from tilewright.ops.qkv.ragged_as_fused import as_fused_qkv
from tilewright.ops.runtime.device import target_of
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.program import (
    NotRepeatable,
    Outcome,
    Steps,
)

NO_TOKENS = "nothing", "there are no tokens, so nothing is launched"

_plan = cache(plan_fused_qkv)


@cache
def _store_kernel(
    heads: HeadEpilogue, num_tokens: int, target: Target
) -> tuple[EpilogueConfig, Statics]:
    config = epilogue_config(heads, num_tokens, target)
    return config, epilogue_statics(heads, config)


def fused_qkv_paged_steps(a: FusedQkvArguments, target: Target) -> Steps:
    """Performs the steps of a `fused_qkv_paged` call."""
    if a.x.shape[0] == 0:
        q = yield result_buffer(a)
        return Outcome(q, *NO_TOKENS)
    call = prepare(a)
    choice = tuning.measured_lowering(call, target) if a.tune else None
    if choice is None:
        if a.tune:
            yield NotRepeatable("nothing is measured yet; the next call may use another lowering")
        choice = planned_lowering(call, target)
    return (yield from choice_steps(call, choice, target))


def planned_lowering(call: FusedCall, target: Target) -> LoweringChoice:
    """Returns the plan's choice for the number of tokens of the call."""
    plan = _plan(call.problem, target, call.rows is not None)
    return plan.choice(call.a.x.shape[0])


def paged_kv_store_steps(a: KvStoreArguments, target: Target) -> Steps:
    """Performs the steps of a `paged_kv_store` call."""
    call, num_tokens = prepare_store(a), a.k.shape[0]
    config, statics = _store_kernel(call.epilogue, next_power_of_2(num_tokens), target)
    grid = epilogue_grid(call.epilogue, config, num_tokens)
    known = call.known | input_strides(None, a.k, a.v)
    yield launch(EPILOGUE, target, grid, call.values, statics, **known)
    return Outcome(None, "store", f"one kernel writes the named slots, {config}")


def ragged_steps(a: RaggedQkvArguments, target: Target) -> Steps:
    """Performs the steps of a `fused_qkv_matmul_kv_cache_paged_ragged` call, which are the steps of
    `fused_qkv_paged`."""
    outcome = yield from fused_qkv_paged_steps(as_fused_qkv(a), target)
    assert isinstance(outcome.result, torch.Tensor)
    return replace(outcome, result=outcome.result.flatten(1))


# --- reports --------------------------------------------------------------------------------------


def plan_fused_qkv_paged(a: FusedQkvArguments, target: str) -> LoweringReport:
    """Returns the lowering of a call. If the number of tokens is not a constant of the graph,
    returns a lowering for each bucket of numbers of tokens."""
    if a.static_tokens and a.x.shape[0] == 0:
        return LoweringReport(*NO_TOKENS)
    call, chip = prepare(a), get_target(target)
    plan = _plan(call.problem, chip, call.rows is not None)
    if a.tune:
        plan = _tuned(plan, call, target)

    if a.static_tokens:
        (choice,) = plan.choices
        return LoweringReport(choice.name, choice.reason, specs_of(call, choice, chip))
    names = list(dict.fromkeys(choice.name for choice in plan.choices))
    specs = {spec.name: spec for choice in plan.choices for spec in specs_of(call, choice, chip)}
    return LoweringReport(" / ".join(names) + " by token count", str(plan), tuple(specs.values()))


def plan_ragged(a: RaggedQkvArguments, target: str) -> LoweringReport:
    """Returns the lowering of a `fused_qkv_matmul_kv_cache_paged_ragged` call, like
    `plan_fused_qkv_paged`."""
    return plan_fused_qkv_paged(as_fused_qkv(a), target)


def _tuned(plan: LoweringPlan, call: FusedCall, target: str) -> LoweringPlan:
    """Returns the plan with the choices that were measured on this machine. If necessary, measures
    the choices for the number of tokens of the call."""
    index = tuning.device_for(target)
    if index is None:
        return plan
    present = tuning.case_of(call, target_of(torch.device("cuda", index)))

    def best(choice: LoweringChoice) -> LoweringChoice:
        tokens = plan.problem.epilogue.num_tokens or choice.max_tokens or bucket(sys.maxsize)
        case = replace(present, num_tokens=tokens)
        found = tuning.measured_choice(call.a, case, index, measure=case == present)
        if found is None:
            return replace(choice, reason=f"{choice.reason}; not measured here yet")
        return replace(found, max_tokens=choice.max_tokens)

    return replace(plan, choices=tuple(best(choice) for choice in plan.choices))
