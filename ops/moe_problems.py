"""From the arguments of `fused_moe` to a static problem of its kernels."""

from __future__ import annotations

import torch

from tilewright.codegen.moe_kernels import ExpertLayout, MoeProblem
from tilewright.ops.fused_moe import FusedMoeArguments
from tilewright.ops.qkv_problems import TRITON_TYPES, unaligned


def moe_problem(a: FusedMoeArguments, num_tokens: int | None = None) -> MoeProblem:
    """The problem of a call with dense weights; metadata and addresses only."""
    gate, up, down = a.gate_weight, a.up_weight, a.down_weight
    num_experts, inner, hidden = gate.shape
    distance = 0 if up is None else (up.data_ptr() - gate.data_ptr()) // gate.element_size()
    layout = expert_layout(gate)
    interleaved = up is not None and abs(distance) == row_step(gate) // 2 != 0 and _woven(gate)
    if interleaved:
        # The rows of both, as one tensor has them.
        half = row_step(gate) // 2
        layout = ExpertLayout(
            layout.expert_stride, layout.row_stride if layout.n_major else half, layout.n_major
        )
    biases = (a.gate_bias, a.up_bias, a.down_bias)
    bias_types = {TRITON_TYPES[b.dtype] for b in biases if b is not None}
    tensors = {
        "x_ptr": a.x, "weight_ptr": gate, "up_weight_ptr": up, "down_weight_ptr": down,
        "bias_ptr": a.down_bias, "gate_bias_ptr": a.gate_bias, "up_bias_ptr": a.up_bias,
        "ids_ptr": a.expert_ids, "weights_ptr": a.expert_weights,
    }  # fmt: skip
    return MoeProblem(
        dtype=TRITON_TYPES[a.x.dtype],
        id_dtype=TRITON_TYPES[a.expert_ids.dtype],
        weight_dtype=TRITON_TYPES[a.expert_weights.dtype],
        num_experts=num_experts,
        num_slots=a.expert_ids.shape[1],
        hidden=hidden,
        inner=inner,
        x_stride=a.x.stride(0),
        weight_strides=(a.expert_weights.stride(0), a.expert_weights.stride(1)),
        gate_up=layout,
        down=expert_layout(down),
        gated=up is not None,
        interleaved=interleaved,
        up_distance=0 if interleaved else distance,
        activation=a.activation,
        alpha=a.alpha,
        limit=a.limit,
        biases=tuple(None if b is None else (b.stride(0), b.stride(1)) for b in biases),
        bias_dtype=bias_types.pop() if bias_types else "bf16",
        num_tokens=num_tokens,
        unaligned=unaligned(tensors),
    )


def expert_layout(weight: torch.Tensor) -> ExpertLayout:
    """How [E, N, K] lies; see ExpertLayout. K counts as contiguous where both could."""
    expert, row, column = weight.stride()
    return ExpertLayout(expert, row, False) if column == 1 else ExpertLayout(expert, column, True)


def row_step(weight: torch.Tensor) -> int:
    """Elements from one row n of [E, N, K] to the next."""
    return weight.stride(1)


def _woven(gate: torch.Tensor) -> bool:
    """Whether there is room for exactly one other row between two of gate's."""
    n_major = gate.stride(2) != 1
    return gate.stride(1) == (2 if n_major else 2 * gate.shape[2])
