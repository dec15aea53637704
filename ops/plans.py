"""What an attention op will run at given shapes: decided from metadata, without a GPU."""

from __future__ import annotations

from typing import Any

from tilewright.codegen.qkv_plan import LoweringPlan, epilogue_config
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import TARGETS
from tilewright.ops.contract import LoweringReport
from tilewright.ops.lowerings import cached_epilogue_spec, cached_plan, weight_rows
from tilewright.ops.qkv_problems import (
    epilogue_problem,
    finish_values,
    head_finish,
    qkv_problem,
    window_views,
)


def plan_fused_qkv_paged(a: Any, target: str) -> LoweringReport:
    """The lowering of a `fused_qkv_paged` call; `a` is a FusedQkvArguments of meta tensors."""
    k_window, v_window = window_views(a, writes_v=True)
    values = finish_values(a, k_window, v_window, None)
    problem = qkv_problem(a, values, head_finish(a, a.q_weight.shape[0], k_window, v_window))
    rows = weight_rows(a.q_weight, a.k_weight, a.v_weight)
    plan = cached_plan(problem, TARGETS[target], rows is not None)
    if problem.num_tokens is not None:
        choice = plan.choice(problem.num_tokens)
        return LoweringReport(choice.name, choice.reason, choice.specs)
    return _by_token_count(plan)


def _by_token_count(plan: LoweringPlan) -> LoweringReport:
    """One kernel per bucket of token counts, chosen at launch."""
    names = list(dict.fromkeys(c.name for c in plan.choices))
    specs: dict[str, KernelSpec] = {s.name: s for c in plan.choices for s in c.specs}
    return LoweringReport(" / ".join(names) + " by token count", str(plan), tuple(specs.values()))


def plan_paged_kv_store(a: Any, target: str) -> LoweringReport:
    """The lowering of a `paged_kv_store` call; `a` is a KvStoreArguments of meta tensors."""
    k_window, v_window = window_views(a, writes_v=a.v is not None)
    values = finish_values(a, k_window, v_window, None)
    finish = head_finish(a, 0, k_window, v_window)
    problem = epilogue_problem(None, a.k, a.v, values, finish, a.static_tokens)
    config = epilogue_config(finish, a.k.shape[0], TARGETS[target])
    spec = cached_epilogue_spec(problem, config, target)
    return LoweringReport("store", f"one kernel writes the named slots, {config}", (spec,))
