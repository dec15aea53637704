"""The CUDA implementations of the MLA ops: latents in one launch, up-projection, attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.mla.attention_specs import merge_spec
from tilewright.codegen.mla.plan import uses_library
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, TARGETS, Target
from tilewright.ops.contract import LoweringReport
from tilewright.ops.mla.attend import arguments, attend_chunks, joins_keys, plain_call
from tilewright.ops.mla.attention_lowering import attention_plan
from tilewright.ops.mla.branch import MlaBranchArguments, as_mla_prefill
from tilewright.ops.mla.checks import FP8
from tilewright.ops.mla.cudnn import NAME, joined_specs
from tilewright.ops.mla.key_lowering import (
    Keys,
    empty_keys,
    joined_keys,
    last_position,
    latent_kernel,
    latent_launch,
    latent_launches,
    make_keys,
    numbers_spec,
    up_plan,
)
from tilewright.ops.mla.keys import buffer_rows, row_key_offsets
from tilewright.ops.mla.latent_store import LatentStoreArguments
from tilewright.ops.mla.operands import Chunk, key_buffers, numbers_problem, up_problem
from tilewright.ops.mla.prefill import MlaPrefillArguments
from tilewright.ops.runtime.device import device_target
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.launch import launch
from tilewright.ops.runtime.recording import noting_launches
from tilewright.ops.runtime.replay import Again, call_again


def launch_latent_store(*args: Any, **kwargs: Any) -> None:
    """`mla_latent_store` on CUDA tensors; see LatentStoreArguments."""
    repeatable_latent_store(*args, **kwargs)


def repeatable_latent_store(*args: Any, **kwargs: Any) -> tuple[None, Again | None]:
    """Also what makes the same call again."""
    a = LatentStoreArguments(*args, **kwargs)
    if a.latent.shape[0] == 0:
        return None, None
    target = device_target(a.latent.device) or SM90
    call = latent_launch(a, None, None, store=True, gather=False, fused=False)
    with noting_launches() as noted:
        launch(*latent_kernel(call, target), a.latent.device)
    return None, call_again(noted, args, kwargs, None)


def launch_mla_prefill(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`mla_prefill` on CUDA tensors; see MlaPrefillArguments."""
    return repeatable_mla_prefill(*args, **kwargs)[0]


def repeatable_mla_prefill(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Again | None]:
    """Also what makes the same call again."""
    a = MlaPrefillArguments(*args, **kwargs)
    with noting_launches() as noted:
        out = run_prefill(a, [whole(a)])
    return out, call_again(noted, args, kwargs, out)


def whole(a: Any) -> Chunk:
    """All keys of a call."""
    return Chunk(buffer_rows(a), row_key_offsets(a))


