"""Launching what makes keys and values of latents: one kernel of latents, one up-projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.mla import key_specs as kernels
from tilewright.codegen.mla.key_specs import LatentConfig, LatentProblem, UpConfig, UpProblem
from tilewright.codegen.mla.plan import latent_config, up_config, uses_library
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.mla.checks import FP8, widths
from tilewright.ops.mla.keys import row_key_offsets, sequences
from tilewright.ops.mla.operands import (
    Buffers,
    Chunk,
    key_buffers,
    latent_problem,
    latent_values,
    numbers_problem,
    up_problem,
)
from tilewright.ops.runtime.launch import launch
from tilewright.ops.runtime.recording import call_library, noted_scratch

# Keys of a sequence must be so many more than its queries before rows past the last are left out.
SPARE_KEYS = 256


@dataclass(frozen=True)
class Keys:
    """Keys and values that attention reads: [rows, H, N], [rows, H, V], rope columns [rows, R].

    joined: [rows, H, R + N + V], k and v are views of it; attention writes the rope columns to it.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_rope: torch.Tensor
    joined: torch.Tensor | None = None


@dataclass(frozen=True)
class LatentLaunch:
    """One launch of `mla_latents`."""

    problem: LatentProblem
    values: dict[str, Any]


@cache
def _latent_spec(problem: LatentProblem, config: LatentConfig, target: str) -> KernelSpec:
    return kernels.latent_spec(problem, config, target)


@cache
def up_plan(problem: UpProblem, rows: int, target: Target) -> tuple[UpConfig, KernelSpec]:
    config = up_config(problem, rows, target)
    return config, kernels.up_spec(problem, config, target.name)


@cache
def numbers_spec(problem: UpProblem, target: str) -> KernelSpec:
    return kernels.weight_numbers_spec(problem, problem.out_type, target)


def latent_launches(a: Any, chunk: Chunk, buffers: Buffers) -> Iterator[LatentLaunch]:
    """What makes a chunk's keys and, before its first, writes the new tokens; one launch where the
    keys that are new can be told from the others."""
    store = chunk.first and a.slots != "none" and a.latent is not None and a.latent.shape[0] > 0
    makes = bool(buffers.made) and chunk.rows > 0
    if a.keys == "given":
        if store or makes:
            yield latent_launch(a, chunk, buffers, store=store, gather=False, fused=False)
        return
    by_places = a.rope_by_position and a.positions is not None
    fused = store and makes and a.slots == "ragged" and a.keys == "table" and not by_places
    if store and not fused:
        yield latent_launch(a, None, None, store=True, gather=False, fused=False)
    if makes:
        yield latent_launch(a, chunk, buffers, store=fused, gather=True, fused=fused)


def latent_launch(
    a: Any, chunk: Chunk | None, buffers: Buffers | None, *, store: bool, gather: bool, fused: bool
) -> LatentLaunch:
    does = {"store": store, "gather": gather, "fused": fused}
    values = latent_values(a, chunk, buffers, **does)
    return LatentLaunch(latent_problem(a, values, buffers, **does), values)


def latent_kernel(
    call: LatentLaunch, target: Target
) -> tuple[KernelSpec, tuple[int], dict[str, Any]]:
    """The kernel of a launch, its grid and its arguments."""
    tokens, rows = call.values["num_tokens"], call.values["num_rows"]
    config = latent_config(call.problem, next_power_of_2(tokens + rows))
    programs = kernels.row_programs(call.problem, config, rows)
    grid = kernels.latent_grid(call.problem, config, tokens, rows)
    values = call.values | {"row_programs": programs}
    return _latent_spec(call.problem, config, target.name), (grid,), values


def never(buffers: Buffers) -> bool:
    """Keys are not made joined."""
    return False


def make_keys(
    a: Any, chunk: Chunk, target: Target, joins: Callable[[Buffers], bool] = never
) -> Keys:
    """Writes the new tokens (before the first chunk) and makes a chunk's keys and values; joins
    says whether these are joined."""
    device = a.q.device
    buffers = key_buffers(a, chunk)
    for call in latent_launches(a, chunk, buffers):
        launch(*latent_kernel(call, target), device)
    return up_project(a, chunk, buffers, target, joined=joins(buffers))


