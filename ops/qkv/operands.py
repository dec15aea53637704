"""From the arguments of the attention ops to a static problem and the kernels' run-time values."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.qkv.specs import (
    CacheStrides,
    EpilogueProblem,
    HeadFinish,
    InputStrides,
    Norm,
    PageTable,
    QkvProblem,
    Rope,
    WeightStrides,
)
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.qkv.quantized_operands import quantization, quantized_values, stored_words
from tilewright.ops.runtime.dtypes import TRITON_TYPES


def window_views(a: Any, writes_v: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The K and V windows as tensors on the caller's memory; None where no V is written."""
    k_window = CacheWindow.from_ints(a.k_window).view(a.k_cache)
    if not writes_v:
        return k_window, None
    v_base = a.k_cache if a.v_cache is None else a.v_cache
    return k_window, CacheWindow.from_ints(a.v_window).view(v_base)


# The tensors of each form of addressing, by the kernels' parameter names.
_ADDRESS_ARGUMENTS = {
    "flat": ("slot_mapping", "", ""),
    "per_sequence": ("slot_mapping", "", ""),
    "block_table": ("lookup_table", "sequence_ids", "positions"),
    "ragged": ("lookup_table", "row_offsets", "cache_lengths"),
}


def address_tensors(a: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """slots_ptr, sequences_ptr and positions_ptr of the kernels."""
    slots, sequences, positions = _ADDRESS_ARGUMENTS[a.slots]
    if not sequences:
        return getattr(a, slots), None, None
    return getattr(a, slots), getattr(a, sequences), getattr(a, positions)


def finish_values(
    a: Any,
    num_tokens: int,
    k_window: torch.Tensor,
    v_window: torch.Tensor | None,
    q_out: torch.Tensor | None,
) -> dict[str, Any]:
    """Tensors and counts that every kernel of the family takes, by parameter name."""
    slots, sequences, positions = address_tensors(a)
    values = {
        "q_out_ptr": q_out,
        "k_cache_ptr": k_window,
        "v_cache_ptr": v_window,
        "slots_ptr": slots,
        "sequences_ptr": sequences,
        "positions_ptr": positions,
        "k_cache_scale_ptr": a.k_cache_scale,
        "v_cache_scale_ptr": a.v_cache_scale,
        "q_bias_ptr": getattr(a, "q_bias", None),
        "k_bias_ptr": getattr(a, "k_bias", None),
        "v_bias_ptr": getattr(a, "v_bias", None),
        "delta_ptr": getattr(a, "delta", None),
        "q_norm_ptr": getattr(a, "q_norm_weight", None),
        "k_norm_ptr": getattr(a, "k_norm_weight", None),
        "cos_ptr": a.cos,
        "sin_ptr": a.sin,
        "num_tokens": num_tokens,
        "sequence_tokens": slots.shape[0] if sequences is None else 1,
        "rope_tokens": 1 if a.cos is None else a.cos.shape[0],
        "num_pages": k_window.shape[0],
    }
    if sequences is not None:
        values |= {
            "num_sequences": slots.shape[0],
            "lookup_columns": slots.shape[1],
            "lookup_stride": slots.stride(0),
        }
    return values


def head_finish(
    a: Any,
    dtype: torch.dtype,
    num_heads: int,
    k_window: torch.Tensor,
    v_window: torch.Tensor | None,
) -> HeadFinish:
    """The static part of what follows the projection; dtype: of q, or of k where there is none."""
    slots, sequences, _ = address_tensors(a)
    kv_repeat = getattr(a, "kv_repeat", 1)
    q_bias = getattr(a, "q_bias", None)
    q_weight = getattr(a, "q_weight", None)
    delta = getattr(a, "delta", None)
    return HeadFinish(
        dtype=TRITON_TYPES[dtype],
        num_heads=num_heads,
        num_kv_heads=k_window.shape[2] // kv_repeat,
        head_dim=k_window.shape[3],
        k_cache=cache_strides(k_window),
        v_cache=None if v_window is None else cache_strides(v_window),
        cache_dtype=TRITON_TYPES[k_window.dtype],
        slot_dtype=TRITON_TYPES[slots.dtype],
        slots_stride=slots.stride(0) if sequences is None else slots.stride(1),
        per_sequence=a.slots == "per_sequence",
        wrap_negative=a.indexing == "torch",
        rope=_rope(a),
        biases=tuple(
            None if bias is None else (bias.stride(-2), TRITON_TYPES[bias.dtype])
            for bias in (getattr(a, f"{letter}_bias", None) for letter in "qkv")
        ),
        delta=None if delta is None else (delta.stride(0), TRITON_TYPES[delta.dtype]),
        norms=tuple(
            None if weight is None else TRITON_TYPES[weight.dtype] for weight in _norm_weights(a)
        ),
        norm_eps=getattr(a, "norm_eps", 1e-6),
        norm=_norm(a),
        kv_repeat=kv_repeat,
        group=q_weight.shape[1] if q_weight is not None and q_weight.dim() == 4 else 0,
        q_bias_group_stride=q_bias.stride(0) if q_bias is not None and q_bias.dim() == 3 else 0,
        clip=getattr(a, "clip", 0.0),
        cache_scales=tuple(
            None if scale is None else _head_stride(scale)
            for scale in (a.k_cache_scale, a.v_cache_scale)
        ),  # type: ignore[arg-type]
        scale_multiplies=a.cache_scale_multiplies,
        table=_page_table(a),
    )


def _rope(a: Any) -> Rope | None:
    if a.cos is None:
        return None
    return Rope(
        style=a.rope_style,
        rotary_dim=a.rotary_dim,
        full_width=a.cos.shape[1] == a.rotary_dim,
        table_dtype=TRITON_TYPES[a.cos.dtype],
        cos_stride=a.cos.stride(0),
        sin_stride=a.sin.stride(0),
    )


def _norm_weights(a: Any) -> list[torch.Tensor | None]:
    return [getattr(a, f"{letter}_norm_weight", None) for letter in "qk"]


def _norm(a: Any) -> Norm:
    if not hasattr(a, "norm_kind"):
        return Norm()
    q, k = _norm_weights(a)
    return Norm(
        kind=a.norm_kind,
        row=a.norm_width == "row",
        after_rope=a.norm_after_rope,
        offset=a.norm_offset,
        weightless=a.weightless_norm,
        strides=(
            0 if q is None or q.dim() == 1 else q.stride(0),
            0 if k is None or k.dim() == 1 else k.stride(0),
        ),
    )


def _head_stride(scale: torch.Tensor) -> int:
    return scale.stride(0) if scale.dim() == 1 and scale.shape[0] > 1 else 0


def _page_table(a: Any) -> PageTable | None:
    slots, sequences, positions = address_tensors(a)
    if sequences is None or positions is None:
        return None
    ragged = a.slots == "ragged"
    return PageTable(
        ragged=ragged,
        sequence_dtype=TRITON_TYPES[sequences.dtype],
        position_dtype=TRITON_TYPES[positions.dtype],
        sequence_stride=sequences.stride(0),
        position_stride=positions.stride(0),
        search_steps=slots.shape[0].bit_length() if ragged else 0,
    )


def cache_strides(window: torch.Tensor) -> CacheStrides:
    return CacheStrides(window.shape[1], *window.stride())


def qkv_problem(a: Any, values: dict[str, Any], finish: HeadFinish) -> QkvProblem:
    """The problem of a `fused_qkv_paged` call; `values` are those of `finish_values`."""
    weights = [a.q_weight, a.k_weight, a.v_weight]
    coded = a.weight_format != "dense"
    if coded:
        weights, _ = stored_words(a)
    return QkvProblem(
        hidden=a.x.shape[1],
        x_stride=a.x.stride(0),
        weight_strides=tuple(
            None if weight is None else weight_strides(weight) for weight in weights
        ),  # type: ignore[arg-type]
        finish=finish,
        unaligned=unaligned({**values, **projection_values(a)}),
        one_descriptor=_in_reach(a.q_weight, a.k_weight, a.v_weight),
        quantization=quantization(a) if coded else None,
        **static_counts(values, a.static_tokens),
    )


def projection_values(a: Any) -> dict[str, Any]:
    """The tensors that the projection kernels multiply, by parameter name."""
    if a.weight_format != "dense":
        return quantized_values(a)
    weights = {f"{letter}_weight_ptr": getattr(a, f"{letter}_weight") for letter in "qkv"}
    return {"x_ptr": a.x, **weights}


def weight_strides(weight: torch.Tensor) -> WeightStrides:
    """The strides of a weight [H, D, K] or [H / G, G, D, K]; those of axes of one element free."""
    *group, head, row, column = weight.stride()
    if weight.shape[-1] == 1 or column == 1:
        column = 1
    elif weight.shape[-2] == 1:
        row = 1
    return WeightStrides(head, row, column, *group)


def _in_reach(*weights: torch.Tensor | None) -> bool:
    addresses = [weight.data_ptr() for weight in weights if weight is not None]
    return max(addresses) - min(addresses) < 2**40


def epilogue_problem(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
    values: dict[str, Any],
    finish: HeadFinish,
    static_tokens: bool,
) -> EpilogueProblem:
    """Finishing q [T, Hq, D] or [T, Hkv, G, D], k and v [T, Hkv, D] of any strides."""
    return EpilogueProblem(
        q=None if q is None else input_strides(q),
        k=input_strides(k),
        v=None if v is None else input_strides(v),
        finish=finish,
        input_dtype=TRITON_TYPES[k.dtype],
        unaligned=unaligned({**values, "q_ptr": q, "k_ptr": k, "v_ptr": v}),
        **static_counts(values, static_tokens),
    )


def input_strides(t: torch.Tensor) -> InputStrides:
    token, *group, head, dim = t.stride()
    return InputStrides(token, head, dim, *group)


def static_counts(values: dict[str, Any], static_tokens: bool) -> dict[str, int | None]:
    names = ("num_tokens", "rope_tokens", "sequence_tokens")
    return {name: values[name] if static_tokens else None for name in names}


def unaligned(tensors: dict[str, Any]) -> tuple[str, ...]:
    """Names of the tensors whose first element is not on a 16-byte boundary."""
    return tuple(
        name
        for name, value in sorted(tensors.items())
        if isinstance(value, torch.Tensor) and value.data_ptr() % 16
    )
