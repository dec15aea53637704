"""Kernels of MLA's attention core that every compiler release is tried on: published dims, values
and 8 bits, dense and ragged sequences, each mask; and what goes before and after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.mla import attention_specs as kernels
from tilewright.codegen.mla import join_specs as mla_join_kernels
from tilewright.codegen.mla.attention_plan import attention_config, rotates_queries
from tilewright.codegen.targets import Target
from tilewright.ops.mla.attention_operands import AttentionCall, QueryRope, attention_problem
from tilewright.ops.mla.query_lowering import query_specs
from tilewright.tools.audit.cases import SPECIALISED_STACK_BYTES, AuditCase

FP8 = torch.float8_e4m3fn
# Scores start at zero for each block of keys and are read at once, and the output is rescaled.
SOFTMAX_REASON = "the softmax reads each block's scores and rescales the output"


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _integers(*shape: int) -> torch.Tensor:
    return _meta(*shape, dtype=torch.int32)


def attention_call(
    heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int, int] = (128, 64, 128),
    ragged: bool = True,
    rows: int = 4096,
    **options: Any,
) -> AttentionCall:
    """Keys and values as the up-projection leaves them, of `rows` queries and keys."""
    nope, rope, v_dim = dims
    q = _meta(1, rows, heads, nope + rope, dtype=dtype)
    kv = _meta(1, rows, heads, nope + v_dim, dtype=dtype)
    k, v, k_rope = kv[..., :nope], kv[..., nope:], _meta(1, rows, rope, dtype=dtype)
    if dtype == FP8:
        k = _meta(1, rows, heads, nope, dtype=dtype)
        v = _meta(1, heads, v_dim, rows, dtype=dtype).permute(0, 3, 1, 2)
    parts: dict[str, Any] = {
        "q": q[..., :nope],
        "q_rope": q[..., nope:],
        "k": k,
        "v": v,
        "k_rope": k_rope,
    }
    if ragged:
        parts = {name: part[0] for name, part in parts.items()}
        options = {"query_offsets": _integers(9), "key_offsets": _integers(9), **options}
        options.setdefault("query_starts", _integers(8))
    given: dict[str, Any] = {"scale": 0.1, "out_dtype": torch.bfloat16, **options}
    return AttentionCall(**parts, **given)


TABLE = _meta(163840, 64, dtype=torch.float32)
ROPE = QueryRope(TABLE[:, ::2], TABLE[:, 1::2], "interleaved", by_position=True)
CALLS: dict[str, AttentionCall] = {
    "128 heads": attention_call(128),
    "16 heads, dense": attention_call(16, ragged=False),
    "128 heads, e4m3": attention_call(128, dtype=FP8),
    "16 heads, e4m3, partial": attention_call(16, dtype=FP8, return_lse=True),
    "128 heads, no mask, partial": attention_call(128, mask="none", return_lse=True),
    "128 heads, window": attention_call(128, mask="sliding_window", window=4096),
    "128 heads, e4m3, chunks": attention_call(128, dtype=FP8, mask="chunked", window=8192),
    "16 heads, positions": attention_call(16, ragged=False, query_positions=_integers(4096)),
    "16 heads, mask tensor": attention_call(
        16, ragged=False, mask="none", attn_mask=_meta(1, 1, 4096, 4096)
    ),
    "64 heads, wide": attention_call(64, dims=(192, 64, 256)),
    "16 heads, pages": attention_call(16, block_table=_integers(8, 512)),
    "128 heads, rotated": attention_call(128, turn=ROPE),
}


def mla_attention_cases(target: Target) -> list[AuditCase]:
    """The core at each call, and the kernels before and after it."""
    return [*_cores(target), *_others(target)]


def _cores(target: Target) -> Iterator[AuditCase]:
    for name, call in CALLS.items():
        if call.block_table is not None:
            pool = _meta(1024, 64, 576)[..., 512:]
            call = AttentionCall(**{**vars(call), "k_rope": pool})
        problem = attention_problem(call)
        config = attention_config(problem, call.sizes, target)
        if call.turn is not None and not rotates_queries(problem, config):
            continue
        claims = Expectations(
            mma=problem.dtype,
            tma_loads=config.tma,
            warp_specialized=config.warp_specialize,
            stack_bytes=SPECIALISED_STACK_BYTES if config.warp_specialize else 0,
            fresh_sums_reason=SOFTMAX_REASON,
        )
        spec = kernels.attention_spec(problem, config, target.name)
        yield AuditCase(f"mla attention, {name}: {config}", spec, claims)


def _others(target: Target) -> Iterator[AuditCase]:
    dense = attention_problem(CALLS["16 heads, dense"])
    join = mla_join_kernels.join_spec(dense, target.name)
    yield AuditCase("mla join", join, Expectations())
    merge = kernels.merge_spec(4, 128, "fp32", "bf16", False, target.name)
    yield AuditCase("mla merge", merge, Expectations())
    for name, dtype in (("rotated", torch.bfloat16), ("cast", FP8)):
        call = attention_call(128, dtype=dtype)
        whole = AttentionCall(**{**vars(call), "q": _meta(4096, 128, 192), "q_rope": None})
        (spec,) = query_specs(whole, ROPE, target)
        yield AuditCase(f"mla query, {name}", spec, Expectations())
    joined = _meta(4096, 128, 64 + 128 + 128)
    parts = {"q": _meta(1, 4096, 128, 192), "k_rope": _meta(1, 4096, 64), "q_rope": None}
    whole = AttentionCall(**{**vars(attention_call(128, ragged=False)), **parts})
    (spec,) = query_specs(whole, ROPE, target, whole=True, joined=joined)
    yield AuditCase("mla query, with joined keys", spec, Expectations())
