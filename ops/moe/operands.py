"""Converts the arguments of `fused_moe` to the static problem of its kernels."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.grouped.plan import block_k_obstacle
from tilewright.codegen.moe.problem import MoeProblem, gemm_obstacle
from tilewright.ops.grouped.operands import (
    no_kernel_for,
    scattered,
    weight_operands,
)
from tilewright.ops.moe.arguments import FusedMoeArguments
from tilewright.ops.runtime.dtypes import TRITON_TYPES


def unsupported(a: FusedMoeArguments) -> str | None:
    """Returns why the emitted kernels cannot compute a call; None if they can.

    Reads only metadata, because the answer is used for all calls with the same metadata.
    `address_obstacle` checks addresses at each call.
    """
    if (obstacle := no_kernel_for(a.gate)) is not None:
        return obstacle
    if a.weight_on_input:
        return "no kernel that scales the input"
    obstacle = _uneven(a)
    if obstacle is not None:
        return obstacle
    problem = moe_problem(a)
    obstacle = scattered("gate_weight", a.gate_weight, 2 if problem.interleaved else 1)
    obstacle = obstacle or scattered("down_weight", a.down_weight)
    return obstacle or gemm_obstacle(problem) or block_k_obstacle(problem.down)


def _uneven(a: FusedMoeArguments) -> str | None:
    """Returns a difference between the weights that a problem cannot describe; None if there is
    none."""
    gate, up = a.gate_weight, a.up_weight
    if up is not None and not _same_strides(gate, up):
        return f"up_weight: strides {up.stride()}, but gate_weight has {gate.stride()}"
    of_all = {
        "bias": (a.gate_bias, a.up_bias, a.down_bias),
        "scale": (a.gate_scale, a.up_scale, a.down_scale),
    }
    for what, given in of_all.items():
        types = sorted({str(tensor.dtype) for tensor in given if tensor is not None})
        if len(types) > 1:
            return f"gate_{what}, up_{what}, down_{what}: dtypes {' and '.join(types)} differ"
    return None


def _same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same shape have equal strides, ignoring dimensions of one
    element."""
    sizes = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size <= 1 or step == also for size, step, also in sizes)


def moe_problem(a: FusedMoeArguments) -> MoeProblem:
    """Returns the problem of a call. Reads only metadata and addresses."""
    gate, up = a.gate, a.up
    num_experts, inner, hidden = gate.shape
    distance = up_distance(a)
    interleaved = up is not None and _interleaved(a.gate_weight, abs(distance))
    one = up is None or one_storage(gate.data, up.data)
    return MoeProblem(
        num_experts=num_experts,
        num_slots=a.expert_ids.shape[1],
        hidden=hidden,
        inner=inner,
        dtype=TRITON_TYPES[a.x.dtype],
        gate=weight_operands(gate),
        up=None if up is None else weight_operands(up),
        down=weight_operands(a.down),
        interleaved=interleaved,
        distance=0 if interleaved else abs(distance) if one else None,
        up_first=distance < 0,
        activation=a.activation,
        alpha=a.alpha,
        limit=a.limit,
        coded_rows=a.activation_format == "fp8",
    )


def up_distance(a: FusedMoeArguments) -> Any:
    """Returns the distance from the gate weight to the up weight, in elements; 0 if there is no up
    weight."""
    gate, up = a.gate_weight, a.up_weight
    if up is None:
        return 0
    if one_storage(gate, up):
        return up.storage_offset() - gate.storage_offset()
    return (up.data_ptr() - gate.data_ptr()) // gate.element_size()


def one_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of one storage. Meta tensors have no address. They count as
    views of one storage if their offsets differ."""
    address = one.untyped_storage().data_ptr()
    if address != other.untyped_storage().data_ptr():
        return False
    return address != 0 or one.storage_offset() != other.storage_offset()


def _interleaved(gate: torch.Tensor, distance: int) -> bool:
    """Whether rows of gate and rows of up alternate. Rows alternate if there is room for exactly
    one more row between two rows of gate, and if up's first row is in that room."""
    _, row, column = gate.stride()
    return row == (2 if column != 1 else 2 * gate.shape[2]) and distance == row // 2
