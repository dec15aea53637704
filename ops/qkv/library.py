"""How the three weights of a projection lie in memory, and library GEMMs that copy none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch


@dataclass(frozen=True)
class WeightRows:
    """Where q, k and v weights lie as rows of one tensor: a single GEMM makes all three.

    total: rows of that tensor. firsts: its row of q's, k's and v's first row (v's left out where
    there is none). steps: for each, rows from one group of heads, and from one head, to the next.
    """

    total: int
    firsts: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]


def weight_rows(*weights: torch.Tensor | None) -> WeightRows | None:
    """How q, k and v weights tile the rows of one tensor without a gap; None where they do not."""
    present = [weight for weight in weights if weight is not None]
    storages = {weight.untyped_storage().data_ptr() for weight in present}
    strides = {weight.stride()[-2:] for weight in present}
    if len(storages) != 1 or len(strides) != 1:
        return None
    ((step, column),) = strides
    total = sum(prod(weight.shape[:-1]) for weight in present)
    apart = step >= present[0].shape[-1] if column == 1 else column >= total
    lowest = min(weight.storage_offset() for weight in present)
    offsets = [weight.storage_offset() - lowest for weight in present]
    outer = [stride for weight in present for stride in weight.stride()[:-2]]
    if not apart or any(distance % step for distance in (*offsets, *outer)):
        return None
    firsts = tuple(offset // step for offset in offsets)
    steps = tuple(tuple(stride // step for stride in w.stride()[:-2]) for w in present)
    heads = [
        first + sum(i * s for i, s in zip(index, head_steps, strict=True))
        for weight, first, head_steps in zip(present, firsts, steps, strict=True)
        for index in product(*map(range, weight.shape[:-2]))
    ]
    if sorted(heads) != list(range(0, total, present[0].shape[-2])):
        return None
    return WeightRows(total, firsts, steps)


def project_packed(
    x: torch.Tensor, weights: Sequence[torch.Tensor], rows: WeightRows
) -> list[torch.Tensor]:
    """One GEMM over all rows; q [T, H, D] or [T, Hkv, G, D], k and v are views of its result."""
    lowest = min(weights, key=lambda weight: weight.storage_offset())
    whole = lowest.as_strided((rows.total, x.shape[1]), lowest.stride()[-2:])
    out = torch.nn.functional.linear(x, whole)
    return [
        out.as_strided((x.shape[0], *weight.shape[:-1]), (rows.total, *steps, 1), first)
        for weight, first, steps in zip(weights, rows.firsts, rows.steps, strict=True)
    ]


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] by weight [H, D, K] to [T, H, D], or [Hkv, G, D, K] to [T, Hkv, G, D]."""
    *heads, head_dim, hidden = weight.shape
    row, column = weight.stride()[-2:]
    in_row = [row * prod(weight.shape[axis + 1 : -1]) for axis in range(len(heads))]
    if list(weight.stride()[:-2]) == in_row:
        rows = weight.as_strided((prod(heads) * head_dim, hidden), (row, column))
        return torch.nn.functional.linear(x, rows).view(-1, *heads, head_dim)
    if len(heads) == 2:
        return torch.stack([project(x, part) for part in weight.unbind(1)], dim=2)
    return torch.matmul(x, weight.transpose(1, 2)).transpose(0, 1)


def weight_places(
    q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor | None
) -> dict[str, Any]:
    """The weights as the one descriptor of `qkv_projection` reaches them."""
    weights = {"q": q_weight, "k": k_weight, "v": k_weight if v_weight is None else v_weight}
    order = sorted(weights, key=lambda name: weights[name].data_ptr())
    lowest = weights[order[0]].data_ptr()
    size = q_weight.element_size()
    return {
        "weight_ptr": weights[order[0]],
        "second_distance": (weights[order[1]].data_ptr() - lowest) // size,
        "third_distance": (weights[order[2]].data_ptr() - lowest) // size,
        **{f"{name}_place": order.index(name) for name in weights},
    }
