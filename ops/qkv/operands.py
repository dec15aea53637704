"""From the arguments of the attention ops to a static problem and the kernels' run-time values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.operand import Operand
from tilewright.codegen.qkv.problem import EpilogueProblem, HeadEpilogue, Norm, QkvProblem, Rope
from tilewright.ops.cache.addressing import address_values, addressing_operands
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.formats.weight_rows import WeightRows, weight_rows
from tilewright.ops.qkv.arguments import FusedQkvArguments, KvStoreArguments
from tilewright.ops.qkv.quantized_operands import (
    dequantized_rows,
    quantization,
    quantized_values,
)
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.norms import row_norm_of
from tilewright.ops.runtime.operands import operand, operand_of


@dataclass(frozen=True)
class FusedCall:
    """One checked call of `fused_qkv_paged`: its arguments, its problem, and its tensors by the
    kernels' parameter names, without the result.

    rows: set where the three weights are rows of one tensor.
    """

    a: FusedQkvArguments
    values: dict[str, Any]
    problem: QkvProblem
    rows: WeightRows | None


def prepare(a: FusedQkvArguments) -> FusedCall:
    """Only metadata and addresses are looked at."""
    windows = window_views(a, writes_v=a.v_weight is not None)
    values = head_values(a, a.x.shape[0], *windows)
    weights = a.projections
    coded = weights[0].is_coded
    if coded:
        values |= quantized_values(a, weights)
    else:
        values |= {f"{letter}_weight_ptr": getattr(a, f"{letter}_weight") for letter in "qkv"}
        values["x_ptr"] = a.x
    values["input_norm_weight_ptr"] = a.input_norm_weight
    values["input_norm_bias_ptr"] = a.input_norm_bias
    problem = QkvProblem(
        hidden=a.x.shape[1],
        x=operand(a.x, a.x.stride(0)),
        weights=tuple(weight_operand(values[f"{letter}_weight_ptr"]) for letter in "qkv"),  # type: ignore[arg-type]
        epilogue=head_epilogue(a, values, a.q_weight.shape[:-2].numel(), a.value_dtype),
        one_descriptor=_in_reach(a.q_weight, a.k_weight, a.v_weight),
        quantization=quantization(a, weights, values) if coded else None,
        input_norm=row_norm_of(a, "input_"),
    )
    rows = dequantized_rows(weights) if coded else weight_rows(a.q_weight, a.k_weight, a.v_weight)
    return FusedCall(a, values, problem, rows)


def prepare_store(a: KvStoreArguments) -> tuple[EpilogueProblem, dict[str, Any]]:
    """The problem of a `paged_kv_store` call, and its tensors by the kernel's parameter names."""
    windows = window_views(a, writes_v=a.v is not None)
    values = head_values(a, a.k.shape[0], *windows)
    values |= {"q_out_ptr": None, "k_ptr": a.k, "v_ptr": a.v}
    return epilogue_problem(None, a.k, a.v, head_epilogue(a, values)), values


def epilogue_problem(
    q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor | None, epilogue: HeadEpilogue
) -> EpilogueProblem:
    """The epilogue of q [T, Hq, D] or [T, Hkv, G, D], k and v [T, Hkv, D] of any strides."""
    made = input_operand(k)
    assert made is not None
    return EpilogueProblem(input_operand(q), made, input_operand(v), epilogue)


def input_operand(t: torch.Tensor | None) -> Operand | None:
    if t is None:
        return None
    token, *group, head, dim = t.stride()
    return operand(t, token, *(group or (0,)), head, dim)


