"""Checks of what projects q, k and v: x, weights, their formats and scales, and biases.

Metadata only; each raises ArgumentError. `a` is a FusedQkvArguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_absent,
    check_choice,
    check_device,
    check_dtype,
    check_operand,
    check_shape,
    holds,
    proven,
    shape_text,
)
from tilewright.ops.formats.code_checks import (
    check_blocks,
    check_code_shape,
    check_format_options,
)
from tilewright.ops.formats.quantized_weight import WEIGHT_FORMATS, logical_shape

ACTIVATION_CODES = torch.float8_e4m3fn
X_DTYPES = (*FLOAT_DTYPES, ACTIVATION_CODES)
ACTIVATION_BLOCK = 128


def value_dtype(a: Any) -> torch.dtype:
    """The dtype of q, and of everything that is not a code."""
    return a.out_dtype if a.x.dtype == ACTIVATION_CODES and a.out_dtype else a.x.dtype


def check_projection(op: str, a: Any) -> None:
    """Checks x, the three weights with their scales, and the biases."""
    check_choice(op, "weight_format", a.weight_format, ("dense", *WEIGHT_FORMATS))
    _check_x(op, a)
    check_format_options(op, a, a.q_weight.dtype)
    _check_shapes(op, a)
    for letter in "qkv":
        weight = getattr(a, f"{letter}_weight")
        if weight is not None:
            _check_weight(op, a, letter, weight)
        else:
            names = [f"{letter}_{suffix}" for suffix in ("bias", "scale", "zero")]
            check_absent(op, a, names, f"{letter}_weight is None")


def _check_x(op: str, a: Any) -> None:
    coded = a.x.dtype == ACTIVATION_CODES
    check_operand(op, "x", a.x, "[T, K]", (None, None), X_DTYPES, dense=True)
    if coded and a.weight_format != "fp8":
        raise ArgumentError(op, "weight_format", "'fp8', since x has codes", a.weight_format)
    check_out_dtype(op, a.x.dtype, a.out_dtype)
    if not coded:
        check_absent(op, a, ["x_scale"], f"x is {a.x.dtype}")
    if a.x_scale is None:
        return
    check_dtype(op, "x_scale", a.x_scale, FLOAT_DTYPES)
    check_device(op, "x_scale", a.x_scale, a.x.device)
    check_shape(op, "x_scale", a.x_scale, "[T or 1, 1 or K / 128]", (None, None))
    tokens, hidden = a.x.shape
    wanted = (tokens, -(-hidden // ACTIVATION_BLOCK))
    fits = [holds(n == 1) or holds(n == w) for n, w in zip(a.x_scale.shape, wanted, strict=True)]
    if not all(fits):
        expected = f"shape [{tokens} or 1, {wanted[1]} or 1]"
        raise ArgumentError(op, "x_scale", expected, f"shape {shape_text(a.x_scale.shape)}")


def check_out_dtype(op: str, x_dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    """Codes say nothing of what they become; numbers stay what they are."""
    allowed = FLOAT_DTYPES[:3] if x_dtype == ACTIVATION_CODES else (None, x_dtype)
    if out_dtype not in allowed:
        expected = " or ".join(map(str, allowed))
        raise ArgumentError(op, "out_dtype", f"{expected} for {x_dtype}", out_dtype)


def _check_shapes(op: str, a: Any) -> None:
    """Heads, head_dim and K of the three weights, as stored codes give them."""
    stored = WEIGHT_FORMATS.get(a.weight_format)
    for letter in "qkv":
        weight = getattr(a, f"{letter}_weight")
        if weight is not None:
            dtypes = (a.x.dtype,) if stored is None else stored.dtypes
            check_dtype(op, f"{letter}_weight", weight, dtypes)
            check_dtype(op, f"{letter}_weight", weight, (a.q_weight.dtype,))
    if a.q_weight.dim() not in (3, 4):
        expected = "[Hq, D, K] or [Hkv, G, D, K]"
        raise ArgumentError(op, "q_weight", expected, f"shape {shape_text(a.q_weight.shape)}")
    q_shape = logical_shape(a.q_weight, a.weight_format)
    hidden, head_dim = a.x.shape[1], q_shape[-2]
    letters = "[Hq, D, K]" if len(q_shape) == 3 else "[Hkv, G, D, K]"
    check_code_shape(op, a, "q_weight", letters, (*(None for _ in q_shape[:-2]), None, hidden))
    check_code_shape(op, a, "k_weight", "[Hkv, D, K]", (None, head_dim, hidden))
    num_kv_heads = a.k_weight.shape[0]
    if len(q_shape) == 4:
        check_code_shape(op, a, "q_weight", letters, (num_kv_heads, None, head_dim, hidden))
    elif not holds(num_kv_heads != 0):
        raise ArgumentError(op, "k_weight", "at least one head", "none")
    # Without V, heads are but tiles of rows (MLA).
    elif a.v_weight is not None and not holds(q_shape[0] % num_kv_heads == 0):
        expected = f"num_kv_heads that divides num_heads = {q_shape[0]}"
        raise ArgumentError(op, "k_weight", expected, f"{num_kv_heads} heads")
    if a.v_weight is not None:
        check_code_shape(op, a, "v_weight", "[Hkv, D, K]", (num_kv_heads, head_dim, hidden))


def _check_weight(op: str, a: Any, letter: str, weight: torch.Tensor) -> None:
    name = f"{letter}_weight"
    check_device(op, name, weight, a.x.device)
    bias = getattr(a, f"{letter}_bias")
    shape = logical_shape(weight, a.weight_format)
    if bias is not None:
        letters = "[H, D]" if len(shape) == 3 else "[Hkv, G, D]"
        check_parameter(op, a, f"{letter}_bias", bias, letters, shape[:-1])
    if a.weight_format == "dense":
        _check_dense_strides(op, name, weight)
    rows = shape[-2]
    for heads in shape[:-2]:
        rows = rows * heads
    check_blocks(op, a, (f"{letter}_scale", f"{letter}_zero"), rows, shape[-1])


def _check_dense_strides(op: str, name: str, weight: torch.Tensor) -> None:
    dense = any(
        holds(weight.stride(axis) == 1) or proven(weight.shape[axis] <= 1) for axis in (-1, -2)
    )
    if not dense:
        expected = "a contiguous last dimension, or last but one (stride 1)"
        raise ArgumentError(op, name, expected, f"strides {shape_text(weight.stride())}")


def check_parameter(
    op: str,
    a: Any,
    name: str,
    tensor: torch.Tensor,
    letters: str,
    sizes: Sequence[Any],
) -> None:
    """Checks a bias: of the dtype of the values or float32."""
    dtypes = (value_dtype(a), torch.float32)
    check_operand(op, name, tensor, letters, sizes, dtypes, a.x.device, dense=True)


def check_delta(
    op: str,
    delta: torch.Tensor | None,
    num_tokens: Any,
    num_rows: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """delta: None, or [T, rows of q, k and v] of `dtype` or float32, rows dense."""
    if delta is None:
        return
    letters, sizes, dtypes = "[T, N_q + N_k + N_v]", (num_tokens, num_rows), (dtype, torch.float32)
    check_operand(op, "delta", delta, letters, sizes, dtypes, device, dense=True)
