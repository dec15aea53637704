"""From the arguments of the attention ops to a static problem and the kernels' run-time values."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.qkv_kernels import (
    CacheStrides,
    EpilogueProblem,
    HeadFinish,
    InputStrides,
    QkvProblem,
    Rope,
)
from tilewright.ops.formats.paged_cache import CacheWindow

TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


def window_views(a: Any, writes_v: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The K and V windows as tensors on the caller's memory; None where no V is written."""
    k_window = CacheWindow.from_ints(a.k_window).view(a.k_cache)
    if not writes_v:
        return k_window, None
    v_base = a.k_cache if a.v_cache is None else a.v_cache
    return k_window, CacheWindow.from_ints(a.v_window).view(v_base)


def finish_values(
    a: Any, k_window: torch.Tensor, v_window: torch.Tensor | None, q_out: torch.Tensor | None
) -> dict[str, Any]:
    """Tensors and counts that every kernel of the family takes, by parameter name."""
    num_pages = k_window.shape[0]
    num_slots = a.slot_mapping.shape[0]
    return {
        "q_out_ptr": q_out,
        "k_cache_ptr": k_window,
        "v_cache_ptr": v_window,
        "slots_ptr": a.slot_mapping,
        "q_bias_ptr": getattr(a, "q_bias", None),
        "k_bias_ptr": getattr(a, "k_bias", None),
        "v_bias_ptr": getattr(a, "v_bias", None),
        "q_norm_ptr": getattr(a, "q_norm_weight", None),
        "k_norm_ptr": getattr(a, "k_norm_weight", None),
        "cos_ptr": a.cos,
        "sin_ptr": a.sin,
        "num_tokens": num_slots * (num_pages if a.slots == "per_sequence" else 1),
        "sequence_tokens": num_slots,
        "rope_tokens": 1 if a.cos is None else a.cos.shape[0],
        "num_pages": num_pages,
    }


def head_finish(
    a: Any, num_heads: int, k_window: torch.Tensor, v_window: torch.Tensor | None
) -> HeadFinish:
    """The static part of what follows the projection."""
    rope = None
    if a.cos is not None:
        rope = Rope(
            style=a.rope_style,
            rotary_dim=a.rotary_dim,
            full_width=a.cos.shape[1] == a.rotary_dim,
            table_dtype=TRITON_TYPES[a.cos.dtype],
            cos_stride=a.cos.stride(0),
            sin_stride=a.sin.stride(0),
        )
    dtype = TRITON_TYPES[k_window.dtype]
    return HeadFinish(
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=k_window.shape[2],
        head_dim=k_window.shape[3],
        k_cache=cache_strides(k_window),
        v_cache=None if v_window is None else cache_strides(v_window),
        cache_dtype=dtype,
        slot_dtype=TRITON_TYPES[a.slot_mapping.dtype],
        slots_stride=a.slot_mapping.stride(0),
        per_sequence=a.slots == "per_sequence",
        wrap_negative=a.indexing == "torch",
        rope=rope,
        biases=tuple(
            None if bias is None else (bias.stride(0), TRITON_TYPES[bias.dtype])
            for bias in (getattr(a, f"{letter}_bias", None) for letter in "qkv")
        ),
        norms=tuple(
            None if weight is None else TRITON_TYPES[weight.dtype]
            for weight in (getattr(a, f"{letter}_norm_weight", None) for letter in "qk")
        ),
        norm_eps=getattr(a, "norm_eps", 1e-6),
    )


def cache_strides(window: torch.Tensor) -> CacheStrides:
    return CacheStrides(window.shape[1], *window.stride())


def qkv_problem(a: Any, values: dict[str, Any], finish: HeadFinish) -> QkvProblem:
    """The problem of a `fused_qkv_paged` call; `values` are those of `finish_values`."""
    tensors = {**values, "x_ptr": a.x}
    for letter in "qkv":
        tensors[f"{letter}_weight_ptr"] = getattr(a, f"{letter}_weight")
    return QkvProblem(
        hidden=a.x.shape[1],
        x_stride=a.x.stride(0),
        weight_strides=tuple(
            weight.stride()[:2] for weight in (a.q_weight, a.k_weight, a.v_weight)
        ),
        finish=finish,
        unaligned=unaligned(tensors),
        one_descriptor=_in_reach(a.q_weight, a.k_weight, a.v_weight),
        **static_counts(values, a.static_tokens),
    )


def _in_reach(*weights: torch.Tensor) -> bool:
    addresses = [weight.data_ptr() for weight in weights]
    return max(addresses) - min(addresses) < 2**40


def epilogue_problem(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
    values: dict[str, Any],
    finish: HeadFinish,
    static_tokens: bool,
) -> EpilogueProblem:
    """Finishing q [T, Hq, D], k and v [T, Hkv, D] of any strides."""
    strides = [None if t is None else InputStrides(*t.stride()) for t in (q, k, v)]
    if strides[1] is None:
        raise ValueError("k: expected a tensor, got None")
    return EpilogueProblem(
        q=strides[0],
        k=strides[1],
        v=strides[2],
        finish=finish,
        input_dtype=TRITON_TYPES[k.dtype],
        unaligned=unaligned({**values, "q_ptr": q, "k_ptr": k, "v_ptr": v}),
        **static_counts(values, static_tokens),
    )


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
