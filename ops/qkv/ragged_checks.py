"""Checks of the arguments of `fused_qkv_matmul_kv_cache_paged_ragged`.

The checks read only metadata. They raise ArgumentError with the argument names of this op.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.cache.checks import CACHE_SCALES, check_cache_scale
from tilewright.ops.cache.ragged_batch import check_batch, check_layer
from tilewright.ops.checks import (
    ArgumentError,
    check_absent,
    check_device,
    check_dtype,
    check_operand,
    check_shape,
    holds,
    shape_text,
)
from tilewright.ops.formats.activation_codes import ACTIVATION_CODES, check_out_dtype
from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.ops.formats.gptq_buffer import buffer_rows
from tilewright.ops.qkv.arguments import RaggedQkvArguments
from tilewright.ops.qkv.checks import FLOAT_DTYPES, X_DTYPES

NAME = "fused_qkv_matmul_kv_cache_paged_ragged"
WEIGHT_BLOCK = 128
SCALES = ("input_scale", "weight_scale")


def check_metadata(a: RaggedQkvArguments) -> None:
    """Checks all arguments."""
    hidden = a.hidden_state
    check_operand(NAME, "hidden_state", hidden, "[T, K]", (None, None), X_DTYPES, dense=True)
    check_out_dtype(NAME, hidden.dtype, a.out_dtype)
    _check_blocks(a)
    check_batch(NAME, a, a.hidden_state.device)
    _check_weight(a)
    _check_cache_scales(a)


def kv_rows(blocks: torch.Tensor) -> Any:
    """Returns how many rows of the weight K has. For MLA, these are the rows of one head.
    Otherwise, they are the rows of all heads."""
    return blocks.shape[5] * (1 if blocks.shape[1] == 1 else blocks.shape[4])


def _result_dtype(a: RaggedQkvArguments) -> torch.dtype:
    return a.out_dtype or a.hidden_state.dtype


def _check_blocks(a: RaggedQkvArguments) -> None:
    letters = "[P, 2 or 1, layers, page_size, heads, head_dim]"
    check_shape(NAME, "blocks", a.blocks, letters, (None,) * 6)
    check_device(NAME, "blocks", a.blocks, a.hidden_state.device)
    dtype = _result_dtype(a)
    narrow = () if dtype == torch.float64 else FP8_DTYPES
    check_dtype(NAME, "blocks", a.blocks, (dtype, *narrow))
    if not (holds(a.blocks.shape[1] == 1) or holds(a.blocks.shape[1] == 2)):
        actual = f"shape {shape_text(a.blocks.shape)}"
        raise ArgumentError(NAME, "blocks", "2 (K and V) or 1 (MLA) on the second axis", actual)
    if not all(holds(size >= 1) for size in a.blocks.shape[2:]):
        actual = f"shape {shape_text(a.blocks.shape)}"
        raise ArgumentError(NAME, "blocks", "at least one layer, slot, head and dim", actual)
    check_layer(NAME, a)


def _check_weight(a: RaggedQkvArguments) -> None:
    check_shape(NAME, "weight", a.weight, "[R, N]" if a.group_size else "[N, K]", (None, None))
    check_device(NAME, "weight", a.weight, a.hidden_state.device)
    total = a.weight.shape[1] if a.group_size else a.weight.shape[0]
    q_dim = total - kv_rows(a.blocks) * a.blocks.shape[1]
    heads, head_dim = a.blocks.shape[4:]
    if not holds(q_dim >= 1):
        expected = f"more than the {total - q_dim} rows that K and V of blocks take"
        raise ArgumentError(NAME, "weight", expected, f"{total} rows")
    if a.blocks.shape[1] == 2 and not holds(q_dim % (heads * head_dim) == 0):
        expected = f"a q_dim that is a multiple of heads * head_dim = {heads * head_dim}"
        raise ArgumentError(NAME, "weight", expected, f"q_dim {q_dim} ({total} rows)")
    if a.group_size:
        _check_gptq(a, q_dim)
    else:
        _check_rows(a)
    if a.bias is not None:
        dtypes, device = (_result_dtype(a), torch.float32), a.hidden_state.device
        check_operand(NAME, "bias", a.bias, "[N]", (total,), dtypes, device, dense=True)


def _check_rows(a: RaggedQkvArguments) -> None:
    check_shape(NAME, "weight", a.weight, "[N, K]", (None, a.hidden_state.shape[1]))
    coded = a.hidden_state.dtype == ACTIVATION_CODES
    dtypes = (ACTIVATION_CODES,) if coded else (a.hidden_state.dtype, ACTIVATION_CODES)
    check_dtype(NAME, "weight", a.weight, dtypes)
    if a.has_zp:
        raise ArgumentError(NAME, "has_zp", "False without group_size", True)
    if a.weight.dtype != ACTIVATION_CODES:
        if not any(holds(stride == 1) for stride in a.weight.stride()):
            actual = f"strides {shape_text(a.weight.stride())}"
            raise ArgumentError(NAME, "weight", "a contiguous dimension (stride 1)", actual)
        check_absent(NAME, a, SCALES, f"weight is {a.weight.dtype}")
        return
    _check_weight_scale(a)
    if not coded:
        check_absent(NAME, a, ["input_scale"], f"hidden_state is {a.hidden_state.dtype}")
        return
    tokens, hidden = a.hidden_state.shape
    forms = {"tensor": (1, 1), "token": (tokens, 1), "1x128": (tokens, -(-hidden // WEIGHT_BLOCK))}
    _check_granularity(a, "input_scale", a.input_scale, forms)


def _check_weight_scale(a: RaggedQkvArguments) -> None:
    total, hidden = a.weight.shape
    blocks = (-(-total // WEIGHT_BLOCK), -(-hidden // WEIGHT_BLOCK))
    forms = {"tensor": (1, 1), "channel": (total, 1), "128x128": blocks}
    _check_granularity(a, "weight_scale", a.weight_scale, forms)


def _check_granularity(
    a: RaggedQkvArguments, name: str, scale: torch.Tensor | None, forms: dict[str, tuple[Any, Any]]
) -> None:
    """Checks that a scale has one of the shapes in `forms`."""
    expected = " or ".join(f"{shape_text(shape)} (per {form})" for form, shape in forms.items())
    if scale is None:
        raise ArgumentError(NAME, name, expected, None)
    check_dtype(NAME, name, scale, FLOAT_DTYPES)
    check_device(NAME, name, scale, a.hidden_state.device)
    shape = (1, 1) if scale.numel() == 1 and scale.dim() < 2 else tuple(scale.shape)
    fits = len(shape) == 2 and any(
        holds(shape[0] == rows) and holds(shape[1] == columns) for rows, columns in forms.values()
    )
    if not fits:
        raise ArgumentError(NAME, name, expected, f"shape {shape_text(scale.shape)}")


def _check_gptq(a: RaggedQkvArguments, q_dim: Any) -> None:
    hidden, rows = a.hidden_state.shape[1], a.weight.shape[1]
    check_dtype(NAME, "weight", a.weight, (torch.uint8,))
    if a.hidden_state.dtype == ACTIVATION_CODES:
        actual = a.hidden_state.dtype
        raise ArgumentError(NAME, "hidden_state", "no codes, since group_size is given", actual)
    check_absent(NAME, a, SCALES, "group_size is given")
    if a.group_size < 1 or not holds(hidden % a.group_size == 0) or not holds(hidden % 8 == 0):
        expected = f"a group that divides K = {hidden}, and a K that is a multiple of 8"
        raise ArgumentError(NAME, "group_size", expected, a.group_size)
    if not (holds(q_dim % 8 == 0) and holds(rows % 8 == 0)):
        expected = "q_dim and N that are multiples of 8, since group_size is given"
        raise ArgumentError(NAME, "weight", expected, f"q_dim {q_dim} and N {rows}")
    check_shape(
        NAME,
        "weight",
        a.weight,
        f"[R, N] (words, scales{' and zeros' if a.has_zp else ''} of groups of {a.group_size})",
        (buffer_rows(hidden, a.group_size, a.has_zp), None),
    )
    if not a.weight.is_contiguous() or a.weight.storage_offset() % 4:
        found = f"strides {shape_text(a.weight.stride())}, offset {a.weight.storage_offset()}"
        raise ArgumentError(NAME, "weight", "a contiguous buffer at a multiple of 4 bytes", found)


def _check_cache_scales(a: RaggedQkvArguments) -> None:
    heads = 1 if a.blocks.shape[1] == 1 else a.blocks.shape[4]
    if a.blocks.shape[1] == 1:
        check_absent(NAME, a, ["v_cache_scale"], "blocks hold no V")
    for name, scale in zip(CACHE_SCALES, (a.k_cache_scale, a.v_cache_scale), strict=True):
        check_cache_scale(NAME, name, scale, heads, a.hidden_state.device)