def window_views(a: Any, writes_v: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The K and V windows as tensors on the caller's memory; None where no V is written."""
    k_window = CacheWindow.from_ints(a.k_window).view(a.k_cache)
    if not writes_v:
        return k_window, None
    v_base = a.k_cache if a.v_cache is None else a.v_cache
    return k_window, CacheWindow.from_ints(a.v_window).view(v_base)


def head_values(
    a: Any, num_tokens: int, k_window: torch.Tensor, v_window: torch.Tensor | None
) -> dict[str, Any]:
    """Tensors and counts that every kernel of the family takes, by parameter name."""
    return {
        "k_cache_ptr": k_window,
        "v_cache_ptr": v_window,
        "k_cache_scale_ptr": a.k_cache_scale,
        "v_cache_scale_ptr": a.v_cache_scale,
        "q_bias_ptr": getattr(a, "q_bias", None),
        "k_bias_ptr": getattr(a, "k_bias", None),
        "v_bias_ptr": getattr(a, "v_bias", None),
        "delta_ptr": getattr(a, "delta", None),
        "q_norm_ptr": getattr(a, "q_norm_weight", None),
        "k_norm_ptr": getattr(a, "k_norm_weight", None),
        "q_norm_bias_ptr": getattr(a, "q_norm_bias", None),
        "k_norm_bias_ptr": getattr(a, "k_norm_bias", None),
        "cos_ptr": a.cos,
        "sin_ptr": a.sin,
        "num_tokens": num_tokens,
        "rope_tokens": 1 if a.cos is None else a.cos.shape[0],
        "num_pages": k_window.shape[0],
        **address_values(a),
    }


def head_epilogue(
    a: Any, values: dict[str, Any], num_heads: int = 0, dtype: torch.dtype | None = None
) -> HeadEpilogue:
    """The static part of what follows the projection. values: those of `head_values`. num_heads,
    dtype: of q, where there is one."""
    k_window, v_window = values["k_cache_ptr"], values["v_cache_ptr"]
    kv_repeat = getattr(a, "kv_repeat", 1)
    q_weight = getattr(a, "q_weight", None)
    counts = ("num_tokens", "rope_tokens", "sequence_tokens") if a.static_tokens else ()
    return HeadEpilogue(
        q_out=None if dtype is None else Operand(TRITON_TYPES[dtype]),
        num_heads=num_heads,
        num_kv_heads=k_window.shape[2] // kv_repeat,
        head_dim=k_window.shape[3],
        page_size=k_window.shape[1],
        k_cache=operand(k_window, *k_window.stride()),
        v_cache=None if v_window is None else operand(v_window, *v_window.stride()),
        addressing=addressing_operands(a, values),
        rope=_rope(a),
        biases=tuple(
            None if bias is None else operand(bias, *bias.stride()[:-1])
            for bias in (values[f"{letter}_bias_ptr"] for letter in "qkv")
        ),
        delta=operand_of(values["delta_ptr"], 0),
        norm=_norm(a, values),
        kv_repeat=kv_repeat,
        group=q_weight.shape[1] if q_weight is not None and q_weight.dim() == 4 else 0,
        gate_run=getattr(a, "gate_run", 0),
        clip=getattr(a, "clip", 0.0),
        cache_scales=(_per_head(a.k_cache_scale), _per_head(a.v_cache_scale)),
        scale_multiplies=a.cache_scale_multiplies,
        saturates=getattr(a, "cache_saturates", True),
        **{name: values[name] for name in counts},
    )


def _rope(a: Any) -> Rope | None:
    if a.cos is None:
        return None
    return Rope(
        style=a.rope_style,
        rotary_dim=a.rotary_dim,
        full_width=a.cos.shape[1] == a.rotary_dim,
        cos=operand(a.cos, a.cos.stride(0)),
        sin=operand(a.sin, a.sin.stride(0)),
    )


def _norm(a: Any, values: dict[str, Any]) -> Norm:
    if not hasattr(a, "norm_kind"):
        return Norm()
    q, k = values["q_norm_ptr"], values["k_norm_ptr"]
    return Norm(
        weights=(_per_head(q, 2), _per_head(k, 2)),
        kind=a.norm_kind,
        row=a.norm_width == "row",
        after_rope=a.norm_after_rope,
        offset=a.norm_offset,
        weightless=a.weightless_norm,
        biases=(_per_head(a.q_norm_bias, 2), _per_head(a.k_norm_bias, 2)),
        values=a.v_norm,
        eps=a.norm_eps,
    )


def _per_head(t: torch.Tensor | None, dims: int = 1) -> Operand | None:
    """An operand of `dims` dims where it has a row per head; stride 0 where the heads share one."""
    if t is None:
        return None
    own = t.dim() == dims and (dims > 1 or t.shape[0] > 1)
    return operand(t, t.stride(0) if own else 0)


def weight_operand(weight: torch.Tensor | None) -> Operand | None:
    """A weight [H, D, K] or [H / G, G, D, K]; the strides of axes of one element are free."""
    if weight is None:
        return None
    *group, head, row, column = weight.stride()
    if weight.shape[-1] == 1 or column == 1:
        column = 1
    elif weight.shape[-2] == 1:
        row = 1
    return operand(weight, *(group or (0,)), head, row, column)


def _in_reach(*weights: torch.Tensor | None) -> bool:
    addresses = [weight.data_ptr() for weight in weights if weight is not None]
    return max(addresses) - min(addresses) < 2**40
