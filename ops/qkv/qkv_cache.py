"""`fused_qkv_paged`: the QKV projection, QK-norm and RoPE of one attention layer, which writes K
and V directly into the caller's cache.

The three weights are strided views [heads, head_dim, hidden] of the user's tensors. Therefore one
op handles separate, packed and per-head interleaved projections, and no weight is copied.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.qkv.plan import takes_norm
from tilewright.ops.cache.address_checks import check_values
from tilewright.ops.cache.checks import (
    HeadValues,
    check_caches,
    window_integers,
)
from tilewright.ops.cache.writes import write_kv
from tilewright.ops.checks import ArgumentError, check_number, check_operand, check_tensor, holds
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.formats.activation_codes import scaled_numbers
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.formats.weight import Weight
from tilewright.ops.qkv.arguments import FusedQkvArguments
from tilewright.ops.qkv.cases import QKV_CASES
from tilewright.ops.qkv.checks import check_projection
from tilewright.ops.qkv.obstacles import STEPS, projection_obstacle
from tilewright.ops.qkv.sample_weights import sample_projection
from tilewright.ops.qkv.samples import AttentionCase, sample_cache
from tilewright.ops.reference.norm import HeadNorm, apply_norm
from tilewright.ops.reference.tolerances import ONE_ROUNDING
from tilewright.ops.sampling import Sampler

NAME = "fused_qkv_paged"
ERROR_MODEL = f"{ONE_ROUNDING} A normalised x may be rounded to its dtype before the product."


def validate(a: FusedQkvArguments) -> None:
    check_projection(NAME, a)
    dtype, device = a.value_dtype, a.x.device
    num_tokens, head_dim, num_kv_heads = a.x.shape[0], a.head_dim, a.k_weight.shape[0]
    kind = a.input_norm.kind
    if kind and a.has_codes:
        raise ArgumentError(NAME, f"input_{kind}_norm", "False, since x has codes", True)
    a.input_norm.check(NAME, a.x, "[K]", a.x.shape[1])
    if a.delta is not None:
        rows = sum(weight.rows for weight in a.projections if weight is not None)
        letters, dtypes = "[T, N_q + N_k + N_v]", (dtype, torch.float32)
        check_operand(
            NAME, "delta", a.delta, letters, (num_tokens, rows), dtypes, device, dense=True
        )
    check_number(NAME, "kv_repeat", a.kv_repeat, 1)
    check_number(NAME, "clip", a.clip, 0.0)
    _check_gates(a)
    a.q_norm.check(NAME, a.num_heads, head_dim, dtype, device)
    a.k_norm.check(NAME, num_kv_heads, head_dim, dtype, device)
    a.rope.check(NAME, num_tokens, head_dim, dtype, device)
    values = HeadValues(num_tokens, num_kv_heads, head_dim, dtype, device, a.kv_repeat)
    check_caches(NAME, a, values, writes_v=a.v_weight is not None)


def _check_gates(a: FusedQkvArguments) -> None:
    check_number(NAME, "gate_run", a.gate_run, 0)
    if a.gate_run == 0:
        return
    if not holds(a.num_heads % (2 * a.gate_run) == 0):
        expected = f"a number whose double divides the {a.num_heads} heads of q"
        raise ArgumentError(NAME, "gate_run", expected, str(a.gate_run))
    if a.norm_width == "row":
        raise ArgumentError(NAME, "norm_width", "'head', because q has gates", repr(a.norm_width))
    if a.v_norm:
        raise ArgumentError(NAME, "v_norm", "False, because q has gates", "True")


def validate_values(a: FusedQkvArguments) -> None:
    check_values(NAME, a, a.x.shape[0], writes_v=a.v_weight is not None)


def fake(a: FusedQkvArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], a.num_heads, a.head_dim), dtype=a.value_dtype)


def reference(a: FusedQkvArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 values) for each token t:

        y = x / sqrt(mean(x^2) + input_norm_eps) * (input_norm_offset + input_norm_weight)
        q = rope(norm(clip(y @ q_weight^T + q_bias + delta[q columns])))
        k = rope(norm(clip(y @ k_weight^T + k_bias + delta[k columns])))
        v = norm(clip(y @ v_weight^T + v_bias + delta[v columns]))
        gates = clip(y @ q_weight^T + q_bias + delta[q columns]), for the gates among q's heads
        result[t] = q[t]
        k_cache[slot of t] = k[t] / k_cache_scale
        v_cache[slot of t] = v[t] / v_cache_scale

    Quantised inputs are dequantised first. With input_layer_norm, x - mean(x) replaces x and
    input_norm_bias is added to y. A step whose arguments are None is omitted. Without v_norm, v is
    not normalised. Without a norm of x, y = x. With norm_after_rope, norm(rope(...)) replaces
    rope(norm(...)). With cache_scale_multiplies, values are multiplied by the scales. Each number
    is rounded once, when it is stored.
    """
    x = _input(a)
    made = _project(a, x, a.q_projection, 0)
    q = _normed_and_rotated(a, made, a.q_norm)
    if a.gate_run:
        heads = torch.arange(made.shape[1], device=made.device)
        q = torch.where((heads // a.gate_run % 2 == 1)[:, None], made, q)
    first, v_weight = a.q_projection.rows, a.v_projection
    made = _project(a, x, a.k_projection, first)
    k = _normed_and_rotated(a, made, a.k_norm)
    v = None
    if v_weight is not None:
        v = _project(a, x, v_weight, first + a.k_projection.rows)
    if v is not None and a.v_norm:
        v = apply_norm(v, None, a.norm_eps, a.norm_kind, a.norm_width)
    write_kv(a, k, v, a.kv_repeat)
    return fake(a).copy_(q)


def _input(a: FusedQkvArguments) -> torch.Tensor:
    """Returns x in the precision of the computation, dequantised or normalised."""
    x = a.x.to(torch.promote_types(a.value_dtype, torch.float32))
    return a.input_norm.apply(x) if a.x_scale is None else scaled_numbers(x, a.x_scale)


def _project(a: FusedQkvArguments, x: torch.Tensor, weight: Weight, first: int) -> torch.Tensor:
    """Returns the projection [T, H, D]: product, bias, delta and clip.

    first: the number of the weight's first row, counted over q, k and v. It is also the number of
    its first column in delta.
    """
    numbers = weight.dequantize(x.dtype).flatten(0, -3)
    out = torch.einsum("tk,hdk->thd", x, numbers)
    if weight.bias is not None:
        out = out + weight.bias.to(x.dtype).flatten(0, -2)
    if a.delta is not None:
        part = a.delta[:, first : first + weight.rows]
        out = out + part.to(x.dtype).view(out.shape)
    return out.clamp(-a.clip, a.clip) if a.clip else out


def _normed_and_rotated(a: FusedQkvArguments, x: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
    return norm.apply(a.rope.apply(x)) if a.norm_after_rope else a.rope.apply(norm.apply(x))


def sample_inputs(
    case: AttentionCase, device: str | torch.device = "cpu", seed: int = 0
) -> FusedQkvArguments:
    """Returns random arguments of a case. The caches have random numbers, so that a write to a
    wrong place is noticed."""
    sampler = Sampler(device, seed)
    values = sample_projection(case, sampler)
    values = sample_cache(case, sampler, FusedQkvArguments) | values
    if not case.writes_v:
        values |= {"v_weight": None, "v_bias": None, "v_scale": None, "v_zero": None}
        if case.factor:
            values["factors"] = values["factors"][:2]
    return FusedQkvArguments(**values)


def slower(*, tokens: int, norm: str, columns: int) -> str | None:
    """Returns why a separate kernel normalises x faster; None if the kernel of the projection is
    faster."""
    if takes_norm(norm, tokens, columns):
        return None
    return f"{norm} norm of {tokens} tokens: a separate kernel for the norm is faster"


OP = register(
    FusedOp(
        name=NAME,
        arguments=FusedQkvArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel(f"{STEPS}:fused_qkv_paged_steps", projection_obstacle),),
        cases=(*QKV_CASES, AttentionCase("k_only", writes_v=False, bias=True)),
        sample_inputs=sample_inputs,
        error_model=ERROR_MODEL,
        slower=slower,
        plan=f"{STEPS}:plan_fused_qkv_paged",
        tuning="tilewright.ops.qkv.tuning:describe",
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
    """Calls the op: projects x, writes K and V to their slots, and returns q [T, Hq, D].

    Weights are [H, D, K], or [H * D, K] if `head_dim` is given (nn.Linear's layout; biases are then
    [H * D]). Without a window, the cache is [num_pages, page_size, num_kv_heads, head_dim].
    FusedQkvArguments explains the other options. Raises ArgumentError before anything is written.
    The op is not differentiable.
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
    """Returns a weight or bias [H * D, ...] as [H, D, ...] if head_dim is given. Otherwise, returns
    it unchanged."""
    if tensor is None or head_dim is None:
        return tensor
    check_tensor(NAME, name, tensor)
    if tensor.dim() != joint_rank:
        return tensor
    if not (isinstance(head_dim, int) and head_dim >= 1 and tensor.shape[0] % head_dim == 0):
        expected = f"a head_dim that divides the {tensor.shape[0]} rows of {name}"
        raise ArgumentError(NAME, "head_dim", expected, repr(head_dim))
    return tensor.unflatten(0, (-1, head_dim))
