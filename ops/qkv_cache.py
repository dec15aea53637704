"""`fused_qkv_paged`: the QKV projection, QK-norm and RoPE of one attention layer, with K and V
written straight into the caller's cache.

    acc = x @ weight^T          fp32
    acc = acc + bias            where given
    acc = rms_norm(acc)         q and k, over head_dim, where a norm weight is given
    acc = rope(acc)             q and k
    q -> result; k, v -> the token's slot; each rounded once

The three weights stay where the user has them: strided views [heads, head_dim, hidden], so that
separate, packed and per-head interleaved projections are one op and no weight is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.ops.cache_checks import check_caches, check_values, whole_cache
from tilewright.ops.checks import (
    ArgumentError,
    check_device,
    check_dtype,
    check_last_dim_dense,
    check_shape,
)
from tilewright.ops.contract import FusedOp, register
from tilewright.ops.formats.paged_cache import CacheWindow, write_tokens
from tilewright.ops.lowering_rules import ONE_ROUNDING, TOLERANCES, emitted_kernel
from tilewright.ops.rope import apply_rope, check_rope
from tilewright.ops.samples import (
    ATTENTION_CASES,
    AttentionCase,
    Sampler,
    sample_cache,
    sample_weights,
)

NAME = "fused_qkv_paged"
SCHEMA = (
    "(Tensor x, Tensor q_weight, Tensor k_weight, Tensor? v_weight, Tensor(a!) k_cache, "
    "Tensor(b!)? v_cache, Tensor? slot_mapping, SymInt[] k_window, SymInt[] v_window, *, "
    "Tensor? q_bias=None, Tensor? k_bias=None, Tensor? v_bias=None, Tensor? q_norm_weight=None, "
    "Tensor? k_norm_weight=None, float norm_eps=1e-06, Tensor? cos=None, Tensor? sin=None, "
    'int rotary_dim=0, str rope_style="none", str slots="flat", str indexing="paged", '
    "bool static_tokens=False, int kv_repeat=1, float clip=0.0, bool weightless_norm=False, "
    'str norm_kind="rms", str norm_width="head", bool norm_after_rope=False, '
    'float norm_offset=0.0, str weight_format="dense", Tensor? q_scale=None, '
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? q_zero=None, Tensor? k_zero=None, "
    "Tensor? v_zero=None, int zero_point=0, int[] scale_block=[], int[] nibble_order=[], "
    "Tensor? x_scale=None, ScalarType? out_dtype=None, Tensor? k_cache_scale=None, "
    "Tensor? v_cache_scale=None, bool cache_scale_multiplies=False, Tensor? lookup_table=None, "
    "Tensor? sequence_ids=None, Tensor? positions=None, Tensor? row_offsets=None, "
    "Tensor? cache_lengths=None) -> Tensor"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class FusedQkvArguments:
    """The arguments of `fused_qkv_paged`; shapes in letters: T tokens, K hidden, D head_dim.

    x [T, K]; q_weight [Hq, D, K]; k_weight, v_weight [Hkv, D, K]: last dimension contiguous,
    other strides free. k_cache, v_cache: base tensors of x's dtype, written; v_cache None: V lives
    in k_cache too. k_window, v_window: the nine integers of a CacheWindow on the base.
    slot_mapping: int32 or int64, [T] (slots="flat") or [T / num_pages] (slots="per_sequence").
    Biases [H, D]; norm weights [D]; cos, sin [T_rope, R] or [T_rope, R/2] with R = rotary_dim.
    static_tokens: T is a constant of the caller's graph; a kernel may be built for it alone.
    """

    x: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    v_weight: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    slot_mapping: torch.Tensor | None
    k_window: Sequence[Any]
    v_window: Sequence[Any]
    _: KW_ONLY
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
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
    clip: float = 0.0
    weightless_norm: bool = False
    norm_kind: str = "rms"
    norm_width: str = "head"
    norm_after_rope: bool = False
    norm_offset: float = 0.0
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
    lookup_table: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    row_offsets: torch.Tensor | None = None
    cache_lengths: torch.Tensor | None = None


def validate(a: FusedQkvArguments) -> None:
    check_dtype(NAME, "x", a.x, DTYPES)
    check_shape(NAME, "x", a.x, "[T, K]", (None, None))
    check_last_dim_dense(NAME, "x", a.x)
    _check_weights(a)
    num_tokens, head_dim = a.x.shape[0], a.q_weight.shape[1]
    _check_norm(a, "q_norm_weight", a.q_norm_weight)
    _check_norm(a, "k_norm_weight", a.k_norm_weight)
    rope = (a.cos, a.sin, a.rotary_dim, a.rope_style)
    check_rope(NAME, num_tokens, head_dim, *rope, like=a.x)
    check_caches(NAME, a, num_tokens, a.k_weight.shape[0], head_dim, like=a.x)


def _check_weights(a: FusedQkvArguments) -> None:
    hidden = a.x.shape[1]
    check_shape(NAME, "q_weight", a.q_weight, "[Hq, D, K]", (None, None, hidden))
    num_heads, head_dim, _ = a.q_weight.shape
    check_shape(NAME, "k_weight", a.k_weight, "[Hkv, D, K]", (None, head_dim, hidden))
    num_kv_heads = a.k_weight.shape[0]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        expected = f"num_kv_heads that divides num_heads = {num_heads}"
        raise ArgumentError(NAME, "k_weight", expected, f"{num_kv_heads} heads")
    kv_shape = (num_kv_heads, head_dim, hidden)
    check_shape(NAME, "v_weight", a.v_weight, "[Hkv, D, K]", kv_shape)
    for letter, weight in (("q", a.q_weight), ("k", a.k_weight), ("v", a.v_weight)):
        name = f"{letter}_weight"
        check_dtype(NAME, name, weight, (a.x.dtype,))
        check_device(NAME, name, weight, a.x.device)
        check_last_dim_dense(NAME, name, weight)
        bias = getattr(a, f"{letter}_bias")
        if bias is not None:
            _check_parameter(a, f"{letter}_bias", bias, "[H, D]", weight.shape[:2])


def _check_norm(a: FusedQkvArguments, name: str, weight: torch.Tensor | None) -> None:
    if weight is not None:
        _check_parameter(a, name, weight, "[D]", (a.q_weight.shape[1],))


def _check_parameter(
    a: FusedQkvArguments, name: str, tensor: torch.Tensor, letters: str, sizes: Sequence[Any]
) -> None:
    check_shape(NAME, name, tensor, letters, sizes)
    check_dtype(NAME, name, tensor, (a.x.dtype, torch.float32))
    check_device(NAME, name, tensor, a.x.device)
    check_last_dim_dense(NAME, name, tensor)


def validate_values(a: FusedQkvArguments) -> None:
    names = ("x", "q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias")
    more = ("q_norm_weight", "k_norm_weight", "cos", "sin")
    check_values(NAME, a, {name: getattr(a, name) for name in names + more})


def fake(a: FusedQkvArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], a.q_weight.shape[0], a.q_weight.shape[1]))


def reference(a: FusedQkvArguments) -> torch.Tensor:
    """The meaning of the op, in plain PyTorch."""
    q = _rotate(a, _norm(a, _project(a.x, a.q_weight, a.q_bias), a.q_norm_weight))
    k = _rotate(a, _norm(a, _project(a.x, a.k_weight, a.k_bias), a.k_norm_weight))
    v = _project(a.x, a.v_weight, a.v_bias)
    v_cache = a.k_cache if a.v_cache is None else a.v_cache
    place = (a.slot_mapping, a.slots, a.indexing)
    write_tokens(k, a.k_cache, CacheWindow.from_ints(a.k_window), *place)
    write_tokens(v, v_cache, CacheWindow.from_ints(a.v_window), *place)
    return q.to(a.x.dtype)


def _project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)
    out = torch.einsum("tk,hdk->thd", x.to(compute), weight.to(compute))
    return out if bias is None else out + bias.to(compute)


def _norm(a: FusedQkvArguments, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return x
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean_square + a.norm_eps) * weight.to(x.dtype)


def _rotate(a: FusedQkvArguments, x: torch.Tensor) -> torch.Tensor:
    if a.cos is None or a.sin is None:
        return x
    return apply_rope(x, a.cos, a.sin, a.rotary_dim, a.rope_style)


def sample_inputs(
    case: AttentionCase, device: str | torch.device = "cpu", seed: int = 0
) -> FusedQkvArguments:
    """Random arguments of a case; the caches hold random numbers, so a stray write shows."""
    sampler = Sampler(device, seed)
    norms: dict[str, Any] = {}
    if case.qk_norm:
        for name in ("q_norm_weight", "k_norm_weight"):
            norms[name] = sampler.normal(case.head_dim, dtype=case.dtype)
    return FusedQkvArguments(
        x=sampler.normal(case.num_tokens, case.hidden, dtype=case.dtype),
        **sample_weights(case, sampler),
        **sample_cache(case, sampler),
        **norms,
    )


OP = register(
    FusedOp(
        name=NAME,
        schema=SCHEMA,
        arguments=FusedQkvArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel("launch_fused_qkv_paged"),),
        cases=ATTENTION_CASES,
        sample_inputs=sample_inputs,
        tolerances=TOLERANCES,
        error_model=ONE_ROUNDING,
        plan="tilewright.ops.plans:plan_fused_qkv_paged",
    )
)


def fused_qkv_paged(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
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
    weights = [_by_head(weight, head_dim) for weight in (q_weight, k_weight, v_weight)]
    for name in ("q_bias", "k_bias", "v_bias"):
        bias = options.get(name)
        if bias is not None and bias.dim() == 1 and head_dim is not None:
            options[name] = bias.unflatten(0, (-1, head_dim))
    k_window = k_window or whole_cache(NAME, "k_window", k_cache)
    v_window = v_window or whole_cache(NAME, "v_window", v_cache)
    windows = (k_window.to_ints(), v_window.to_ints())
    return OP.torch_op(x, *weights, k_cache, v_cache, slot_mapping, *windows, **options)


def _by_head(weight: torch.Tensor, head_dim: int | None) -> torch.Tensor:
    if weight.dim() == 2 and head_dim is not None:
        return weight.unflatten(0, (-1, head_dim))
    return weight
