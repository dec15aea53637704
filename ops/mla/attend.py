"""How the MLA ops call the attention core, on the keys of one chunk or of several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tilewright.codegen.mla.key_specs import up_obstacle
from tilewright.codegen.mla.plan import uses_library
from tilewright.codegen.targets import Target
from tilewright.ops.mla.attention_lowering import AttentionCall, QueryRope, attend, merge
from tilewright.ops.mla.attention_operands import TMA_BYTES
from tilewright.ops.mla.checks import FP8, widths
from tilewright.ops.mla.cudnn import joined_attention, library_wanted_rotated
from tilewright.ops.mla.key_lowering import Keys, joined_keys
from tilewright.ops.mla.keys import sequences
from tilewright.ops.mla.operands import Buffers, Chunk, up_problem


def attend_chunks(a: Any, made: Iterable[tuple[Chunk, Keys]], count: int) -> torch.Tensor:
    """softmax(scale * q @ k^T, masked) @ v over the keys of all chunks, [T, H, V].

    Several chunks: each gives a partial result in fp32 with its log-sum-exp; they merge exactly.
    """
    if count == 1:
        ((chunk, keys),) = made
        if chunk.rows == 0:
            return a.q.new_zeros((a.q.shape[0], a.q.shape[1], a.v_dim))
        out = _attended(a, chunk, keys)
        return out if out.dim() == 3 else out.flatten(0, 1)
    parts = [
        attend(**arguments(a, chunk, keys), out_dtype=torch.float32, return_lse=True)
        for chunk, keys in made
    ]
    outs = torch.stack([out for out, _ in parts])
    return merge(outs, torch.stack([lse for _, lse in parts if lse is not None]), a.q.dtype)[0]


def _attended(a: Any, chunk: Chunk, keys: Keys) -> torch.Tensor:
    if keys.joined is None:
        return attend(**arguments(a, chunk, keys))[0]
    plain, rope = plain_call(a, chunk, keys)
    joined = keys.joined.unflatten(0, (plain.q.shape[0], -1))
    return joined_attention(plain, rope, joined)


def plain_call(a: Any, chunk: Chunk, keys: Keys) -> tuple[AttentionCall, Any]:
    """A chunk's call with q as it is given, and what rotates q."""
    given = arguments(a, chunk, keys)
    parts = (given.pop("q"), None, *(given.pop(name) for name in ("k", "v", "k_rope")))
    rope = given.pop("q_rope")
    return AttentionCall(*parts, **given | {"out_dtype": a.q.dtype}), rope


def joins_keys(a: Any, chunk: Chunk, target: Target, buffers: Buffers) -> bool:
    """Whether a call's keys are made joined: where all of them go to the library's attention at
    once, with as many queries, which are rotated first."""
    if chunk.rows != a.q.shape[0] or a.attention_dtype == FP8 or a.positions is not None:
        return False
    if any(width * a.q.element_size() % TMA_BYTES for width in widths(a)):
        return False
    problem = up_problem(a, buffers, joined=True)
    if not uses_library(problem, chunk.rows, target) and up_obstacle(problem) is not None:
        return False
    keys = joined_keys(a, chunk.rows, buffers, "meta")
    return library_wanted_rotated(*plain_call(a, chunk, keys), target)


def arguments(a: Any, chunk: Chunk, keys: Keys) -> dict[str, Any]:
    """The arguments of `attend` for one chunk: dense where all sequences are equal runs."""
    batch = sequences(a)
    given: dict[str, Any] = {
        "q": a.q,
        "k": keys.k,
        "v": keys.v,
        "k_rope": keys.k_rope,
        "scale": a.scale,
        "query_starts": a.cache_lengths,
        "key_starts": chunk.starts,
        "key_lengths": a.key_lengths,
        "query_positions": a.positions,
        "mask": a.mask,
        "window": a.window,
        "attn_mask": a.attn_mask,
        "q_rope": _query_rope(a),
    }
    if a.attention_dtype == FP8:
        for name in ("q_scale", "k_scale", "v_scale"):
            given[name] = _device_scalar(getattr(a, name), a.q.device)
    if _one_run(a, chunk):
        given |= {"query_starts": None, "key_starts": None}
        for name in ("q", "k", "v", "k_rope"):
            given[name] = given[name].unsqueeze(0)
        return given
    if a.row_offsets is None and chunk.offsets is None:
        for name in ("q", "k", "v", "k_rope"):
            given[name] = given[name].unflatten(0, (batch, -1))
        return given
    if a.positions is not None and a.positions.shape[0] != a.q.shape[0]:
        given["query_positions"] = a.positions.repeat(batch)
    given["query_offsets"] = _offsets(a.row_offsets, batch, a.q)
    given["key_offsets"] = _offsets(chunk.offsets, batch, keys.k)
    return given


def _one_run(a: Any, chunk: Chunk) -> bool:
    """Whether a call is one sequence whose keys are its new tokens: as many keys as tokens, all of
    which are among them. Then shapes say all that is on the device."""
    if a.row_offsets is None or a.row_offsets.shape[0] != 2 or a.attention_dtype == FP8:
        return False
    written = a.slots == "ragged" and a.keys == "table" and a.positions is None
    return written and a.key_lengths is None and chunk.rows == a.q.shape[0]


def _offsets(given: torch.Tensor | None, batch: int, rows: torch.Tensor) -> torch.Tensor:
    if given is not None:
        return given
    run = rows.shape[0] // batch
    return torch.arange(0, batch * run + 1, run, dtype=torch.int32, device=rows.device)


def _query_rope(a: Any) -> QueryRope | None:
    if a.rope_style == "none" or "q" not in a.rope_on:
        return None
    return QueryRope(a.cos, a.sin, a.rope_style, a.rope_by_position)


def _device_scalar(value: float, device: torch.device) -> torch.Tensor | None:
    """None for 1: the core then multiplies by nothing."""
    if value == 1.0:
        return None
    return torch.full((), value, dtype=torch.float32, device=device)