def up_project(
    a: Any, chunk: Chunk, buffers: Buffers, target: Target, *, joined: bool = False
) -> Keys:
    """Keys and values of a chunk's latents; joined: with room for the rope columns before them."""
    device, rows = a.q.device, chunk.rows
    limit = last_position(a, chunk)
    problem = up_problem(a, buffers, limited=limit is not None, joined=joined)
    if limit is not None and kernels.up_obstacle(problem) is not None:
        limit, problem = None, replace(problem, limited=False)
    weight = _weight_numbers(a, target) if problem.weight_type != "fp8e4nv" else a.kv_b_weight
    keys = joined_keys(a, rows, buffers) if joined else Keys(*empty_keys(a, rows), buffers.k_rope)
    k, v = keys.k, keys.v
    if rows and uses_library(problem, rows, target):
        latent = buffers.latent[:, : problem.rank]
        if keys.joined is None:
            both = k.as_strided((rows, problem.rows), (problem.rows, 1))
            call_library(_mm, latent, weight, both)
        else:
            own = keys.joined[..., buffers.k_rope.shape[1] :]
            call_library(_bmm, *by_head(latent, weight, own))
    elif rows:
        config, spec = up_plan(problem, next_power_of_2(rows), target)
        values = {
            "latent_ptr": buffers.latent,
            "weight_ptr": weight,
            "latent_scale_ptr": buffers.scale,
            "weight_scale_ptr": a.kv_b_scale,
            "k_ptr": k,
            "v_ptr": v,
            "limit_ptr": limit,
            "num_rows": rows,
            "run": max(rows // max(sequences(a), 1), 1),
            "scale_stride": buffers.scale_strides[0],
            "v_head_stride": v.stride(1),
            "v_column_stride": v.stride(2),
        }
        grid = kernels.up_grid(problem, config, rows, target.num_sms)
        launch(spec, grid, values, device)
    return keys


def _mm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def _bmm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.bmm(x, weight, out=out)


def by_head(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [rows, L], weight [H * W, L] and out [rows, H, W] as operands of a product by head. The
    library writes rows of any stride where they lie, so long as their columns are contiguous."""
    heads, width = out.shape[1:]
    weights = weight.unflatten(0, (heads, width)).mT
    return x.expand(heads, *x.shape), weights, out.transpose(0, 1)


def joined_keys(a: Any, rows: int, buffers: Buffers, device: str | None = None) -> Keys:
    """New keys and values as views of one tensor [rows, H, R + N + V]; by default on q's device."""
    nope, rope_dim, v_dim = widths(a)
    shape = (rows, a.q.shape[1], rope_dim + nope + v_dim)
    joined = torch.empty(shape, dtype=a.q.dtype, device=device or a.q.device)
    if device is None:
        noted_scratch(joined)
    _, k, v = joined.split((rope_dim, nope, v_dim), dim=-1)
    return Keys(k, v, buffers.k_rope, joined)


def empty_keys(a: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k [rows, H, N] and v [rows, H, V]: views of one buffer, of values; for the 8-bit core k is
    contiguous and v has its keys side by side, padded to 16."""
    nope, _, v_dim = widths(a)
    heads = a.q.shape[1]
    if a.attention_dtype != FP8:
        kv = noted_scratch(a.q.new_empty((rows, heads, nope + v_dim)))
        return kv[..., :nope], kv[..., nope:]
    k = noted_scratch(a.q.new_empty((rows, heads, nope), dtype=FP8))
    # Keys past the last are multiplied by zero weights: the kernel makes them zeros.
    v = noted_scratch(a.q.new_empty((heads, v_dim, -(-max(rows, 1) // 16) * 16), dtype=FP8))
    return k, v.permute(2, 0, 1)[:rows]


def last_position(a: Any, chunk: Chunk) -> torch.Tensor | None:
    """The last position that a query has, where keys past it can be left out; int64 [1]."""
    batch, num_tokens = sequences(a), a.q.shape[0]
    if a.positions is None or a.mask == "none" or row_key_offsets(a) is not None or not batch:
        return None
    run = chunk.rows // batch
    if run % 128 or run < num_tokens // batch + SPARE_KEYS:
        return None
    positions = a.positions.to(torch.int64)
    if positions.shape[0] == 1:
        return positions
    last = noted_scratch(positions.new_empty(1))
    call_library(_greatest, positions, last)
    return last


def _greatest(numbers: torch.Tensor, out: torch.Tensor) -> None:
    torch.amax(numbers, 0, keepdim=True, out=out)


def _weight_numbers(a: Any, target: Target) -> torch.Tensor:
    """kv_b_weight in q's dtype, [rows, L]."""
    if a.kv_b_weight.dtype != FP8:
        return a.kv_b_weight
    problem = numbers_problem(a)
    out = noted_scratch(a.q.new_empty(a.kv_b_weight.shape))
    values = {"weight_ptr": a.kv_b_weight, "weight_scale_ptr": a.kv_b_scale, "out_ptr": out}
    spec = numbers_spec(problem, target.name)
    launch(spec, kernels.weight_numbers_grid(problem), values, a.q.device)
    return out
