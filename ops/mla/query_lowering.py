"""Queries as the attention core wants them: rotated, or cast to 8 bits, in one launch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tilewright.codegen.mla import query_specs as kernels
from tilewright.codegen.mla.query_specs import NO_ROTATION, POINTERS, Q_STRIDES, QueryProblem
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, Target
from tilewright.ops.mla.attention_operands import TMA_BYTES, AttentionCall, QueryRope, address
from tilewright.ops.runtime.device import device_target
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.launch import launch
from tilewright.ops.runtime.recording import noted_scratch


@cache
def _spec(problem: QueryProblem, target: str) -> KernelSpec:
    return kernels.query_spec(problem, target)


def finished_queries(
    a: AttentionCall,
    rope: QueryRope | torch.Tensor | None,
    *,
    whole: bool = False,
    joined: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q's own columns, its rotated ones): views of a.q where nothing is to be done to them.

    a.q has all columns. A rope part that is a tensor was rotated already. whole: both are views of
    one new tensor, side by side. joined [.., H, R + ..], contiguous, as many keys as tokens: then
    the rotated ones come first, and the rope keys are written to its first columns.
    """
    values, problem = _launch_parts(a, rope, whole, joined)
    rows = values["num_rows"]
    out = noted_scratch(a.q.new_empty((*a.q.shape[:-1], problem.out_width), dtype=_out_dtype(a)))
    if rows and a.q.device.type != "meta":
        target = device_target(a.q.device) or SM90
        spec, grid = _spec(problem, target.name), kernels.query_grid(problem, rows)
        launch(spec, grid, values | {"out_ptr": out}, a.q.device)
    if joined is not None:
        return out[..., a.rope :], out[..., : a.rope]
    if problem.whole:
        return out[..., : a.nope], out[..., a.nope :]
    return a.q[..., : a.nope], out


def query_specs(
    a: AttentionCall,
    rope: QueryRope | torch.Tensor | None,
    target: Target,
    *,
    whole: bool = False,
    joined: torch.Tensor | None = None,
) -> tuple[KernelSpec, ...]:
    """What `finished_queries` launches."""
    return (_spec(_launch_parts(a, rope, whole, joined)[1], target.name),)


def _out_dtype(a: AttentionCall) -> torch.dtype:
    return a.k.dtype


def _launch_parts(
    a: AttentionCall,
    rope: QueryRope | torch.Tensor | None,
    whole: bool,
    joined: torch.Tensor | None,
) -> tuple[dict[str, Any], QueryProblem]:
    """The arguments of a launch, all but its output, and its problem."""
    q = a.q
    if isinstance(rope, torch.Tensor):
        q = torch.cat((q[..., : a.nope], rope), dim=-1)
    turns = rope if isinstance(rope, QueryRope) else None
    tokens = q.shape[:-2].numel()
    run = tokens if a.ragged else q.shape[-3]
    if a.query_positions is not None and a.query_positions.dim() == 2:
        # A position for each token: they are counted in one run.
        q, run = q.reshape(1, tokens, *q.shape[-2:]), tokens
    values: dict[str, Any] = {
        "q_ptr": q,
        "cos_ptr": None if turns is None else turns.cos,
        "sin_ptr": None if turns is None else turns.sin,
        "row_offsets_ptr": a.query_offsets,
        "starts_ptr": a.query_starts,
        "positions_ptr": a.query_positions,
        "scale_ptr": a.q_scale if q.dtype != a.k.dtype else None,
        "k_rope_ptr": None if joined is None else a.k_rope,
        "joined_ptr": joined,
        "num_rows": tokens * q.shape[-2],
        "token_run": max(run, 1),
        "rope_rows": 1 if turns is None else turns.rows,
        "num_sequences": a.num_sequences,
        "q_sequence_stride": 0 if a.ragged else q.stride(0),
        "q_token_stride": q.stride(-3),
        "q_head_stride": q.stride(-2),
    }
    return values, _problem(a, turns, values, whole)


def _problem(
    a: AttentionCall, turns: QueryRope | None, values: dict[str, Any], whole: bool
) -> QueryProblem:
    by_position = turns is not None and turns.by_position
    if not by_position:
        values |= dict.fromkeys(("row_offsets_ptr", "starts_ptr", "positions_ptr"))
    if values["positions_ptr"] is not None:
        values["positions_ptr"] = values["positions_ptr"].reshape(-1)
    tensors = {name: values.get(name) for name in POINTERS}
    types = {n: None if t is None else TRITON_TYPES[t.dtype] for n, t in tensors.items()}
    types["out_ptr"] = TRITON_TYPES[_out_dtype(a)]
    aligned = [n for n, t in tensors.items() if t is not None and address(t) % TMA_BYTES == 0]
    aligned += [name for name in Q_STRIDES if values[name] % 16 == 0]
    batch = (values["row_offsets_ptr"], values["starts_ptr"], values["positions_ptr"])
    strides = [0 if tensor is None else tensor.stride(0) for tensor in batch]
    k_rope, joined = values["k_rope_ptr"], values["joined_ptr"]
    return QueryProblem(
        types=tuple(types.items()),
        num_heads=a.num_heads,
        nope=a.nope,
        rope_dim=a.rope,
        rotation=NO_ROTATION if turns is None else turns.of(a.rope),
        batch_strides=(strides[0], strides[1], strides[2]),
        search_steps=max(a.num_sequences, 1).bit_length(),
        whole=whole or values["q_ptr"].dtype != a.k.dtype,
        key_strides=(0, 0) if joined is None else (k_rope.stride(-2), joined.stride(-2)),
        aligned=(*aligned, "out_ptr"),
    )
