"""How a call is known again: where metadata and addresses are those of an earlier call, so are the
launches.

A decode step makes, layer after layer, calls it made the step before: the same weights, the same
caches, activations at the same addresses. What was checked, planned and laid out for the first of
them holds for the others, and one look-up finds it; `ops.runtime.replay` makes the call.
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
    """Where what stands in the calls that give the same arguments. tensors, lists, plain: pick
    such arguments, a value of each kind or None. moving: which of the tensors may move."""

    tensors: _Picker
    lists: _Picker
    plain: _Picker
    moving: tuple[int, ...]


class CallKeys:
    """Reads off each call of an op what it is known again by: (metadata, addresses).

    Metadata is which arguments are given, shape, strides and dtype of every tensor, the device of
    the first tensor, and every argument that is no tensor. Addresses are those of the tensors; of
    one in `moving`, which no argument precedes that may be absent, only its device, the address
    modulo 16, and which tensor is the first to lie there.

    Tensors of equal keys are the same memory seen the same way, unless it was freed in between;
    their contents may differ, and so may where in its storage each lies.

    kinds: the types of the op's arguments by name, in order, in PyTorch's words.
    """

    def __init__(self, kinds: Mapping[str, str], moving: Collection[str] = ()) -> None:
        self._kinds, self._moving = kinds, moving
        self._forms: dict[Key, _Form] = {}

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Key, Key]:
        given = (len(args), *kwargs)
        form = self._forms.get(given) or self._new_form(given)
        values = (*args, *kwargs.values()) if kwargs else args
        tensors = form.tensors(values)
        # An address that one device gave back may be another's.
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
