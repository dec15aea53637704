"""`fused_qkv_paged`: the QKV projection, QK-norm and RoPE of one attention layer, with K and V
written straight into the caller's cache.

The three weights stay where the user has them: strided views [heads, head_dim, hidden], so that
separate, packed and per-head interleaved projections are one op and no weight is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.ops.cache.address_checks import check_values
from tilewright.ops.cache.checks import (
    HeadValues,
    check_caches,
    window_integers,
)
from tilewright.ops.cache.writes import write_kv
from tilewright.ops.checks import ArgumentError, check_absent, check_number, check_tensor, holds
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.formats.quantized_weight import dequantize, expand_blocks, logical_shape
from tilewright.ops.qkv.cases import QKV_CASES
from tilewright.ops.qkv.checks import (
    ACTIVATION_BLOCK,
    ACTIVATION_CODES,
    check_delta,
    check_projection,
    value_dtype,
)
from tilewright.ops.qkv.obstacles import STEPS, kernel_obstacle
from tilewright.ops.qkv.sample_weights import sample_projection
from tilewright.ops.qkv.samples import AttentionCase, sample_cache
from tilewright.ops.reference.norm import (
    apply_norm,
    apply_row_norm,
    check_norm,
    check_norm_weight,
    check_row_norm,
    row_norm_kind,
)
from tilewright.ops.reference.rope import apply_rope, check_rope
from tilewright.ops.reference.tolerances import ONE_ROUNDING, TOLERANCES
from tilewright.ops.runtime.program import Buffer
from tilewright.ops.sampling import Sampler
from tilewright.ops.schema import SymInt, Written

NAME = "fused_qkv_paged"
ERROR_MODEL = f"{ONE_ROUNDING}; x that is normed may be rounded to its dtype before the product"


@dataclass(frozen=True)
class FusedQkvArguments:
    """The arguments of `fused_qkv_paged`. T tokens, K hidden, D head_dim, N = H * D rows of a
    projection; "values" are of x's dtype, or of `out_dtype` where given.

    x [T, K], last dimension contiguous: values, or float8_e4m3fn codes (then weight_format="fp8",
    out_dtype is given, and x_scale, None for 1, is [T or 1, 1 or ceil(K / 128)]).
    q_weight [Hq, D, K], or [Hkv, G, D, K] where q heads lie in groups beside others;
    k_weight, v_weight [Hkv, D, K]. v_weight None: K alone is made and written. Biases [H, D], for a
    grouped q [Hkv, G, D]; they and other parameters are values or float32.

    gate_run: Hq counts gates too: gate_run queries, then gate_run gates, and so on (1 where a query
    has its gate beside it). Gates are projected, held to clip, and no more. 0: all are queries.

    weight_format:
      "dense"   values, with K or D contiguous, other strides free.
      "int8", "fp8" (float8_e4m3fn)   codes, any strides.
      "int4_k"  nibbles packed along K: [H, D, K / 2] uint8 or [H, D, K / 8] int32, any strides.
      "int4_n"  nibbles packed along D: [H, D / 2, K] uint8 or [H, D / 8, K] int32, any strides.
    A code means (code - zero) * scale. q_scale, k_scale, v_scale: float, [ceil(N / bn),
    ceil(K / bk)] with scale_block = [bn, bk]; a block as large as the weight is one scale per
    tensor. For int4, bk divides K. zero: zero_point, plus q_zero, k_zero, v_zero where given, of
    the shape of the scales, or int32 words of eight rows [N / (8 bn), K / bk].
    nibble_order: as in `formats.quantized_weight`; empty: counting up.

    delta [T, N of q, k and v], last dimension contiguous: added to the projections, columns of q,
    then k, then v; what `lora_expand_add` packs. Values or float32.

    clip: values are held to [-clip, clip] after bias and delta; 0: not. Norm: of q where
    q_norm_weight is given, of k where k_norm_weight is, of both where weightless_norm. norm_kind
    "rms" or "layer" (mean subtracted); norm_width "head" or "row" (all heads of the projection
    together); norm weights [D] or [H, D] ("row": [H, D]), each used as norm_offset + weight;
    q_norm_bias, k_norm_bias, shaped likewise, added after the norm of theirs; v_norm: v is normed
    too, without a weight (not beside gates); norm_after_rope. cos, sin [T_rope, R] or
    [T_rope, R / 2] with R = rotary_dim; rope_style as in `apply_rope`.

    k_cache, v_cache: base tensors, written, of values, float8_e4m3fn or float8_e5m2; v_cache None:
    V lives in k_cache too. k_window, v_window: the nine integers of a CacheWindow on the base, with
    Hkv * kv_repeat heads: head h is written to the heads from h * kv_repeat on. k_cache_scale,
    v_cache_scale: float32 [], [1] or [Hkv]; stored is value / scale, or value * scale where
    cache_scale_multiplies. What lies beyond an 8-bit float's range becomes its largest number where
    cache_saturates, else infinite, or NaN in float8_e4m3fn, as with PyTorch's plain cast.

    slots, indexing, slot_mapping [T] or [T / num_pages], lookup_table [B, columns], sequence_ids
    and positions [T], row_offsets [B + 1], cache_lengths [B]: as in `ops.cache.addressing`; int32
    or int64, for slots="ragged" uint32 too. static_tokens: T is a constant of the caller's graph; a
    kernel may be built for it alone. tune: measure the lowerings on the GPU at first need.

    input_rms_norm: before the projection x, which has no codes then, is divided by the root of the
    mean of its squares plus input_norm_eps, and multiplied by input_norm_offset +
    input_norm_weight [K] where that is given, of x's dtype or float32, any stride.
    input_layer_norm, instead: the row's mean is subtracted from x before that, and input_norm_bias
    [K], where that is given, added behind.

    Bad values (slots, sequences, positions, offsets and pages that name no place or one twice,
    scales that are NaN, infinite or 0) raise ArgumentError before anything is written where they
    are on the CPU, and under TILEWRIGHT_DEBUG=1 on a GPU; else a token without a place on a GPU is
    not written.
    """

    x: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    v_weight: torch.Tensor | None
    k_cache: Written
    v_cache: Written | None
    slot_mapping: torch.Tensor | None
    k_window: Sequence[SymInt]
    v_window: Sequence[SymInt]
    _: KW_ONLY
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    q_norm_weight: torch.Tensor | None = None
    k_norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-06
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rotary_dim: int = 0
    rope_style: str = "none"
    slots: str = "flat"
    indexing: str = "paged"
    static_tokens: bool = False
    kv_repeat: int = 1
    gate_run: int = 0
    clip: float = 0.0
    weightless_norm: bool = False
    norm_kind: str = "rms"
    norm_width: str = "head"
    norm_after_rope: bool = False
    norm_offset: float = 0.0
    q_norm_bias: torch.Tensor | None = None
    k_norm_bias: torch.Tensor | None = None
    v_norm: bool = False
    weight_format: str = "dense"
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_zero: torch.Tensor | None = None
    k_zero: torch.Tensor | None = None
    v_zero: torch.Tensor | None = None
    zero_point: int = 0
    scale_block: Sequence[int] = ()
    nibble_order: Sequence[int] = ()
    x_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    k_cache_scale: torch.Tensor | None = None
    v_cache_scale: torch.Tensor | None = None
    cache_scale_multiplies: bool = False
    cache_saturates: bool = True
    lookup_table: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    row_offsets: torch.Tensor | None = None
    cache_lengths: torch.Tensor | None = None
    tune: bool = False
    input_rms_norm: bool = False
    input_norm_weight: torch.Tensor | None = None
    input_norm_eps: float = 1e-06
    input_norm_offset: float = 0.0
    input_layer_norm: bool = False
    input_norm_bias: torch.Tensor | None = None


def validate(a: FusedQkvArguments) -> None:
    check_projection(NAME, a)
    dtype, device = value_dtype(a), a.x.device
    num_tokens, head_dim, num_kv_heads = a.x.shape[0], _head_dim(a), a.k_weight.shape[0]
    kind = row_norm_kind(a, "input_")
    if kind and a.x.dtype == ACTIVATION_CODES:
        raise ArgumentError(NAME, f"input_{kind}_norm", "False, since x has codes", True)
    check_row_norm(NAME, a, "[K]", a.x.shape[1], prefix="input_")
    check_delta(NAME, a.delta, num_tokens, _num_rows(a), dtype, device)
    check_number(NAME, "kv_repeat", a.kv_repeat, 1)
    check_number(NAME, "clip", a.clip, 0.0)
    _check_gates(a)
    check_norm(NAME, a.norm_kind, a.norm_width, a.norm_eps, a.norm_offset)
    for letter, heads in (("q", _num_heads(a)), ("k", num_kv_heads)):
        for name in (f"{letter}_norm_weight", f"{letter}_norm_bias"):
            vector = getattr(a, name)
            check_norm_weight(NAME, name, vector, a.norm_width, heads, head_dim, dtype, device)
        if getattr(a, f"{letter}_norm_weight") is None and not a.weightless_norm:
            check_absent(NAME, a, [f"{letter}_norm_bias"], f"{letter} is not normed")
    rope = (a.cos, a.sin, a.rotary_dim, a.rope_style)
    check_rope(NAME, num_tokens, head_dim, *rope, dtype, device)
    values = HeadValues(num_tokens, num_kv_heads, head_dim, dtype, device, a.kv_repeat)
    check_caches(NAME, a, values, writes_v=a.v_weight is not None)


def _check_gates(a: FusedQkvArguments) -> None:
    check_number(NAME, "gate_run", a.gate_run, 0)
    if a.gate_run == 0:
        return
    if not holds(_num_heads(a) % (2 * a.gate_run) == 0):
        expected = f"half of a divisor of the {_num_heads(a)} heads of q"
        raise ArgumentError(NAME, "gate_run", expected, str(a.gate_run))
    if a.norm_width == "row":
        raise ArgumentError(NAME, "norm_width", "'head' beside gates", repr(a.norm_width))
    if a.v_norm:
        raise ArgumentError(NAME, "v_norm", "False beside gates", "True")


def _num_heads(a: FusedQkvArguments) -> Any:
    shape = a.q_weight.shape
    return shape[0] if len(shape) == 3 else shape[0] * shape[1]


def _num_rows(a: FusedQkvArguments) -> Any:
    """Rows of q, k and v together."""
    kinds = 1 if a.v_weight is None else 2
    return (_num_heads(a) + kinds * a.k_weight.shape[0]) * _head_dim(a)


def _head_dim(a: FusedQkvArguments) -> Any:
    return logical_shape(a.q_weight, a.weight_format)[-2]


def validate_values(a: FusedQkvArguments) -> None:
    check_values(NAME, a, a.x.shape[0], writes_v=a.v_weight is not None)


def result_buffer(a: FusedQkvArguments) -> Buffer:
    """Memory for q."""
    return Buffer((a.x.shape[0], _num_heads(a), _head_dim(a)), value_dtype(a))


def fake(a: FusedQkvArguments) -> torch.Tensor:
    made = result_buffer(a)
    return a.x.new_empty(tuple(made.shape), dtype=made.dtype)


def reference(a: FusedQkvArguments) -> torch.Tensor:
    """In fp32 (float64 for float64 values), for token t; quantised inputs are dequantised first:

        y = x / sqrt(mean(x^2) + input_norm_eps) * (input_norm_offset + input_norm_weight)
        q = rope(norm(clip(y @ q_weight^T + q_bias + delta[q columns])))
        k = rope(norm(clip(y @ k_weight^T + k_bias + delta[k columns])))
        v = norm(clip(y @ v_weight^T + v_bias + delta[v columns]))
        gates = clip(y @ q_weight^T + q_bias + delta[q columns]), in q's place where gate_run says
        result[t] = q[t]
        k_cache[slot of t] = k[t] / k_cache_scale
        v_cache[slot of t] = v[t] / v_cache_scale

    input_layer_norm: x - mean(x) in place of x, and y + input_norm_bias of y. A step without its
    arguments is left out (the norm of v: without v_norm; y = x without a norm of x).
    norm_after_rope: norm(rope(...)). cache_scale_multiplies: times the scale. Each number is
    rounded once, when it is stored.
    """
    x = _input(a)
    made = _project(a, x, "q")
    q = _normed_and_rotated(a, made, a.q_norm_weight, a.q_norm_bias)
    if a.gate_run:
        heads = torch.arange(made.shape[1], device=made.device)
        q = torch.where((heads // a.gate_run % 2 == 1)[:, None], made, q)
    k = _normed_and_rotated(a, _project(a, x, "k"), a.k_norm_weight, a.k_norm_bias)
    v = None if a.v_weight is None else _project(a, x, "v")
    if v is not None and a.v_norm:
        v = apply_norm(v, None, a.norm_eps, a.norm_kind, a.norm_width)
    write_kv(a, k, v, a.kv_repeat)
    return fake(a).copy_(q)


def _input(a: FusedQkvArguments) -> torch.Tensor:
    """x in compute precision, its codes scaled, or normed."""
    x = a.x.to(torch.promote_types(value_dtype(a), torch.float32))
    if a.x_scale is None:
        return apply_row_norm(x, a, "input_")
    block = (1, x.shape[1] if a.x_scale.shape[1] == 1 else ACTIVATION_BLOCK)
    return x * expand_blocks(a.x_scale.to(x.dtype), x.shape, block)


def _project(a: FusedQkvArguments, x: torch.Tensor, letter: str) -> torch.Tensor:
    """[T, H, D]: product, bias, delta, clip."""
    weight, bias = getattr(a, f"{letter}_weight"), getattr(a, f"{letter}_bias")
    if a.weight_format != "dense":
        scale, zero = getattr(a, f"{letter}_scale"), getattr(a, f"{letter}_zero")
        code = (a.zero_point, a.scale_block, a.nibble_order, x.dtype)
        weight = dequantize(weight, a.weight_format, scale, zero, *code)
    weight = weight.flatten(0, -3)
    out = torch.einsum("tk,hdk->thd", x, weight.to(x.dtype))
    if bias is not None:
        out = out + bias.to(x.dtype).flatten(0, -2)
    if a.delta is not None:
        q, kv = (heads * _head_dim(a) for heads in (_num_heads(a), a.k_weight.shape[0]))
        first = {"q": 0, "k": q, "v": q + kv}[letter]
        part = a.delta[:, first : first + (q if letter == "q" else kv)]
        out = out + part.to(x.dtype).view(out.shape)
    return out.clamp(-a.clip, a.clip) if a.clip else out


def _normed_and_rotated(
    a: FusedQkvArguments,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    if a.norm_after_rope:
        return _norm(a, _rotate(a, x), weight, bias)
    return _rotate(a, _norm(a, x, weight, bias))


def _norm(
    a: FusedQkvArguments,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    if weight is None and not a.weightless_norm:
        return x
    x = apply_norm(x, weight, a.norm_eps, a.norm_kind, a.norm_width, a.norm_offset)
    return x if bias is None else x + bias.to(x.dtype)


def _rotate(a: FusedQkvArguments, x: torch.Tensor) -> torch.Tensor:
    if a.cos is None or a.sin is None:
        return x
    return apply_rope(x, a.cos, a.sin, a.rotary_dim, a.rope_style)


def sample_inputs(
    case: AttentionCase, device: str | torch.device = "cpu", seed: int = 0
) -> FusedQkvArguments:
    """Random arguments of a case; the caches hold random numbers, so a stray write shows."""
    sampler = Sampler(device, seed)
    values = {**sample_projection(case, sampler), **sample_cache(case, sampler)}
    if not case.writes_v:
        values |= {"v_weight": None, "v_bias": None, "v_scale": None, "v_zero": None}
    return FusedQkvArguments(**values)


OP = register(
    FusedOp(
        name=NAME,
        arguments=FusedQkvArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel(f"{STEPS}:fused_qkv_paged_steps", kernel_obstacle),),
        cases=(*QKV_CASES, AttentionCase("k_only", writes_v=False, bias=True)),
        sample_inputs=sample_inputs,
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        plan=f"{STEPS}:plan_fused_qkv_paged",
    )
)


def fused_qkv_paged(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None = None,
    *,
    head_dim: int | None = None,
    k_window: CacheWindow | None = None,
    v_window: CacheWindow | None = None,
    **options: Any,
) -> torch.Tensor:
    """The op, called by hand: projects x, writes K and V to their slots, returns q [T, Hq, D].

    Weights are [H, D, K], or [H * D, K] with `head_dim` given (nn.Linear's layout; biases then
    [H * D]). A window left out means a cache [num_pages, page_size, num_kv_heads, head_dim]. The
    other options are the op's own: see FusedQkvArguments. Raises ArgumentError before anything is
    written. Not differentiable.
    """
    given = {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    weights = [_by_head(name, weight, 2, head_dim) for name, weight in given.items()]
    for name in ("q_bias", "k_bias", "v_bias"):
        if name in options:
            options[name] = _by_head(name, options[name], 1, head_dim)
    k_ints = window_integers(NAME, "k_window", k_window, k_cache)
    v_ints = [] if v_weight is None else window_integers(NAME, "v_window", v_window, v_cache)
    return OP.torch_op(x, *weights, k_cache, v_cache, slot_mapping, k_ints, v_ints, **options)


def _by_head(
    name: str, tensor: torch.Tensor | None, joint_rank: int, head_dim: int | None
) -> torch.Tensor | None:
    """A weight or bias whose first axis has heads and their columns in one, [H, D, ...]."""
    if tensor is None or head_dim is None:
        return tensor
    check_tensor(NAME, name, tensor)
    if tensor.dim() != joint_rank:
        return tensor
    if not (isinstance(head_dim, int) and head_dim >= 1 and tensor.shape[0] % head_dim == 0):
        expected = f"a head_dim that divides the {tensor.shape[0]} rows of {name}"
        raise ArgumentError(NAME, "head_dim", expected, repr(head_dim))
    return tensor.unflatten(0, (-1, head_dim))
