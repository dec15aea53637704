"""The memory layout of the weights of q, k and v: rows of one tensor, or separate tensors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch


@dataclass(frozen=True)
class WeightRows:
    """Where the weights of q, k and v are, if they are rows of one tensor. A single GEMM can then
    multiply all of them.

    Attributes:
        total: The number of rows of the tensor.
        firsts: The first row of each of q, k and v (without v if there is none).
        steps: For each weight, the number of rows from one group of heads to the next, and from one
            head to the next.
    """

    total: int
    firsts: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]


def weight_rows(*weights: torch.Tensor | None) -> WeightRows | None:
    """Returns how the weights of q, k and v cover the rows of one tensor without a gap; None if
    they do not."""
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
