"""From the arguments of the attention ops to a static problem and the kernels' run-time values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tilewright.codegen.formats import Quantization
from tilewright.codegen.operand import Operand
from tilewright.codegen.qkv.problem import EpilogueProblem, HeadEpilogue, Norm, QkvProblem, Rope
from tilewright.ops.cache.addressing import address_values, addressing_operands
from tilewright.ops.cache.checks import kv_views
from tilewright.ops.formats.code_operands import blocks_operand, code_words, quantization_of
from tilewright.ops.formats.weight_rows import WeightRows, weight_rows
from tilewright.ops.qkv.arguments import (
    ACTIVATION_BLOCK,
    LETTERS,
    FusedQkvArguments,
    KvStoreArguments,
    Projections,
)
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.norms import row_norm_of
from tilewright.ops.runtime.operands import operand, operand_of
from tilewright.ops.runtime.program import Buffer

# What the kernel of `paged_kv_store` has no tensors for.
_OF_PROJECTIONS = (
    "q_out_ptr", "q_bias_ptr", "k_bias_ptr", "v_bias_ptr", "delta_ptr",
    "q_norm_ptr", "k_norm_ptr", "q_norm_bias_ptr", "k_norm_bias_ptr",
)  # fmt: skip


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
    values = cache_values(a, a.x.shape[0], writes_v=a.v_weight is not None)
    values |= projection_values(a)
    weights = a.projections if a.is_coded else None
    if weights is not None:
        values |= quantized_values(a, weights)
    else:
        values["q_weight_ptr"], values["k_weight_ptr"] = a.q_weight, a.k_weight
        values["v_weight_ptr"], values["x_ptr"] = a.v_weight, a.x
    values["input_norm_weight_ptr"] = a.input_norm_weight
    values["input_norm_bias_ptr"] = a.input_norm_bias
    problem = QkvProblem(
        hidden=a.x.shape[1],
        x=operand(a.x, a.x.stride(0)),
        weights=tuple(weight_operand(values[f"{letter}_weight_ptr"]) for letter in "qkv"),  # type: ignore[arg-type]
        epilogue=head_epilogue(a, values),
        one_descriptor=_in_reach(a.q_weight, a.k_weight, a.v_weight),
        quantization=None if weights is None else quantization(a, weights, values),
        input_norm=row_norm_of(a.input_norm),
    )
    if weights is None:
        rows = weight_rows(a.q_weight, a.k_weight, a.v_weight)
    else:
        rows = dequantized_rows(weights)
    return FusedCall(a, values, problem, rows)


def result_buffer(a: FusedQkvArguments) -> Buffer:
    """Memory for q."""
    return Buffer((a.x.shape[0], a.num_heads, a.head_dim), a.value_dtype)


def prepare_store(a: KvStoreArguments) -> tuple[EpilogueProblem, dict[str, Any]]:
    """The problem of a `paged_kv_store` call, and its tensors by the kernel's parameter names."""
    values = cache_values(a, a.k.shape[0], writes_v=a.v is not None)
    epilogue = HeadEpilogue(q_out=None, num_heads=0, **_store_epilogue(a, values))
    values |= {**dict.fromkeys(_OF_PROJECTIONS), "k_ptr": a.k, "v_ptr": a.v}
    return epilogue_problem(None, a.k, a.v, epilogue), values


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


def cache_values(
    a: FusedQkvArguments | KvStoreArguments, num_tokens: int, *, writes_v: bool
) -> dict[str, Any]:
    """Tensors and counts that every kernel of the family takes, by parameter name."""
    k_window, v_window = kv_views(a, writes_v=writes_v)
    return {
        "k_cache_ptr": k_window,
        "v_cache_ptr": v_window,
        "k_cache_scale_ptr": a.k_cache_scale,
        "v_cache_scale_ptr": a.v_cache_scale,
        "cos_ptr": a.cos,
        "sin_ptr": a.sin,
        "num_tokens": num_tokens,
        "rope_tokens": 1 if a.cos is None else a.cos.shape[0],
        "num_pages": k_window.shape[0],
        **address_values(a),
    }


def projection_values(a: FusedQkvArguments) -> dict[str, Any]:
    """What is added to projections and what norms them, by parameter name."""
    return {
        "q_bias_ptr": a.q_bias,
        "k_bias_ptr": a.k_bias,
        "v_bias_ptr": a.v_bias,
        "delta_ptr": a.delta,
        "q_norm_ptr": a.q_norm_weight,
        "k_norm_ptr": a.k_norm_weight,
        "q_norm_bias_ptr": a.q_norm_bias,
        "k_norm_bias_ptr": a.k_norm_bias,
    }


