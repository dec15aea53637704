"""The CUDA implementations of the attention ops: choose a lowering, then run it.

`launch_fused_qkv_paged` and `launch_paged_kv_store` take exactly the arguments of their ops, which
have been checked by then. Plans and problems are kept per metadata of the arguments, so a step
that looks like the last one only looks them up.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.qkv_plan import LoweringChoice
from tilewright.codegen.targets import SM90
from tilewright.ops import lowerings
from tilewright.ops.cache_store import KvStoreArguments
from tilewright.ops.lowerings import FusedCall
from tilewright.ops.qkv_cache import FusedQkvArguments, fake
from tilewright.ops.tuning import case_of, measured_choice


def launch_fused_qkv_paged(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`fused_qkv_paged` on CUDA tensors; see FusedQkvArguments."""
    a = FusedQkvArguments(*args, **kwargs)
    if a.x.shape[0] == 0:
        return fake(a)
    call = lowerings.prepare(a)
    lowerings.run(call, choose_lowering(call))
    return call.q


def choose_lowering(call: FusedCall) -> LoweringChoice:
    """What was measured here, under `tune`; else what the plan has for the token count."""
    a = call.a
    target = lowerings.device_target(a.x.device)
    if a.tune and target is not None:
        index = torch.cuda.current_device() if a.x.device.index is None else a.x.device.index
        measured = measured_choice(a, case_of(call, target), index)
        if measured is not None:
            return measured
    plan = lowerings.cached_plan(call.problem, target, call.rows is not None)
    return plan.choice(a.x.shape[0])


def launch_paged_kv_store(*args: Any, **kwargs: Any) -> None:
    """`paged_kv_store` on CUDA tensors; see KvStoreArguments."""
    a = KvStoreArguments(*args, **kwargs)
    num_tokens = a.k.shape[0]
    if num_tokens == 0:
        return
    problem, values = lowerings.prepare_store(a)
    target = lowerings.device_target(a.k.device) or SM90
    config = lowerings.store_config(problem.finish, num_tokens, target)
    spec = lowerings.cached_epilogue_spec(problem, config, target.name)
    grid = lowerings.epilogue_grid(problem, config, num_tokens)
    lowerings.launch(spec, grid, values, a.k.device)
