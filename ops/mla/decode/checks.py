"""Checks of the arguments of `mla_decode`, which raise ArgumentError, and the reasons why no
emitted kernel can compute a call. All functions except `check_decode_values` read only metadata."""

from __future__ import annotations

from typing import Any

from tilewright.ops.attention.arguments import as_attention
from tilewright.ops.attention.checks import (
    MAX_WIDTH,
    attention_obstacle,
    check_attention_values,
    check_batch,
)
from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_device,
    check_last_dim_dense,
    check_operand,
    check_tensor,
    holds,
    in_words_of,
    shape_text,
)
from tilewright.ops.mla.arguments import MlaDecodeArguments, widths
from tilewright.ops.mla.checks import check_heads, check_rows

# Arguments that have another name in `cache_attention`.
OWN_NAMES = {"k": "latent"}
MAX_ROPE = 128


def check_decode(op: str, a: MlaDecodeArguments) -> None:
    """Checks an MlaDecodeArguments. Reads only metadata. Raises ArgumentError."""
    check_operand(op, "q", a.q, "[T, H, N + R]", (None, None, None), FLOAT_DTYPES, dense=True)
    a.kv_b.check_format(op)
    rope_dim = _check_whole(op, a) if a.v_weight is None else _check_halves(op, a)
    dtypes, device, rank = (a.q.dtype,), a.q.device, a.kv_b.shape[-1]
    form = "[P, S, L]", (None, None, rank), dtypes, device
    check_operand(op, "latent", a.latent, *form, dense=True)
    form = "[P, S, R]", (*a.latent.shape[:2], rope_dim), dtypes, device
    check_operand(op, "rope_keys", a.rope_keys, *form, dense=True)
    if a.round_latents:
        a.latent_rounding.check(op, "latent", rank)
    with in_words_of(op, OWN_NAMES):
        check_batch(op, as_attention(a, a.q, a.latent))


def _check_whole(op: str, a: MlaDecodeArguments) -> Any:
    """Checks the weight of an up-projection that is given as one tensor of numbers or codes.
    Returns R."""
    weight, device = a.kv_b, a.q.device
    check_tensor(op, "kv_b_weight", weight.data)
    weight.check_dtype(op, a.q.dtype)
    weight.check_shape(op, "[H * (N + V), L]", (None, None))
    check_device(op, "kv_b_weight", weight.data, device)
    if not weight.is_coded:
        check_last_dim_dense(op, "kv_b_weight", weight.data)
    check_rows(op, a, weight.shape)
    weight.check_blocks(op, device)
    return widths(a)[1]


def _check_halves(op: str, a: MlaDecodeArguments) -> Any:
    """Checks the weights of an up-projection that is given as two tensors, [H, N, L] and [H, V, L].
    Returns R."""
    if a.kv_b.is_coded:
        raise ArgumentError(op, "weight_format", "dense, since v_weight is given", a.weight_format)
    heads, width = a.q.shape[1:]
    dtypes, device = (a.q.dtype,), a.q.device
    sizes: tuple[Any, ...] = (heads, None, None)
    check_operand(op, "kv_b_weight", a.kv_b_weight, "[H, N, L]", sizes, dtypes, device)
    nope, rank = a.kv_b_weight.shape[1:]
    sizes = (heads, a.v_dim, rank)
    check_operand(op, "v_weight", a.v_weight, "[H, V, L]", sizes, dtypes, device)
    check_heads(op, a)
    if not (holds(nope >= 1) and holds(nope < width)):
        expected = f"0 < N < {width} rows of each head"
        raise ArgumentError(op, "kv_b_weight", expected, f"shape {shape_text(a.kv_b_weight.shape)}")
    a.kv_b.check_blocks(op, device)
    return widths(a)[1]


def check_decode_values(op: str, a: MlaDecodeArguments) -> None:
    """Checks the values of offsets, lengths and pages. This needs real tensors, not fake ones.
    Raises ArgumentError."""
    with in_words_of(op, OWN_NAMES):
        check_attention_values(op, as_attention(a, a.q, a.latent))


def decode_obstacle(a: MlaDecodeArguments) -> str | None:
    """Returns why no kernel can compute a call; None if a kernel can. Reads only metadata."""
    rank, rope_dim = a.latent.shape[2], a.rope_keys.shape[2]
    if rank > MAX_WIDTH or rope_dim > MAX_ROPE:
        return f"no kernel for latents of rank {rank} with {rope_dim} rope columns"
    return attention_obstacle(as_attention(a, a.q, a.latent))
