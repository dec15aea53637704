"""How a call is known again: where metadata and addresses are those of an earlier call, so are the
launches.

A decode step makes, layer after layer, calls it made the step before: the same weights, the same
caches, activations at the same addresses. What was checked, planned and laid out for the first of
them holds for the others, and one look-up finds it; `ops.runtime.replay` makes the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def address_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shape, strides, dtype and address of every tensor, the device of the first argument, and
    every argument that is no tensor.

    Tensors of equal keys are the same memory seen the same way, unless it was freed in between;
    their contents may differ, and so may where in its storage each lies.
    """
    # An address that one device gave back may be another's.
    parts: list[Any] = [args[0].device if args and isinstance(args[0], torch.Tensor) else None]
    for value in args:
        if isinstance(value, torch.Tensor):
            parts += (value.shape, value.stride(), value.dtype, value.data_ptr())
        else:
            parts.append(tuple(value) if isinstance(value, list) else value)
    for name, value in kwargs.items():
        parts.append(name)
        if isinstance(value, torch.Tensor):
            parts += (value.shape, value.stride(), value.dtype, value.data_ptr())
        else:
            parts.append(tuple(value) if isinstance(value, list) else value)
    return tuple(parts)
