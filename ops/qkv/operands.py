"""Converts the arguments of the attention ops to a static problem, and to the run-time values of
kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch

from tilewright.codegen.formats import Quantization
from tilewright.codegen.operand import Operand
from tilewright.codegen.qkv.problem import HeadEpilogue, QkvProblem
from tilewright.ops.cache.addressing import address_values
from tilewright.ops.cache.checks import kv_views
from tilewright.ops.formats.activation_codes import ACTIVATION_BLOCK
from tilewright.ops.formats.code_operands import blocks_operand, code_words, quantization_of
from tilewright.ops.formats.weight_rows import WeightRows, weight_rows
from tilewright.ops.qkv.arguments import (
    FusedQkvArguments,
    KvStoreArguments,
    Projections,
)
from tilewright.ops.qkv.library import scaled_operands
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.norms import row_norm_of
from tilewright.ops.runtime.operands import operand
from tilewright.ops.runtime.program import Buffer

# Kernel parameters that are not arguments of both ops. They are None if a call does not set them.
_ABSENT = dict.fromkeys(
    ("q", "x_scale", "q_out", "q_bias", "k_bias", "v_bias", "delta", "q_norm", "k_norm",
     "workspace", "counters", "num_sequences", "lookup_columns", "lookup_stride"),
)  # fmt: skip
_COUNTS = ("num_tokens", "rope_tokens", "sequence_tokens")


# HeadEpilogue is cached, because a look-up is faster than making the record.
_epilogue = cache(HeadEpilogue)


@dataclass(frozen=True)
class StoreCall:
    """The inputs of a kernel that stores heads in a cache, except the heads themselves. The inputs
    are made from a checked call.

    Attributes:
        values: Tensors and numbers by name. Arguments have the same names as kernel parameters.
        known: The numbers that are constants of the kernel.
        epilogue: The epilogue of the heads.
    """

    values: dict[str, Any]
    known: dict[str, int]
    epilogue: HeadEpilogue


@dataclass(frozen=True)
class FusedCall(StoreCall):
    """One checked call of `fused_qkv_paged`: its arguments and its problem.

    rows: where the three weights are, if they are rows of one tensor; None if they are not.
    """

    a: FusedQkvArguments
    problem: QkvProblem
    rows: WeightRows | None


def prepare(a: FusedQkvArguments) -> FusedCall:
    """Converts a call. Reads only metadata and addresses."""
    tensors = (a.q_weight, a.k_weight, a.v_weight)
    weights = a.projections if a.is_coded else None
    words = tensors if weights is None else code_words(weights)
    values, known, epilogue = _stored(a, a.x.shape[0], **_added(a))
    values["q_weight"], values["k_weight"], values["v_weight"] = words
    values["q_norm"], values["k_norm"] = a.q_norm_weight, a.k_norm_weight
    problem = QkvProblem(
        hidden=a.x.shape[1],
        x=operand(a.x, a.x.stride(0)),
        weights=tuple([weight_operand(one) for one in words]),  # type: ignore[arg-type]
        epilogue=epilogue,
        one_descriptor=_in_reach(*tensors),
        quantization=None
        if weights is None
        else quantization(a, weights, values["q_weight"].dtype),
        input_norm=row_norm_of(a.input_norm),
        scaled_by=_scaled_by(a),
    )
    rows = weight_rows(*tensors) if weights is None else dequantized_rows(weights)
    return FusedCall(values, known, epilogue, a, problem, rows)


def _scaled_by(a: FusedQkvArguments) -> str:
    operands = scaled_operands(a)
    return "" if operands is None else operands[0].kind or ""


def result_buffer(a: FusedQkvArguments) -> Buffer:
    """Returns the buffer that receives q."""
    return Buffer((a.x.shape[0], a.num_heads, a.head_dim), a.value_dtype)


def prepare_store(a: KvStoreArguments) -> StoreCall:
    """Converts a `paged_kv_store` call."""
    dtype, writes_v = TRITON_TYPES[a.k.dtype], a.v is not None
    return StoreCall(*_stored(a, a.k.shape[0], dtype=dtype, num_heads=0, writes_v=writes_v))


def input_strides(
    q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor | None
) -> dict[str, tuple[int, ...]]:
    """Returns the constant strides (token, group, head, dim) of q [T, Hq, D] or [T, Hkv, G, D], k
    and v [T, Hkv, D]."""
    made = {}
    for letter, given in (("Q", q), ("K", k), ("V", v)):
        token, *group, head, dim = (k if given is None else given).stride()
        made[f"{letter}_IN_STRIDES"] = (token, *(group or (0,)), head, dim)
    return made


def _stored(
    a: FusedQkvArguments | KvStoreArguments, num_tokens: int, **own: Any
) -> tuple[dict[str, Any], dict[str, int], HeadEpilogue]:
    """Returns the fields of a StoreCall. own: the fields of the epilogue that depend on the op."""
    k_cache, v_cache = kv_views(a, writes_v=own["writes_v"])
    num_pages, page_size, heads, head_dim = k_cache.shape
    values = {
        **_ABSENT,
        **vars(a),
        **address_values(a),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "num_tokens": num_tokens,
        "rope_tokens": 1 if a.cos is None else a.cos.shape[0],
        "num_pages": num_pages,
    }
    known = {name: values[name] for name in _COUNTS} if a.static_tokens else {}
    k_strides = k_cache.stride()
    epilogue = _epilogue(
        num_kv_heads=heads // own.get("kv_repeat", 1),
        head_dim=head_dim,
        page_size=page_size,
        cache_dtype=TRITON_TYPES[k_cache.dtype],
        k_strides=k_strides,
        v_strides=k_strides if v_cache is None else v_cache.stride(),
        addressing=a.slots,
        wrap_negative=a.indexing == "torch",
        search_steps=values["slots"].shape[0].bit_length() if a.slots == "ragged" else 0,
        scale_strides=(_per_head(a.k_cache_scale), _per_head(a.v_cache_scale)),
        scale_multiplies=a.cache_scale_multiplies,
        saturates=a.cache_saturates,
        num_tokens=known.get("num_tokens"),
        **_rotation(a),
        **own,
    )
    return values, known, epilogue


def _rotation(a: FusedQkvArguments | KvStoreArguments) -> dict[str, Any]:
    """Returns the fields of the epilogue that describe the rotation."""
    if a.cos is None:
        return {}
    return {
        "rope_style": a.rope_style,
        "rotary_dim": a.rotary_dim,
        "rope_full_width": a.cos.shape[1] == a.rotary_dim,
        "wide_tables": a.cos.dtype == torch.float32,
    }


def _added(a: FusedQkvArguments) -> dict[str, Any]:
    """Returns the fields of the epilogue that describe norms, and the fields for values that are
    added to projections."""
    weights, biases = (a.q_norm_weight, a.k_norm_weight), (a.q_norm_bias, a.k_norm_bias)
    any_bias = any(bias is not None for bias in biases)
    return {
        "dtype": TRITON_TYPES[a.value_dtype],
        "num_heads": a.num_heads,
        "writes_v": a.v_weight is not None,
        "group": a.q_weight.shape[1] if a.q_weight.dim() == 4 else 0,
        "bias_strides": _bias_strides(a.q_bias, a.k_bias, a.v_bias),
        "has_delta": a.delta is not None,
        "normed": tuple([a.weightless_norm or weight is not None for weight in weights]),
        "v_normed": a.v_norm,
        "norm_kind": a.norm_kind,
        "norm_width": a.norm_width,
        "norm_after_rope": a.norm_after_rope,
        "norm_eps": a.norm_eps,
        "norm_offset": a.norm_offset,
        "norm_strides": tuple([_per_head(weight, 2) for weight in weights]),
        "norm_bias_strides": tuple([_per_head(bias, 2) for bias in biases]) if any_bias else None,
        "kv_repeat": a.kv_repeat,
        "gate_run": a.gate_run,
        "clip": a.clip,
    }


def _bias_strides(q: torch.Tensor | None, *others: torch.Tensor | None) -> tuple[int, ...]:
    group = q.stride(0) if q is not None and q.dim() == 3 else 0
    return (group, *(0 if bias is None else bias.stride(-2) for bias in (q, *others)))


def _per_head(t: torch.Tensor | None, dims: int = 1) -> int:
    """Returns the stride between heads of a tensor that has `dims` dimensions and a row for each
    head. Returns 0 if all heads share one row, or if there is no tensor."""
    if t is None or t.dim() != dims or (dims == 1 and t.shape[0] == 1):
        return 0
    return t.stride(0)


def weight_operand(weight: torch.Tensor | None) -> Operand | None:
    """Returns a weight [H, D, K] or [H / G, G, D, K] as an operand. The strides of axes of length
    one are arbitrary."""
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


def quantization(a: FusedQkvArguments, weights: Projections, words: torch.dtype) -> Quantization:
    """Returns the static data of quantised arguments. words: the dtype in which kernels read the
    codes. If q, k and v differ in a property, `differs` describes it."""
    per_token = a.x_scale is not None and a.x_scale.shape[1] == 1
    return replace(
        quantization_of(weights, words),
        x_scale=blocks_operand(a.x_scale),
        x_block=a.x.shape[1] if per_token else ACTIVATION_BLOCK if a.x_scale is not None else 0,
    )


def dequantized_rows(weights: Projections) -> WeightRows:
    """Returns the rows of q, k and v in the tensor that `dequantized_weights` makes. The rows of q,
    k and v follow each other."""
    shapes = [weight.shape[:-1] for weight in weights if weight is not None]
    firsts = [0]
    for shape in shapes:
        firsts.append(firsts[-1] + prod(shape))
    steps = tuple((*(group * dim for group in groups), dim) for _, *groups, dim in shapes)
    return WeightRows(firsts[-1], tuple(firsts[:-1]), steps)
