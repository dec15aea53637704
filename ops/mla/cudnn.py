"""cuDNN's attention as one way to compute the MLA core, over keys whose two parts are joined.

Keys are made joined where it is known before that the library takes them: [keys, H, R + N + V], a
head's rope columns first, so that the up-projection leaves the rest where it belongs. Queries are
rotated to the same order, and the launch that does it writes the rope keys to all heads. Keys that
were made otherwise are joined in a launch of their own.

The library is given what its masks can say from shapes alone. Ragged sequences are not: their
lengths are on the device (and torch's variable-length form builds a plan at each call, 45 ms on an
H200).
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from tilewright.codegen.mla import join_specs as kernels
from tilewright.codegen.mla.attention_plan import library_gains
from tilewright.codegen.mla.attention_specs import AttentionProblem
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.mla.attention_operands import (
    AttentionCall,
    QueryRope,
    attention_problem,
    check_call,
    query_views,
)
from tilewright.ops.mla.query_lowering import finished_queries, query_specs
from tilewright.ops.runtime.launch import launch
from tilewright.ops.runtime.recording import made_by_library, noted_scratch

NAME = "cuDNN attention over joined keys"


def library_wanted(a: AttentionCall, problem: AttentionProblem, target: Target) -> bool:
    """Whether a call goes to the library: it computes the same there, and gains by it."""
    if not target.has("wgmma") or a.ragged or problem.is_fp8 or problem.rope == 0:
        return False
    places = (a.query_starts, a.key_starts, a.key_lengths, a.query_positions, a.block_table)
    if any(tensor is not None for tensor in (*places, a.attn_mask)):
        return False
    if (
        a.mask not in ("none", "causal")
        or a.out_dtype != a.k.dtype
        or problem.rope_dtype != problem.dtype
    ):
        return False
    if a.k_rope is None or a.k_rope.dim() != 3 or not _whole(a):
        return False
    return library_gains(problem, a.sizes) and _accepted(a)


def library_wanted_rotated(plain: AttentionCall, rope: Any, target: Target) -> bool:
    """The same where q [.., N + R] is rotated first, and so is written whole."""
    if not isinstance(rope, QueryRope) or plain.q.dtype != plain.k.dtype:
        return False
    views = query_views(plain, rope)
    return library_wanted(views, attention_problem(views), target)


def _whole(a: AttentionCall) -> bool:
    """Whether q's two parts lie side by side, so that nothing has to be copied."""
    q, rope = a.q, a.q_rope
    assert rope is not None
    together = q.stride() == rope.stride() and q.dtype == rope.dtype
    after = rope.storage_offset() - q.storage_offset() == q.shape[-1]
    same = rope.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    return together and after and (same or q.device.type == "meta")


def _accepted(a: AttentionCall) -> bool:
    if a.q.device.type == "meta":
        return True
    return _supported(a.q.dtype, a.nope, a.rope, a.v.shape[-1], a.q.device.index or 0)


@cache
def _supported(dtype: torch.dtype, nope: int, rope: int, v_dim: int, index: int) -> bool:
    """Whether this torch's cuDNN takes such head dims, asked of it with tiny tensors that lie as
    joined keys do."""
    width = rope + nope
    q = torch.empty((1, 128, 1, width), dtype=dtype, device=f"cuda:{index}").transpose(1, 2)
    keys = q.new_empty((1, 128, 1, width + v_dim)).transpose(1, 2)
    k, v = keys[..., :width], keys[..., width:]
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))


@cache
def join_spec(problem: AttentionProblem, target: str) -> KernelSpec:
    return kernels.join_spec(problem, target)


def joined_attention(plain: AttentionCall, rope: QueryRope, joined: torch.Tensor) -> torch.Tensor:
    """out [B, S, H, V] of q [B, S, H, N + R], rotated on the way, and joined keys
    [B, S, H, R + N + V] whose views the call's k and v are; its rope columns are written first."""
    check_call(plain)
    width = plain.rope + plain.nope
    _, turned = finished_queries(plain, rope, whole=True, joined=joined)
    q = turned.as_strided((*turned.shape[:-1], width), turned.stride())
    return _library_output(plain, q, joined[..., :width])


def joined_specs(
    plain: AttentionCall, rope: QueryRope, joined: torch.Tensor, target: Target
) -> tuple[KernelSpec, ...]:
    """What `joined_attention` launches of ours."""
    check_call(plain)
    return query_specs(plain, rope, target, whole=True, joined=joined)


def run_library(
    a: AttentionCall, problem: AttentionProblem, target: Target
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out [B, S, H, V], lse [B, S, H] or None) of keys that are not joined yet."""
    batch, num_keys, heads = a.k.shape[:3]
    assert a.k_rope is not None
    width = a.nope + a.rope
    keys = noted_scratch(a.k.new_empty((batch, num_keys, heads, width)))
    rows = batch * num_keys * heads
    values = {
        "k_ptr": a.k,
        "rope_ptr": a.k_rope,
        "out_ptr": keys,
        "num_rows": rows,
        "run": num_keys,
        "k_sequence_stride": a.k.stride(0),
        "k_head_stride": a.k.stride(2),
        "rope_sequence_stride": a.k_rope.stride(0),
    }
    launch(join_spec(problem, target.name), kernels.join_grid(rows), values, a.k.device)
    q = a.q.as_strided((*a.q.shape[:-1], width), a.q.stride())
    if a.return_lse:
        out, lse = _cudnn(q, keys, a.v, True, a.mask == "causal", a.scale)
        return out, lse[..., 0].transpose(1, 2).contiguous()
    return _library_output(a, q, keys), None


def _library_output(a: AttentionCall, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    function = partial(_cudnn_output, causal=a.mask == "causal", scale=a.scale)
    return made_by_library(function, q, keys, a.v)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: bool, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, V], the library's log-sum-exp) of q, k and v [B, S, H, ..]."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    # causal goes from the top left, as positions that start at 0 do.
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, lse, 0.0, causal, False, scale=scale
    )
    # The library lays its result out as q: nothing is copied.
    return found[0].transpose(1, 2).contiguous(), found[1]


def _cudnn_output(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    return _cudnn(q, k, v, False, causal, scale)[0]
