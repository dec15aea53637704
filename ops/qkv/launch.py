"""The CUDA implementations of the attention ops: choose a lowering, then run it.

`launch_fused_qkv_paged` and `launch_paged_kv_store` take exactly the arguments of their ops, which
have been checked by then. Plans and problems are kept per metadata of the arguments, so a step
that looks like the last one only looks them up.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.qkv.plan import LoweringChoice
from tilewright.codegen.targets import SM90
from tilewright.ops.qkv import lowering as lowerings
from tilewright.ops.qkv.cache_store import KvStoreArguments
from tilewright.ops.qkv.lowering import FusedCall
from tilewright.ops.qkv.qkv_cache import FusedQkvArguments, fake
from tilewright.ops.qkv.tuning import case_of, measured_choice
from tilewright.ops.runtime.recording import noting_launches
from tilewright.ops.runtime.replay import Again, call_again


def launch_fused_qkv_paged(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`fused_qkv_paged` on CUDA tensors; see FusedQkvArguments."""
    return repeatable_fused_qkv_paged(*args, **kwargs)[0]


def repeatable_fused_qkv_paged(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Again | None]:
    """Also what makes the same call again; None where that takes more than one kernel."""
    a = FusedQkvArguments(*args, **kwargs)
    if a.x.shape[0] == 0:
        return fake(a), None
    call = lowerings.prepare(a)
    measured = measured_lowering(call)
    choice = measured or planned_lowering(call)
    with noting_launches() as noted:
        lowerings.run(call, choice)
    # Without a config a library has its part; under `tune` the next call may choose otherwise.
    settled = choice.config is not None and (measured is not None or not a.tune)
    return call.q, call_again(noted, args, kwargs, call.q) if settled else None


def choose_lowering(call: FusedCall) -> LoweringChoice:
    """What was measured here, under `tune`; else what the plan has for the token count."""
    return measured_lowering(call) or planned_lowering(call)


def measured_lowering(call: FusedCall) -> LoweringChoice | None:
    """Under `tune`, what was measured on the call's GPU, measured now where that can be done."""
    a = call.a
    target = lowerings.device_target(a.x.device) if a.tune else None
    if target is None:
        return None
    index = torch.cuda.current_device() if a.x.device.index is None else a.x.device.index
    return measured_choice(a, case_of(call, target), index)


def planned_lowering(call: FusedCall) -> LoweringChoice:
    target = lowerings.device_target(call.a.x.device)
    plan = lowerings.cached_plan(call.problem, target, call.rows is not None)
    return plan.choice(call.a.x.shape[0])


def launch_paged_kv_store(*args: Any, **kwargs: Any) -> None:
    """`paged_kv_store` on CUDA tensors; see KvStoreArguments."""
    repeatable_paged_kv_store(*args, **kwargs)


def repeatable_paged_kv_store(*args: Any, **kwargs: Any) -> tuple[None, Again | None]:
    """Also what makes the same call again."""
    a = KvStoreArguments(*args, **kwargs)
    num_tokens = a.k.shape[0]
    if num_tokens == 0:
        return None, None
    problem, values = lowerings.prepare_store(a)
    target = lowerings.device_target(a.k.device) or SM90
    config = lowerings.store_config(problem.finish, num_tokens, target)
    spec = lowerings.cached_epilogue_spec(problem, config, target.name)
    grid = lowerings.epilogue_grid(problem, config, num_tokens)
    with noting_launches() as noted:
        lowerings.launch(spec, grid, values, a.k.device)
    return None, call_again(noted, args, kwargs, None)