def launch_mla_branch(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`mla_prefill_branch_fp8` on CUDA tensors; see MlaBranchArguments."""
    return repeatable_mla_branch(*args, **kwargs)[0]


def repeatable_mla_branch(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Again | None]:
    """Also what makes the same call again; None where there are several chunks."""
    a = MlaBranchArguments(*args, **kwargs)
    given, chunks = as_mla_prefill(a), branch_chunks(a)
    if len(chunks) > 1:  # what is noted is kept: chunks are there so that less is
        return run_prefill(given, chunks), None
    with noting_launches() as noted:
        out = run_prefill(given, chunks)
    return out, call_again(noted, args, kwargs, out)


def branch_chunks(a: MlaBranchArguments) -> list[Chunk]:
    """The chunks that hold keys."""
    count, batch = len(a.buffer_length), a.lookup_table.shape[0]
    offsets = a.buffer_row_offsets.reshape(count, batch + 1)
    starts = a.cache_offsets.reshape(count, -1)[:, :batch]
    used = [chunk for chunk, length in enumerate(a.buffer_length) if length > 0]
    return [
        Chunk(a.buffer_length[chunk], offsets[chunk], starts[chunk], first=chunk == used[0])
        for chunk in used
    ]


def run_prefill(a: Any, chunks: Sequence[Chunk]) -> torch.Tensor:
    """[T, H, V]; without chunks zeros, and nothing is written."""
    if not chunks or a.q.numel() == 0:
        return a.q.new_zeros((a.q.shape[0], a.q.shape[1], a.v_dim))
    target = device_target(a.q.device) or SM90
    a = _aligned(a)
    if len(chunks) == 1:
        joins = partial(joins_keys, a, chunks[0], target)
        return attend_chunks(a, [(chunks[0], make_keys(a, chunks[0], target, joins))], 1)
    made = ((chunk, make_keys(a, chunk, target)) for chunk in chunks)
    return attend_chunks(a, made, len(chunks))


def _aligned(a: Any) -> Any:
    """The same call with the weight, and latents that are codes, where TMA can start."""
    names = ("kv_b_weight",) if a.latent_scale is None else ("kv_b_weight", "latent")
    away = {name: getattr(a, name) for name in names if getattr(a, name).data_ptr() % 16}
    return replace(a, **{name: t.clone() for name, t in away.items()}) if away else a


def plan_latent_store(a: Any, target: str) -> LoweringReport:
    """What a call will run on a target; `a` may hold meta tensors."""
    call = latent_launch(a, None, None, store=True, gather=False, fused=False)
    spec, _, _ = latent_kernel(call, TARGETS[target])
    return LoweringReport("store", "one kernel norms, rotates and writes the named slots", (spec,))


def on_meta(a: Any) -> Any:
    """The arguments with their metadata alone: nothing is computed, whatever is called."""
    tensors = {name: t for name, t in vars(a).items() if isinstance(t, torch.Tensor)}
    return replace(a, **{name: _without_memory(t) for name, t in tensors.items()})


def _without_memory(t: torch.Tensor) -> torch.Tensor:
    if t.device.type == "meta":
        return t
    size = t.untyped_storage().nbytes() // t.element_size()
    base = torch.empty(size, dtype=t.dtype, device="meta")
    return base.as_strided(t.shape, t.stride(), t.storage_offset())


def plan_mla_prefill(a: Any, target: str) -> LoweringReport:
    """What a call will run on a target; `a` may hold meta tensors."""
    a = on_meta(a)
    return plan_chunk(a, whole(a), TARGETS[target])


def plan_mla_branch(a: Any, target: str) -> LoweringReport:
    """What a call will run on a target, for each chunk; `a` may hold meta tensors."""
    a = on_meta(a)
    chunks = branch_chunks(a)
    if not chunks:
        return LoweringReport("nothing", "no keys, zeros")
    given, chip = as_mla_prefill(a), TARGETS[target]
    if len(chunks) == 1:
        return plan_chunk(given, chunks[0], chip)
    reports = [plan_chunk(given, chunk, chip, several=True) for chunk in chunks]
    types = ("fp32", TRITON_TYPES[a.q.dtype])
    merging = merge_spec(len(chunks), a.v_dim, *types, False, target)
    specs = {spec: None for report in reports for spec in report.specs} | {merging: None}
    reason = f"{len(chunks)} chunks of {reports[0].reason}; merged"
    return LoweringReport(reports[0].name, reason, tuple(specs))


def plan_chunk(a: Any, chunk: Chunk, target: Target, *, several: bool = False) -> LoweringReport:
    """The kernels of one chunk; several: one of more than one, to be merged."""
    if chunk.rows == 0:
        return LoweringReport("nothing", "no keys, zeros")
    buffers = key_buffers(a, chunk)
    specs = [latent_kernel(call, target)[0] for call in latent_launches(a, chunk, buffers)]
    joined = not several and joins_keys(a, chunk, target, buffers)
    limited = last_position(a, chunk) is not None
    problem = up_problem(a, buffers, limited=limited, joined=joined)
    if a.kv_b_weight.dtype == FP8 and problem.weight_type != "fp8e4nv":
        specs.append(numbers_spec(numbers_problem(a), target.name))
    how = "library GEMM"
    if not uses_library(problem, chunk.rows, target):
        config, spec = up_plan(problem, next_power_of_2(chunk.rows), target)
        specs.append(spec)
        how = f"up-projection {config}"
    if joined:
        keys = joined_keys(a, chunk.rows, buffers, "meta")
        assert keys.joined is not None
        specs += joined_specs(*plain_call(a, chunk, keys), keys.joined, target)
        return _report(f"{how}, {NAME}", specs)
    given = arguments(a, chunk, Keys(*empty_keys(a, chunk.rows), buffers.k_rope))
    if several:
        given |= {"out_dtype": torch.float32, "return_lse": True}
    core, reason = attention_plan(**given, target=target)
    return _report(f"{how}, {reason}", (*specs, *core))


def _report(reason: str, specs: Sequence[KernelSpec]) -> LoweringReport:
    names = ", ".join(spec.kernel for spec in specs)
    return LoweringReport("mla prefill", f"{reason}: {names}", tuple(specs))
