"""The CUDA implementations of the attention ops: choose a lowering, then run it.

`launch_fused_qkv_paged` and `launch_paged_kv_store` take exactly the arguments of their ops, which
have been checked by then. Plans and problems are kept per metadata of the arguments, so a step
that looks like the last one only looks them up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilewright.codegen.qkv_plan import LoweringChoice
from tilewright.codegen.targets import SM90
from tilewright.ops import lowerings
from tilewright.ops.cache_store import KvStoreArguments
from tilewright.ops.kernel_launch import split_k_scratch
from tilewright.ops.lowerings import FusedCall
from tilewright.ops.qkv_cache import FusedQkvArguments, fake
from tilewright.ops.repeats import Noted, noting_launches
from tilewright.ops.tuning import case_of, measured_choice

Again = Callable[..., Any]


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
    return call.q, _again(noted, a, call.q) if settled else None


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
    return None, _again(noted, a, None)


def _again(noted: list[Noted], a: Any, q: torch.Tensor | None) -> Again | None:
    """Makes the one launch again, by address: a new result, fresh split-K scratch, all else as it
    was. None where there were more launches, or where one reads what the call itself made."""
    if len(noted) != 1:
        return None
    launch, values = noted[0]
    scratch_names = ("workspace_ptr", "counters_ptr")
    known = {_storage(t) for t in vars(a).values() if isinstance(t, torch.Tensor)}
    for name, value in zip(launch.names, values, strict=True):
        made_here = isinstance(value, torch.Tensor) and _storage(value) not in known
        if made_here and value is not q and name not in scratch_names:
            return None
    addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
    names = launch.names
    result = None
    if q is not None:
        at = names.index("q_out_ptr")
        result = (at, partial(torch.empty, q.shape, dtype=q.dtype, device=q.device))
    scratch = None
    if "workspace_ptr" in names:
        places = tuple(names.index(name) for name in scratch_names)
        workspace, counters = (values[place] for place in places)
        tiles = counters.numel()
        make = partial(split_k_scratch, tiles, workspace.numel() // tiles, workspace.device)
        scratch = (*places, make)
    return partial(_launch_again, launch, addresses, result, scratch)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _launch_again(
    launch: Any, addresses: list[Any], result: Any, scratch: Any, *_: Any, **__: Any
) -> torch.Tensor | None:
    if result is None and scratch is None:
        launch(addresses)
        return None
    given = addresses.copy()
    made = None
    if result is not None:
        at, new = result
        made = new()
        given[at] = made.data_ptr()
    if scratch is not None:
        first, second, new = scratch
        workspace, counters = new()
        given[first], given[second] = workspace.data_ptr(), counters.data_ptr()
    launch(given)
    return made
