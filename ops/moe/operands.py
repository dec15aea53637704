"""From the arguments of `fused_moe` to a static problem of its kernels."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.grouped.plan import block_k_obstacle
from tilewright.codegen.grouped.specs import TMA_BYTES
from tilewright.codegen.moe.specs import (
    STORED,
    ExpertLayout,
    MoeProblem,
    down_problem,
    gemm_obstacle,
)
from tilewright.ops.qkv.operands import unaligned
from tilewright.ops.runtime.dtypes import TRITON_TYPES

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def unsupported(a: Any) -> str | None:
    """Why the emitted kernels cannot take a call; None where they can. Metadata only."""
    if a.x.dtype not in KERNEL_DTYPES:
        return f"no kernel for {a.x.dtype}"
    if a.weight_on_input:
        return "no kernel that scales the input"
    obstacle = _uneven(a)
    if obstacle is not None:
        return obstacle
    problem = moe_problem(a)
    for name in ("gate_weight", "down_weight"):
        woven = problem.interleaved and name == "gate_weight"
        obstacle = obstacle or scattered(name, getattr(a, name), 2 if woven else 1)
    return obstacle or gemm_obstacle(problem) or block_k_obstacle(down_problem(problem))


def _uneven(a: Any) -> str | None:
    """Where the weights differ in what a problem has once; None where they do not."""
    gate, up = a.gate_weight, a.up_weight
    if up is not None and not _same_strides(gate, up):
        return f"up_weight: strides {up.stride()} where gate_weight has {gate.stride()}"
    for what in ("bias", "scale"):
        given = [getattr(a, f"{name}_{what}") for name in ("gate", "up", "down")]
        types = sorted({str(tensor.dtype) for tensor in given if tensor is not None})
        if len(types) > 1:
            return f"gate_{what}, up_{what}, down_{what}: of {' and '.join(types)}"
    return None


def _same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of tensors of one shape; whatever strides dimensions of one element have."""
    sizes = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size <= 1 or step == also for size, step, also in sizes)


def scattered(name: str, weight: torch.Tensor, row_step: int = 1) -> str | None:
    """Why a layout cannot say how [E, N, K] lies; None where it can. row_step: elements from one
    row to the next where rows are contiguous."""
    _, row, column = weight.stride()
    if column == 1 or row == row_step or weight.shape[1] <= 1:
        return None
    return f"{name}: strides {weight.stride()} leave neither rows nor columns contiguous"


def out_of_reach(a: Any, problem: MoeProblem, *, decoded: bool) -> bool:
    """Whether addresses, of which no metadata tells, keep a GEMM from a weight, which it reads by
    TMA or by words; decoded: neither, as the weights are decoded before."""
    if gemm_obstacle(problem) is not None:  # two weights of one storage, at an odd distance
        return True
    apart = problem.gated and problem.distance is None
    gate_up = [a.gate_weight, a.up_weight] if apart else [lower_weight(a)]
    return not decoded and any(w.data_ptr() % TMA_BYTES for w in (*gate_up, a.down_weight))


def moe_problem(a: Any) -> MoeProblem:
    """The problem of a call; `a` is a FusedMoeArguments. Metadata and addresses only."""
    gate, up, down = a.gate_weight, a.up_weight, a.down_weight
    per_byte = STORED[a.weight_format][1]
    num_experts, inner, stored = gate.shape
    hidden = stored * per_byte
    distance = up_distance(a)
    layout = expert_layout(gate)
    # One weight's rows where the other's would leave a gap.
    woven = up is not None and _woven(gate) and abs(distance) == row_step(gate) // 2
    if woven:
        row = layout.row_stride if layout.n_major else row_step(gate) // 2
        layout = ExpertLayout(layout.expert_stride, row, layout.n_major)
    static = up is None or one_storage(gate, up)
    scales = (a.gate_scale, a.up_scale, a.down_scale)
    factors = (a.gate_expert_scale, a.up_expert_scale, a.down_expert_scale)
    experts = a.experts("gate")
    assert experts is not None
    biases = (a.gate_bias, a.up_bias, a.down_bias)
    bias_types = {TRITON_TYPES[b.dtype] for b in biases if b is not None}
    tensors = {
        "x_ptr": a.x, "weight_ptr": gate, "up_weight_ptr": up, "down_weight_ptr": down,
        "bias_ptr": a.down_bias, "gate_bias_ptr": a.gate_bias, "up_bias_ptr": a.up_bias,
        "ids_ptr": a.expert_ids, "weights_ptr": a.expert_weights,
        "gate_scale_ptr": a.gate_scale, "up_scale_ptr": a.up_scale, "down_scale_ptr": a.down_scale,
        "gate_factor_ptr": a.gate_expert_scale, "up_factor_ptr": a.up_expert_scale,
        "down_factor_ptr": a.down_expert_scale,
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
        interleaved=woven,
        distance=0 if woven else abs(distance) if static else None,
        up_first=distance < 0,
        activation=a.activation,
        alpha=a.alpha,
        limit=a.limit,
        format=a.weight_format,
        scale_block=(1, 1) if a.gate_scale is None else experts.block,
        scale_dtype="fp32" if a.gate_scale is None else TRITON_TYPES[a.gate_scale.dtype],
        scale_strides=tuple((0, 0, 0) if s is None else s.stride() for s in scales),
        factors=tuple(f is not None for f in factors),
        biases=tuple(None if b is None else (b.stride(0), b.stride(1)) for b in biases),
        bias_dtype=bias_types.pop() if bias_types else "bf16",
        coded_rows=a.activation_format == "fp8",
        unaligned=unaligned(tensors) + (("distance",) if distance % 16 else ()),
    )


def up_distance(a: Any) -> int:
    """Elements from the gate weight's first to the up weight's; 0 without an up weight."""
    gate, up = a.gate_weight, a.up_weight
    if up is None:
        return 0
    if one_storage(gate, up):
        return up.storage_offset() - gate.storage_offset()
    return (up.data_ptr() - gate.data_ptr()) // gate.element_size()


def one_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of one storage. Meta tensors have no address: they are where
    they start at different offsets."""
    address = one.untyped_storage().data_ptr()
    if address != other.untyped_storage().data_ptr():
        return False
    return address != 0 or one.storage_offset() != other.storage_offset()


def lower_weight(a: Any) -> torch.Tensor:
    """The gate or up weight, whichever lies at the lower address."""
    return a.gate_weight if a.up_weight is None or up_distance(a) >= 0 else a.up_weight


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
