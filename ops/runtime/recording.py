"""How a call is known again: where metadata and addresses are those of an earlier call, so are the
launches.

A decode step makes, layer after layer, calls it made the step before: the same weights, the same
caches, activations at the same addresses. What was checked, planned and laid out for the first of
them holds for the others, and one look-up finds it; `ops.runtime.replay` makes the call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from tilewright.codegen.operand import ALIGNMENT

Key: TypeAlias = tuple[Any, ...]


def call_key(
    args: Sequence[Any], kwargs: Mapping[str, Any], moving: Collection[int] = ()
) -> tuple[Key, Key]:
    """(metadata, addresses) of a call.

    Metadata is shape, strides and dtype of every tensor, the device of the first argument, and
    every argument that is no tensor. Addresses are those of the tensors; of one at a position in
    `moving`, which no argument precedes that may be absent, only its device, the address modulo 16,
    and which tensor is the first to lie there.

    Tensors of equal keys are the same memory seen the same way, unless it was freed in between;
    their contents may differ, and so may where in its storage each lies.
    """
    tensor_type = torch.Tensor
    # An address that one device gave back may be another's.
    device = args[0].device if args and isinstance(args[0], tensor_type) else None
    metadata: list[Any] = [device, tuple(kwargs)]
    addresses: list[Any] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, tensor_type):
            metadata += (value.shape, value.stride(), value.dtype)
            addresses.append(value.data_ptr())
        else:
            metadata.append(_items(value) if isinstance(value, list) else value)
    if moving:
        where = addresses.copy()
        for position in moving:
            if position < min(len(args), len(where)) and isinstance(args[position], tensor_type):
                address, device = where[position], args[position].get_device()
                addresses[position] = device, address % ALIGNMENT, where.index(address)
    return tuple(metadata), tuple(addresses)


def _items(values: list[Any]) -> Key:
    """A list's items: of tensors, all metadata and no address."""
    if not values or not (values[0] is None or isinstance(values[0], torch.Tensor)):
        return tuple(values)  # numbers, as in most lists
    return tuple([None if one is None else _metadata(one) for one in values])


def _metadata(tensor: torch.Tensor) -> Key:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def tensor_devices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.device]:
    """The devices of the tensors, which metadata in a key leaves out."""
    values = (*args, *kwargs.values())
    return [value.device for value in values if isinstance(value, torch.Tensor)]
