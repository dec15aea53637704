"""`fused_moe`: the routed experts of a mixture, from tokens to tokens; routing is a separate op.

With `weight_on_input`, as in Llama-4, x[t] is multiplied by the weight of the route, and the
product is rounded to x's dtype.
"""

from __future__ import annotations

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    HALVES,
    ArgumentError,
    check_absent,
    check_choice,
    check_number,
    check_operand,
    readable,
)
from tilewright.ops.contract import FusedOp, emitted_kernel, register, rounded_once
from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.row_groups import INDEX_DTYPES, check_expert_values
from tilewright.ops.moe.arguments import FusedMoeArguments
from tilewright.ops.moe.cases import MOE_CASES, sample_moe
from tilewright.ops.moe.operands import unsupported
from tilewright.ops.reference import activation
from tilewright.ops.reference.expert_matmul import multiply_by_expert
from tilewright.ops.sampling import sampler_of

NAME = "fused_moe"
ACTIVATION_FORMATS = ("dense", "fp8")
ERROR_MODEL = (
    "Sums are accumulated in fp32, then the result is rounded once. The hidden activation is "
    "rounded to the activations' dtype; the errors of this rounding grow over the inner dimension "
    "like a random walk, and are measured against the rms of the output. If it is quantised to "
    "e4m3, a number close to the middle between two codes may be rounded to either code: then a "
    "few terms of each sum differ by a sixteenth."
)
TOLERANCES = rounded_once(2.0**-6, 2.0**-9, 2.0**-18, 2.0**-46)

ACTIVATIONS = (*activation.ACTIVATIONS, "clamped_swiglu")


def validate(a: FusedMoeArguments) -> None:
    check_operand(NAME, "x", a.x, "[T, H]", (None, None), FLOAT_DTYPES, dense=True)
    check_choice(NAME, "activation", a.activation, ACTIVATIONS)
    check_number(NAME, "alpha", a.alpha)
    check_number(NAME, "limit", a.limit, 0)
    _check_routes(a)
    _check_weights(a)
    check_choice(NAME, "activation_format", a.activation_format, ACTIVATION_FORMATS)
    coded = a.weight_format == "fp8" and a.scale_block[1] == fp8_block.BLOCK
    if a.activation_format == "fp8" and not coded:
        expected = f"dense, or weights of fp8 with blocks of {fp8_block.BLOCK} columns"
        given = f"fp8, with {a.weight_format} weights in blocks of {list(a.scale_block)}"
        raise ArgumentError(NAME, "activation_format", expected, given)


def _check_routes(a: FusedMoeArguments) -> None:
    routes = (a.x.shape[0], None)
    ids, weights, device = a.expert_ids, a.expert_weights, a.x.device
    check_operand(NAME, "expert_ids", ids, "[T, S]", routes, INDEX_DTYPES, device)
    check_operand(NAME, "expert_weights", weights, "[T, S]", ids.shape, FLOAT_DTYPES, device)


def _check_weights(a: FusedMoeArguments) -> None:
    hidden, dtypes = a.x.shape[1], (a.x.dtype, torch.float32)
    a.gate.check(NAME, a.x, (None, None, hidden), dtypes)
    num_experts, inner, _ = sizes = a.gate.shape
    if a.up is not None:
        a.up.check(NAME, a.x, sizes, dtypes)
    elif a.activation == "clamped_swiglu":
        raise ArgumentError(NAME, "up_weight", "a weight, since clamped_swiglu is gated", None)
    else:
        check_absent(NAME, a, ["up_bias"], "up_weight is None")
    a.down.check(NAME, a.x, (num_experts, hidden, inner), dtypes)


def validate_values(a: FusedMoeArguments) -> None:
    if readable([a.expert_ids]):
        check_expert_values(NAME, "expert_ids", a.expert_ids, a.gate_weight.shape[0])


def reference(a: FusedMoeArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 x) for each token t and slot s:

        gate = x[t] @ gate_weight[e]^T + gate_bias[e]
        up = x[t] @ up_weight[e]^T + up_bias[e]
        h = activation(gate, up)                        rounded to x's dtype
        y[t, s] = h @ down_weight[e]^T + down_bias[e]
        out[t] = sum over s of expert_weights[t, s] * y[t, s]

    e = expert_ids[t, s] is the expert of the slot. Without up_weight, h = activation(gate). With
    weight_on_input, x[t] is multiplied by expert_weights[t, s], and y is not. Quantised weights are
    dequantised first. With activation_format "fp8", x and h are quantised and dequantised again. A
    slot with expert -1 adds nothing.
    """
    compute = torch.promote_types(a.x.dtype, torch.float32)
    num_tokens, num_slots = a.expert_ids.shape
    expert = a.expert_ids.long().flatten()
    weight = a.expert_weights.to(compute)
    rows = a.x.to(compute)[:, None].expand(-1, num_slots, -1)
    if a.weight_on_input:
        rows = (rows * weight[..., None]).to(a.x.dtype).to(compute)
    rows = _multiplied(a, rows.reshape(-1, a.x.shape[1]))
    gated = multiply_by_expert(rows, expert, a.gate)
    upper = None if a.up is None else multiply_by_expert(rows, expert, a.up)
    hidden = _activated(a, gated, upper)
    hidden = _multiplied(a, hidden.to(a.x.dtype).to(compute))
    out = multiply_by_expert(hidden, expert, a.down)
    out = out.view(num_tokens, num_slots, a.x.shape[1])
    if not a.weight_on_input:
        out = torch.where(expert.view(num_tokens, num_slots, 1) < 0, 0, out * weight[..., None])
    return out.sum(1).to(a.x.dtype)


def _activated(a: FusedMoeArguments, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Returns the hidden activation. With a limit, gate is clamped to at most limit, and up to
    [-limit, limit]."""
    if a.limit:
        gate = gate.clamp(max=a.limit)
        up = None if up is None else up.clamp(-a.limit, a.limit)
    if a.activation == "clamped_swiglu":  # gpt-oss
        assert up is not None
        return gate * torch.sigmoid(a.alpha * gate) * (up + 1)
    value = activation.ACTIVATIONS[a.activation](gate)
    return value if up is None else value * up


def _multiplied(a: FusedMoeArguments, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows in the form in which they are multiplied. If activations are quantised, the rows
    are quantised and dequantised."""
    if a.activation_format == "dense":
        return rows
    codes, scale = fp8_block.quantize_rows(rows)
    return fp8_block.dequantize(codes, scale, (1, fp8_block.BLOCK), rows.dtype)


sample_inputs = sampler_of(FusedMoeArguments, sample_moe)


OP = register(
    FusedOp(
        name=NAME,
        arguments=FusedMoeArguments,
        validate=validate,
        validate_values=validate_values,
        reference=reference,
        lowerings=(
            emitted_kernel("tilewright.ops.moe.lowering:fused_moe_steps", unsupported, HALVES),
        ),
        cases=MOE_CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"x", "expert_ids", "expert_weights"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
    )
)
