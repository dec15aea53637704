"""The steps of `mla_decode`: attention to latents between two products of each head."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from tilewright.codegen.targets import Target
from tilewright.ops.attention.arguments import as_attention
from tilewright.ops.attention.lowering import attention_steps
from tilewright.ops.attention.operands import RopePart
from tilewright.ops.mla.key_lowering import dequantized
from tilewright.ops.mla.keys import FP8, widths
from tilewright.ops.runtime.program import Buffer, Library, Outcome, Step, Steps

NAME = "absorbed attention"


def decode_steps(a: Any, target: Target) -> Steps:
    """The steps of a call."""
    nope = widths(a)[0]
    return (yield from absorbed_steps(a, a.q[..., :nope], a.q[..., nope:], target))


def absorbed_steps(a: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, target: Target) -> Steps:
    """The steps of a call whose queries come in two parts, [T, H, N] and [T, H, R]; a.q is not
    looked at but for its dtype and shape."""
    nope, _, v_dim = widths(a)
    tokens, heads = a.q.shape[:2]
    if a.q.numel() == 0:
        out = yield Buffer((tokens, heads, v_dim), a.q.dtype)
        return Outcome(out, "nothing", "there are no queries, so nothing is launched")
    weight = (yield from dequantized(a, target)) if a.kv_b_weight.dtype == FP8 else a.kv_b_weight
    weights = weight.unflatten(0, (heads, nope + v_dim))
    q_latent = yield from _by_head(q_nope, weights[:, :nope])
    call = as_attention(a, q_latent, a.latent)
    done = yield from attention_steps(call, target, rope=RopePart(q_rope, a.rope_keys))
    assert isinstance(done.result, torch.Tensor)
    out = yield from _by_head(done.result, weights[:, nope:].mT)
    return Outcome(out, NAME, f"library GEMMs around {done.name} {done.reason}")


def _by_head(x: torch.Tensor, weights: torch.Tensor) -> Generator[Step, Any, torch.Tensor]:
    """x [T, H, K] @ weights[h] [K, W] of each head, as [T, H, W]."""
    out = yield Buffer((*x.shape[:2], weights.shape[2]), x.dtype)
    yield Library(_bmm, (x.transpose(0, 1), weights, out.transpose(0, 1)))
    return out


def _bmm(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    torch.bmm(x, weights, out=out)
