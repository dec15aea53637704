"""Keys of calls. A call with the same metadata and addresses as an earlier call makes the same
launches.

A decode step makes the same calls as the previous step, layer after layer, with the same weights,
the same caches, and activations at the same addresses. Therefore the checks, the plan and the
memory layout of the first call are valid for later calls. One look-up finds them, and
`ops.runtime.replay` repeats the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from tilewright.codegen.operand import ALIGNMENT

Key: TypeAlias = tuple[Any, ...]
_Picker: TypeAlias = Callable[[Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class _Form:
    """The positions of arguments, for calls that pass the same arguments in the same way.

    Attributes:
        tensors: A function that picks the tensors from the arguments. Some may be None.
        lists: A function that picks the lists from the arguments. Some may be None.
        plain: A function that picks all other arguments.
        moving: The tensors whose addresses may change from call to call.
    """

    tensors: _Picker
    lists: _Picker
    plain: _Picker
    moving: tuple[int, ...]


class CallKeys:
    """Makes the key of each call of an op: (metadata, addresses).

    The metadata are: which arguments are given; the shape, strides and dtype of every tensor; the
    device of the first tensor; and every argument that is not a tensor. The addresses are the
    addresses of the tensors. For a tensor in `moving`, the key has only the tensor's device, its
    address modulo 16, and the index of the first tensor at its address. Such tensors must come
    before any optional argument.

    In two calls with equal keys, the tensors are the same views of the same memory, unless the
    memory was freed in between. The contents may differ, and so may the offset of each tensor in
    its storage.

    kinds: PyTorch's names of the types of the op's arguments, by name and in order.
    """

    def __init__(self, kinds: Mapping[str, str], moving: Collection[str] = ()) -> None:
        self._kinds, self._moving = kinds, moving
        self._forms: dict[Key, _Form] = {}

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Key, Key]:
        given = (len(args), *kwargs)
        form = self._forms.get(given) or self._new_form(given)
        values = (*args, *kwargs.values()) if kwargs else args
        tensors = form.tensors(values)
        # The device is a part of the key, because two devices may use the same address.
        device = None if not tensors or tensors[0] is None else tensors[0].device
        metadata: list[Any] = [form, device, *form.plain(values)]
        addresses: list[Any] = []
        for value in tensors:
            if value is None:
                metadata.append(None)
            else:
                metadata += (value.shape, value.stride(), value.dtype)
                addresses.append(value.data_ptr())
        for value in form.lists(values):
            metadata.append(None if value is None else _items(value))
        if form.moving:
            where = addresses.copy()
            for n in form.moving:
                if (tensor := tensors[n]) is not None:
                    address = where[n]
                    there = address % ALIGNMENT, where.index(address)
                    addresses[n] = (tensor.get_device(), *there) if n else there
        return tuple(metadata), tuple(addresses)

    def _new_form(self, given: Key) -> _Form:
        names = (*list(self._kinds)[: given[0]], *given[1:])
        kinds = [self._kinds[name] for name in names]
        tensors = [n for n, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]")]
        lists = [n for n, kind in enumerate(kinds) if "List[" in kind]
        plain = sorted({*range(len(names))} - {*tensors, *lists})
        moving = tuple(i for i, n in enumerate(tensors) if names[n] in self._moving)
        form = _Form(_picker(tensors), _picker(lists), _picker(plain), moving)
        return self._forms.setdefault(given, form)


def _picker(positions: Sequence[int]) -> _Picker:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple([values[n] for n in positions])


def _items(values: list[Any]) -> Key:
    """Returns the items of a list. For tensors, returns their metadata without addresses."""
    if not values or not (values[0] is None or isinstance(values[0], torch.Tensor)):
        return tuple(values)  # most lists hold numbers
    return tuple([None if one is None else _metadata(one) for one in values])


def _metadata(tensor: torch.Tensor) -> Key:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def tensor_devices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.device]:
    """Returns the devices of all tensors. The metadata of a key has only the first device."""
    values = (*args, *kwargs.values())
    return [value.device for value in values if isinstance(value, torch.Tensor)]
