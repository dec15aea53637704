"""Checks of a projection to q, k and v: x, the weights with their formats and scales, and the
biases.

The checks read only metadata and raise ArgumentError.
"""

from __future__ import annotations

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_absent,
    check_device,
    check_dtype,
    check_operand,
    holds,
    proven,
    shape_text,
)
from tilewright.ops.formats.activation_codes import (
    ACTIVATION_CODES,
    check_out_dtype,
    check_x_scale,
)
from tilewright.ops.formats.weight import Weight
from tilewright.ops.qkv.arguments import FusedQkvArguments

X_DTYPES = (*FLOAT_DTYPES, ACTIVATION_CODES)


def check_projection(op: str, a: FusedQkvArguments) -> None:
    """Checks x, the three weights with their scales, and the biases."""
    if a.factors is not None:
        number = 2 if a.v_weight is None else 3
        own = "[number of weights]", (number,), (torch.float32,), a.x.device
        check_operand(op, "factors", a.factors, *own, dense=True)
        if not a.is_coded:
            check_absent(op, a, ["factors"], "weights are dense")
    a.q_projection.check_format(op)
    _check_x(op, a)
    _check_shapes(op, a)
    for letter, weight in zip("qkv", a.projections, strict=True):
        if weight is not None:
            _check_weight(op, a, weight)
        else:
            names = [f"{letter}_{suffix}" for suffix in ("bias", "scale", "zero")]
            check_absent(op, a, names, f"{letter}_weight is None")


def _check_x(op: str, a: FusedQkvArguments) -> None:
    check_operand(op, "x", a.x, "[T, K]", (None, None), X_DTYPES, dense=True)
    if a.has_codes and a.weight_format != "fp8":
        raise ArgumentError(op, "weight_format", "'fp8', since x has codes", a.weight_format)
    check_out_dtype(op, a.x.dtype, a.out_dtype)
    if not a.has_codes:
        check_absent(op, a, ["x_scale"], f"x is {a.x.dtype}")
    check_x_scale(op, a.x, a.x_scale)


def _check_shapes(op: str, a: FusedQkvArguments) -> None:
    """Checks the numbers of heads, head_dim and K of the three weights, after unpacking."""
    q, k, v = a.projections
    for weight in (q, k, v):
        if weight is not None:
            weight.check_dtype(op, a.x.dtype)
            check_dtype(op, weight.named("data"), weight.data, (q.data.dtype,))
    if q.data.dim() not in (3, 4):
        expected = "[Hq, D, K] or [Hkv, G, D, K]"
        raise ArgumentError(op, "q_weight", expected, f"shape {shape_text(q.data.shape)}")
    hidden, head_dim, grouped = a.x.shape[1], a.head_dim, q.data.dim() == 4
    letters = "[Hkv, G, D, K]" if grouped else "[Hq, D, K]"
    q.check_shape(op, letters, (*(None for _ in q.shape[:-2]), None, hidden))
    k.check_shape(op, "[Hkv, D, K]", (None, head_dim, hidden))
    num_kv_heads = a.k_weight.shape[0]
    if grouped:
        q.check_shape(op, letters, (num_kv_heads, None, head_dim, hidden))
    elif not holds(num_kv_heads != 0):
        raise ArgumentError(op, "k_weight", "at least one head", "none")
    # Without V (MLA), heads only divide the rows into tiles, so num_kv_heads need not divide
    # num_heads.
    elif v is not None and not holds(q.shape[0] % num_kv_heads == 0):
        expected = f"num_kv_heads that divides num_heads = {q.shape[0]}"
        raise ArgumentError(op, "k_weight", expected, f"{num_kv_heads} heads")
    if v is not None:
        v.check_shape(op, "[Hkv, D, K]", (num_kv_heads, head_dim, hidden))


def _check_weight(op: str, a: FusedQkvArguments, weight: Weight) -> None:
    device, shape = a.x.device, weight.shape
    check_device(op, weight.named("data"), weight.data, device)
    if weight.bias is not None:
        letters = "[H, D]" if len(shape) == 3 else "[Hkv, G, D]"
        name, dtypes = weight.named("bias"), (a.value_dtype, torch.float32)
        check_operand(op, name, weight.bias, letters, shape[:-1], dtypes, device, dense=True)
    if not weight.is_coded:
        _check_dense_strides(op, weight.named("data"), weight.data)
    weight.check_blocks(op, device)


def _check_dense_strides(op: str, name: str, weight: torch.Tensor) -> None:
    dense = any(
        holds(weight.stride(axis) == 1) or proven(weight.shape[axis] <= 1) for axis in (-1, -2)
    )
    if not dense:
        expected = "stride 1 in one of the last two dimensions"
        raise ArgumentError(op, name, expected, f"strides {shape_text(weight.stride())}")
