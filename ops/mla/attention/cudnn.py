"""cuDNN's attention as a way to compute the attention of MLA ops. cuDNN needs keys whose unrotated
and rotated parts are joined in one tensor.

In some calls, it is known before the keys are computed that cuDNN will read them. Keys and values
are then computed as one joined tensor [keys, H, R + N + V]. The rope columns of a head come first,
and the up-projection writes the other columns in place. One launch rotates the queries, puts their
columns into the same order, and writes the rope keys to all heads. In other cases, a separate
launch joins the parts of the keys.

cuDNN is used only if shapes alone determine the mask. It is not used for ragged sequences. One
reason is that their lengths are on the device. The other reason is that torch's variable-length
form builds a plan at each call, which takes 45 ms on an H200.
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
    """Whether cuDNN computes a call whose queries come in two parts: its result is the same as the
    kernel's, and it is faster."""
    if not target.has("wgmma") or a.ragged or a.k.element_size() == 1 or a.k_rope is None:
        return False
    places = (a.query_starts, a.key_starts, a.key_lengths, a.query_positions)
    if any(tensor is not None for tensor in (*places, a.attn_mask)):
        return False
    if a.mask not in ("none", "causal") or not a.out_dtype == a.k.dtype == a.k_rope.dtype:
        return False
    # Queries whose parts are adjacent in memory need no copy.
    if a.q_rope is None or not follows(a.q_rope, a.q):
        return False
    return library_gains(a.num_heads, a.sizes) and _accepted(a)


def _accepted(a: AttentionCall) -> bool:
    """Whether cuDNN accepts the call. If the tensors are not on a GPU, assumes a recent cuDNN."""
    if a.q.device.type != "cuda":
        return True
    return _supported(a.q.dtype, a.nope, a.rope, a.v.shape[-1], a.q.device.index or 0)


@cache
def _supported(dtype: torch.dtype, nope: int, rope: int, v_dim: int, index: int) -> bool:
    """Whether the installed cuDNN supports these head dimensions. This is tested with tiny tensors
    that have the strides of joined keys."""
    width = rope + nope
    q = torch.empty((1, 128, 1, width), dtype=dtype, device=f"cuda:{index}").transpose(1, 2)
    keys = q.new_empty((1, 128, 1, width + v_dim)).transpose(1, 2)
    k, v = keys[..., :width], keys[..., width:]
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))


def library_steps(a: AttentionCall, target: Target) -> Steps:
    """Performs attention to keys whose parts are not joined yet. The result is out [B, S, H, V]. If
    a.return_lse is set, the result also has the log-sum-exp lse [B, S, H]."""
    batch, num_keys, heads = a.k.shape[:3]
    keys = yield Buffer((batch, num_keys, heads, a.rope + a.nope), a.k.dtype)
    yield join_launch(a, keys, target)
    return (yield from whole_steps(a, a.q, keys))


def join_launch(a: AttentionCall, keys: torch.Tensor, target: Target) -> Launch:
    """Returns the launch of `mla_join`, which fills keys [B, K, H, N + R]."""
    rows, num_keys = keys.shape[:-1].numel(), keys.shape[-3]
    values = {"k": a.k, "rope": a.k_rope, "out": keys, "num_rows": rows, "run": num_keys}
    statics = _join_statics(attention_problem(a))
    return launch(kernels.JOIN, target, kernels.join_grid(rows), values, statics)


def whole_steps(a: AttentionCall, first: torch.Tensor, keys: torch.Tensor) -> Steps:
    """Performs attention to joined keys [B, K, H, N + R]. The two parts of the queries must be
    adjacent in memory, in the same order as in the keys. first: the part that comes first."""
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
    """Returns the attention [B, S, H, V] of q, k and v [B, S, H, ..]. If lse [B, S, H] is given,
    also writes the log-sum-exp to it."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    # is_causal aligns the mask at the top left, which is correct for positions that start at 0.
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, lse is not None, 0.0, causal, False, scale=scale
    )
    if lse is not None:
        lse.copy_(found[1][..., 0].transpose(1, 2))
    # cuDNN's result has the memory layout of q, so contiguous() copies nothing.
    return found[0].transpose(1, 2).contiguous()
