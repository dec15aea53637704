"""`quantize_nvfp4`: activations to packed E2M1 codes and scales in the tcgen05 layout.

The operation order, bit for bit, is that of ops.formats.nvfp4.quantize.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from tilewright.ops.checks import ArgumentError, check_device, check_dtype, check_shape
from tilewright.ops.formats import nvfp4
from tilewright.ops.formats.scale_layout import layout_shape, max_scale_blocks, swizzle
from tilewright.ops.grouping import INDEX_DTYPES, check_group_values

NAME = "quantize_nvfp4"
SCHEMA = "(Tensor x, *, Tensor? tensor_scale=None, Tensor? group_offsets=None) -> (Tensor, Tensor)"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantizeNvfp4Arguments:
    """The arguments of `quantize_nvfp4`; M rows, K columns (16 divides K), G groups.

    x [M, K]. tensor_scale fp32 [] or [1] (plain) or [G] (grouped); None: 1. group_offsets int
    [G + 1], exclusive sums with a leading 0: every group's scales start a block of 128 rows.
    Result: packed uint8 [M, K/2] and scales float8_e4m3fn [S, ceil(K/64), 32, 4, 4] with
    S = ceil(M/128) or, grouped, ceil(M/128) + G. Scales without data are zero.
    """

    x: torch.Tensor
    _: KW_ONLY
    tensor_scale: torch.Tensor | None = None
    group_offsets: torch.Tensor | None = None


def validate(a: QuantizeNvfp4Arguments) -> None:
    check_dtype(NAME, "x", a.x, DTYPES)
    check_shape(NAME, "x", a.x, "[M, K]", (None, None))
    if a.x.shape[1] % nvfp4.BLOCK:
        raise ArgumentError(NAME, "x", "K that 16 divides", f"K = {a.x.shape[1]}")
    if a.group_offsets is not None:
        check_shape(NAME, "group_offsets", a.group_offsets, "[G + 1]", (None,))
        check_dtype(NAME, "group_offsets", a.group_offsets, INDEX_DTYPES)
        check_device(NAME, "group_offsets", a.group_offsets, a.x.device)
    if a.tensor_scale is not None:
        check_dtype(NAME, "tensor_scale", a.tensor_scale, (torch.float32,))
        check_device(NAME, "tensor_scale", a.tensor_scale, a.x.device)
        expected = 1 if a.group_offsets is None else a.group_offsets.shape[0] - 1
        if a.tensor_scale.numel() != expected:
            raise ArgumentError(
                NAME, "tensor_scale", f"{expected} elements", a.tensor_scale.numel()
            )


def validate_values(a: QuantizeNvfp4Arguments) -> None:
    if a.x.device.type != "cpu":
        return
    if a.group_offsets is not None:
        check_group_values(NAME, a.group_offsets, None, 0, a.x.shape[0])
    if a.tensor_scale is not None:
        good = a.tensor_scale.isfinite() & (a.tensor_scale > 0)
        if not bool(good.all()):
            wrong = float(a.tensor_scale.flatten()[int((~good.flatten()).nonzero()[0])])
            raise ArgumentError(NAME, "tensor_scale", "positive finite factors", wrong)


def _scale_shape(a: QuantizeNvfp4Arguments) -> tuple[int, ...]:
    rows, columns = a.x.shape[0], a.x.shape[1] // nvfp4.BLOCK
    if a.group_offsets is None:
        return layout_shape(rows, columns)
    blocks = max_scale_blocks(rows, a.group_offsets.shape[0] - 1)
    return (blocks, *layout_shape(0, columns)[1:])


def fake(a: QuantizeNvfp4Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    packed = a.x.new_empty((a.x.shape[0], a.x.shape[1] // 2), dtype=torch.uint8)
    return packed, a.x.new_empty(_scale_shape(a), dtype=torch.float8_e4m3fn)


def reference(a: QuantizeNvfp4Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning of the op, in plain PyTorch."""
    if a.group_offsets is not None:
        return nvfp4.quantize_grouped(a.x, a.group_offsets, a.tensor_scale)
    scale = 1.0 if a.tensor_scale is None else a.tensor_scale.reshape(())
    packed, scales = nvfp4.quantize(a.x, scale)
    return packed, swizzle(scales.view(torch.uint8)).view(scales.dtype)
