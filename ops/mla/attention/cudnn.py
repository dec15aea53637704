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

import torch

from tilewright.codegen.mla import attention_kernels as kernels
from tilewright.codegen.mla.attention_plan import library_gains
from tilewright.codegen.targets import Target
from tilewright.ops.mla.attention.operands import AttentionCall, attention_problem
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.operands import follows
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, Steps

NAME = "cuDNN attention over joined keys"

_join_statics = cache(kernels.join_statics)


def library_wanted(a: AttentionCall, target: Target) -> bool:
    """Whether a call, its queries in parts, goes to the library: it computes the same there, and
    gains by it."""
    if not target.has("wgmma") or a.ragged or a.k.element_size() == 1 or a.k_rope is None:
        return False
    places = (a.query_starts, a.key_starts, a.key_lengths, a.query_positions)
    if any(tensor is not None for tensor in (*places, a.attn_mask)):
        return False
    if a.mask not in ("none", "causal") or not a.out_dtype == a.k.dtype == a.k_rope.dtype:
        return False
    # Queries whose parts lie side by side need not be copied.
    if a.q_rope is None or not follows(a.q_rope, a.q):
        return False
    return library_gains(a.num_heads, a.sizes) and _accepted(a)


def _accepted(a: AttentionCall) -> bool:
    """Of a call on a GPU; what is said elsewhere is said of one that has a recent cuDNN."""
    if a.q.device.type != "cuda":
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


def library_steps(a: AttentionCall, target: Target) -> Steps:
    """Attention to keys that are not joined yet: (out [B, S, H, V], and lse [B, S, H] if it is
    asked for)."""
    batch, num_keys, heads = a.k.shape[:3]
    keys = yield Buffer((batch, num_keys, heads, a.rope + a.nope), a.k.dtype)
    yield join_launch(a, keys, target)
    return (yield from whole_steps(a, a.q, keys))


def join_launch(a: AttentionCall, keys: torch.Tensor, target: Target) -> Launch:
    """The launch of `mla_join`, which fills keys [B, K, H, N + R]."""
    rows, num_keys = keys.shape[:-1].numel(), keys.shape[-3]
    values = {"k": a.k, "rope": a.k_rope, "out": keys, "num_rows": rows, "run": num_keys}
    statics = _join_statics(attention_problem(a))
    return launch(kernels.JOIN, target, kernels.join_grid(rows), values, statics)


def whole_steps(a: AttentionCall, first: torch.Tensor, keys: torch.Tensor) -> Steps:
    """Attention to keys [B, K, H, N + R] of queries whose two parts lie side by side in the same
    order, `first` before the other."""
    q = first.as_strided((*first.shape[:-1], a.rope + a.nope), first.stride())
    given: tuple[torch.Tensor, ...] = (q, keys, a.v)
    if a.return_lse:
        given += ((yield Buffer(a.q.shape[:-1], torch.float32)),)
    function = partial(_cudnn, causal=a.mask == "causal", scale=a.scale)
    made = Buffer((*a.q.shape[:-1], a.v.shape[-1]), a.out_dtype)
    out = yield Library(function, given, makes=made)
    return Outcome((out, *given[3:]), "mla attention", NAME)


def _cudnn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """out [B, S, H, V] of q, k and v [B, S, H, ..]; lse [B, S, H] is filled."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    # causal goes from the top left, as positions that start at 0 do.
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, lse is not None, 0.0, causal, False, scale=scale
    )
    if lse is not None:
        lse.copy_(found[1][..., 0].transpose(1, 2))
    # The library lays its result out as q: nothing is copied.
    return found[0].transpose(1, 2).contiguous()
