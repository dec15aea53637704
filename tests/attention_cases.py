"""Calls of the MLA attention core, and their exact results in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewright.codegen.attention.blocks import LIST_STRIDES
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.mla.attention_kernels import (
    ATTENTION,
    AttentionProblem,
    attention_statics,
)
from tilewright.codegen.mla.query_kernels import NO_ROTATION
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec
from tilewright.ops.mla.attention.lowering import attention_steps
from tilewright.ops.mla.attention.operands import AttentionCall
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import drive

FP8 = torch.float8_e4m3fn


def attention_spec(problem: AttentionProblem, config: PrefillConfig, key_stride: int) -> KernelSpec:
    """Returns the kernel of a problem on SM90. All tensors are aligned, and only the stride between
    keys is a multiple of 16. `key_stride` is the stride from one key to the next."""
    rows, index = Operand(problem.dtype), Operand("i32") if problem.ragged else None
    operands: dict[str, Operand | None] = dict.fromkeys(p.tensor for p in ATTENTION.pointers)
    operands |= {"q": rows, "q_rope": rows, "k": Operand(problem.dtype, (key_stride,)), "v": rows}
    operands |= {"rope": Operand(problem.dtype, (problem.rope,)), "out": Operand(problem.out)}
    operands |= {"query_offsets": index, "key_offsets": index}
    operands["lse"] = Operand("fp32", aligned=False) if problem.has_lse else None
    statics, no_list = attention_statics(problem, config), dict.fromkeys(LIST_STRIDES, 0)
    return ATTENTION.spec("sm90", operands, no_list, (statics, NO_ROTATION))


@dataclass(frozen=True)
class Case:
    """A call of the core.

    queries, keys: the number of queries and of keys of each sequence.
    dense: whether the call has no offsets; all sequences then have equal numbers.
    """

    name: str
    queries: tuple[int, ...] = (37,)
    keys: tuple[int, ...] = (37,)
    heads: int = 2
    nope: int = 32
    rope: int = 16
    v_dim: int = 32
    dtype: torch.dtype = torch.float16
    dense: bool = False
    v_by_key: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def prefix(case: Case) -> dict[str, Any]:
    """Returns options that place the queries at the last keys of their sequence."""
    starts = [k - q for q, k in zip(case.queries, case.keys, strict=True)]
    return {"query_starts": torch.tensor(starts, dtype=torch.int32)}


def call_of(case: Case, seed: int = 0, device: str = "cpu") -> AttentionCall:
    """Returns a call with random operands. They are views with the layouts that callers use."""
    torch.manual_seed(seed)
    total_q, total_k = sum(case.queries), sum(case.keys)
    wide = torch.float32 if case.dtype == FP8 else case.dtype
    q = torch.randn(total_q, case.heads, case.nope + case.rope, dtype=wide).to(device, case.dtype)
    kv = torch.randn(total_k, case.heads, case.nope + case.v_dim, dtype=wide).to(device, case.dtype)
    # The rope keys are columns of a cache entry.
    entry = torch.randn(total_k, 16 + case.rope, dtype=wide).to(device, case.dtype)
    k, v, k_rope = kv[..., : case.nope], kv[..., case.nope :], entry[:, 16:]
    if case.v_by_key:
        padded = torch.zeros(case.heads, case.v_dim, -(-total_k // 16) * 16, dtype=case.dtype)
        padded = padded.to(device)
        padded[..., :total_k] = v.permute(1, 2, 0)
        v = padded.permute(2, 0, 1)[:total_k]
    q_rope = q[..., case.nope :] if case.rope else None
    k_rope = k_rope if case.rope else None
    given: dict[str, Any] = {"scale": 0.3, "return_lse": True, "out_dtype": wide, **case.options}
    if case.dense:
        batch = len(case.queries)
        q, k, v = (t.unflatten(0, (batch, -1)) for t in (q, k, v))
        q_rope, k_rope = (
            None if t is None else t.unflatten(0, (batch, -1)) for t in (q_rope, k_rope)
        )
    else:
        given["query_offsets"] = offsets(case.queries)
        given["key_offsets"] = offsets(case.keys).long()
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    return AttentionCall(q[..., : case.nope], q_rope, k, v, k_rope, **given)


def performed(steps, machine):
    """Returns the outcome of steps on a machine."""
    return drive(steps, machine).outcome


def attend(a: AttentionCall, machine: Any = None) -> tuple[torch.Tensor, ...]:
    """Returns (out,) or (out, lse) of a call, computed on its GPU or on the given machine."""
    machine = machine or machine_of(a.q.device)
    return performed(attention_steps(a, machine.target), machine).result


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def with_options(case: Case, **options: Any) -> Case:
    return replace(case, options={**case.options, **options})


def exact(a: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes (out, lse) in float64, one sequence at a time. Tokens that belong to no sequence get
    NaN."""
    q, k, v = (t.flatten(0, -3).double() for t in (a.q, a.k, a.v))
    rows = a.q.shape[-3] if not a.ragged else 0
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:-1], math.nan, dtype=torch.float64, device=q.device)
    for b in range(a.num_sequences):
        if a.ragged:
            mine, keys = (slice(*map(int, o[b : b + 2])) for o in (a.query_offsets, a.key_offsets))
        else:
            mine = slice(b * rows, (b + 1) * rows)
            keys = slice(b * a.k.shape[1], (b + 1) * a.k.shape[1])
        scores = torch.einsum("qhd,khd->hqk", q[mine], k[keys])
        start = 0 if a.key_starts is None else int(a.key_starts[b])
        key_at = start + torch.arange(scores.shape[2], device=q.device)
        if a.q_rope is not None:
            q_rope = a.q_rope.flatten(0, -3).double()[mine]
            k_rope = a.k_rope.flatten(0, -2).double()[keys]
            scores += torch.einsum("qhd,kd->hqk", q_rope, k_rope)
        scores *= a.scale
        for scale in (a.q_scale, a.k_scale):
            scores *= 1.0 if scale is None else float(scale)
        if a.query_positions is not None:
            places = a.query_positions if a.query_positions.dim() == 1 else a.query_positions[b]
            places = places[mine] if a.ragged else places
        else:
            first = 0 if a.query_starts is None else int(a.query_starts[b])
            places = first + torch.arange(scores.shape[1], device=q.device)
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        p, j = places[:, None], key_at[None, :]
        if a.mask != "none":
            seen &= j <= p
        if a.mask == "sliding_window":
            seen &= j > p - a.window
        if a.mask == "chunked":
            seen &= j // a.window == p // a.window
        if a.key_lengths is not None:
            seen &= j < a.key_lengths[b]
        scores.masked_fill_(~seen, -math.inf)
        if a.attn_mask is not None:
            given = a.attn_mask.expand(a.num_sequences, a.k.shape[-2], *scores.shape[1:])[b]
            if given.dtype == torch.bool:
                scores.masked_fill_(~given, -math.inf)
            else:
                scores += given
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.where(blind, 0.0, scores.softmax(-1)) if scores.shape[2] else scores
        scale = 1.0 if a.v_scale is None else float(a.v_scale)
        out[mine] = torch.einsum("hqk,khd->qhd", weights, v[keys]) * scale
        lse[mine] = scores.logsumexp(-1).T
    return out.view(*a.q.shape[:-1], -1), lse.view(a.q.shape[:-1])