def head_epilogue(a: FusedQkvArguments, values: dict[str, Any]) -> HeadEpilogue:
    """The static part of what follows the projection. values: those of `cache_values`."""
    q, biases = a.q_weight, (a.q_bias, a.k_bias, a.v_bias)
    return HeadEpilogue(
        **_store_epilogue(a, values, a.kv_repeat),
        q_out=Operand(TRITON_TYPES[a.value_dtype]),
        num_heads=a.num_heads,
        biases=tuple(
            bias if bias is None else operand(bias, *bias.stride()[:-1]) for bias in biases
        ),
        delta=operand_of(a.delta, 0),
        norm=_norm(a),
        kv_repeat=a.kv_repeat,
        group=q.shape[1] if q.dim() == 4 else 0,
        gate_run=a.gate_run,
        clip=a.clip,
    )


def _store_epilogue(
    a: FusedQkvArguments | KvStoreArguments, values: dict[str, Any], kv_repeat: int = 1
) -> dict[str, Any]:
    """The part of an epilogue that rotates and stores, by field."""
    k_window, v_window = values["k_cache_ptr"], values["v_cache_ptr"]
    counts = ("num_tokens", "rope_tokens", "sequence_tokens") if a.static_tokens else ()
    return {
        "num_kv_heads": k_window.shape[2] // kv_repeat,
        "head_dim": k_window.shape[3],
        "page_size": k_window.shape[1],
        "k_cache": operand(k_window, *k_window.stride()),
        "v_cache": None if v_window is None else operand(v_window, *v_window.stride()),
        "addressing": addressing_operands(a, values),
        "rope": _rope(a),
        "cache_scales": (_per_head(a.k_cache_scale), _per_head(a.v_cache_scale)),
        "scale_multiplies": a.cache_scale_multiplies,
        "saturates": a.cache_saturates,
        **{name: values[name] for name in counts},
    }


def _rope(a: FusedQkvArguments | KvStoreArguments) -> Rope | None:
    if a.cos is None or a.sin is None:
        return None
    return Rope(
        style=a.rope_style,
        rotary_dim=a.rotary_dim,
        full_width=a.cos.shape[1] == a.rotary_dim,
        cos=operand(a.cos, a.cos.stride(0)),
        sin=operand(a.sin, a.sin.stride(0)),
    )


def _norm(a: FusedQkvArguments) -> Norm:
    return Norm(
        weights=(_per_head(a.q_norm_weight, 2), _per_head(a.k_norm_weight, 2)),
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


# --- weights of codes ---------------------------------------------------------------------------


def quantized_values(a: FusedQkvArguments, weights: Projections) -> dict[str, Any]:
    """The tensors that `qkv_quantized` takes beside those of `projection_values`, by parameter
    name. weights: the projections of `a`, here and below."""
    words = zip(LETTERS, code_words(weights), strict=True)
    return {
        "x_ptr": a.x,
        "x_scale_ptr": a.x_scale,
        **{f"{x}_weight_ptr": word for x, word in words},
        **{
            f"{x}_{what}_ptr": getattr(a, f"{x}_{what}")
            for what in ("scale", "zero")
            for x in LETTERS
        },
    }


def quantization(
    a: FusedQkvArguments, weights: Projections, values: dict[str, Any]
) -> Quantization:
    """The static data of quantised arguments, whose `quantized_values` are given; what q, k and v
    do not share is in `differs`."""
    per_token = a.x_scale is not None and a.x_scale.shape[1] == 1
    return replace(
        quantization_of(weights, values["q_weight_ptr"].dtype),
        x_scale=blocks_operand(a.x_scale),
        x_block=a.x.shape[1] if per_token else ACTIVATION_BLOCK if a.x_scale is not None else 0,
    )


def dequantized_rows(weights: Projections) -> WeightRows:
    """How q, k and v lie in the tensor that `dequantized_weights` makes: one after the other."""
    shapes = [weight.shape[:-1] for weight in weights if weight is not None]
    firsts = [0]
    for shape in shapes:
        firsts.append(firsts[-1] + prod(shape))
    steps = tuple((*(group * dim for group in groups), dim) for _, *groups, dim in shapes)
    return WeightRows(firsts[-1], tuple(firsts[:-1]), steps)
