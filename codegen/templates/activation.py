"""Activations of gated and plain MLPs, in fp32."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + exp(-x)) without a division, which would take several instructions."""
    root = tl.rsqrt(1.0 + tl.exp(-x))
    return root * root


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
             GATED: tl.constexpr):  # fmt: skip
    """Returns activation(gate) * up in fp32, or activation(gate) if not GATED. NaN stays NaN.

    If LIMIT is greater than 0, gate is clamped to at most LIMIT, and up to the range from -LIMIT to
    LIMIT. The last branch is the activation of gpt-oss, which uses up + 1.
    """
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if GATED:
            up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "silu":
        value = gate * sigmoid(gate)
    elif ACTIVATION == "relu":
        value = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu_squared":
        value = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = value * value
    elif ACTIVATION == "gelu":
        value = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        value = gate * sigmoid(2.0 * inner)
    else:
        value = gate * sigmoid(ALPHA * gate)
        up = up + 1.0
    if GATED:
        value = value * up
    return value
