"""Finds what a call writes. It reads the schema of the call, and runs the call on stand-ins for its
tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_map

from tilewright.compiler._compat import (
    call,
    hint_of,
    hints_of,
    is_functorch_wrapper,
    placement_of,
    storage_keys,
    tensors_in,
)


class CannotStandInError(RuntimeError):
    """Raised for a value that has no stand-in, so that a call on this value cannot be tried."""


class _StandIns:
    """Makes stand-ins, which are tensors with the layout of given tensors. Stand-ins share storage
    where the given tensors share storage.

    A symbolic size takes its value in the traced run. `device` is the device of all stand-ins; if
    it is None, each stand-in has the device of its original.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self.bases: dict[int, torch.Tensor] = {}
        #: Pairs (stand-in, original) of all plain tensors that have a stand-in so far.
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, value: Any) -> Any:
        """Returns the stand-in for a value. For nested tuples, lists and dicts, returns a copy with
        stand-ins."""
        return tree_map(self._leaf, value)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, slice):
            return slice(*map(self._leaf, (value.start, value.stop, value.step)))
        if isinstance(value, FakeScriptObject):
            return value.real_obj  # the device mesh of a DTensor
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            copied = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(copied, field.name, self.of(getattr(value, field.name)))
            return copied
        return hint_of(value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_functorch_wrapper(tensor):
            raise CannotStandInError("a tensor under vmap, grad or jvp")
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self._leaf(getattr(tensor, name)) for name in names}
            sizes, strides = hints_of(tensor.shape), hints_of(tensor.stride())
            return type(tensor).__tensor_unflatten__(inner, context, sizes, strides)
        keys = storage_keys(tensor)
        if not keys:
            raise CannotStandInError(f"a tensor of layout {tensor.layout}")
        (key,) = keys
        if key not in self.bases:
            count = hint_of(tensor.untyped_storage().nbytes())
            device = self.device or tensor.device
            self.bases[key] = torch.empty(count, dtype=torch.uint8, device=device)
        # This tensor shows all bytes as numbers of the dtype, without the bytes that are left over
        # at the end.
        width = tensor.dtype.itemsize
        whole = self.bases[key][: self.bases[key].numel() // width * width].view(tensor.dtype)
        sizes, strides = hints_of(tensor.shape), hints_of(tensor.stride())
        made = whole.as_strided(sizes, strides, hint_of(tensor.storage_offset()))
        self.made.append((made, tensor))
        return made


def as_meta(values: Any) -> Any:
    """Returns fake tensors as plain meta tensors with the sizes of the traced run. Views share
    storage."""
    return _StandIns("meta").of(values)


class _Writes(TorchDispatchMode):
    """Collects the storages that operators write according to their schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self._masks: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in written_arguments(func, args, kwargs or {}):
            for tensor in tensors_in(given):
                self.storages.update(storage_keys(tensor))
        result = func(*args, **(kwargs or {}))
        self._masks += [mask for tensor in tensors_in(result) for mask in _masks_of(tensor)]
        return result

    def forget_masks(self) -> None:
        """Releases the masks that DTensor keeps between a lookup in sharded rows and the reduction
        after the lookup. A trial of a call shares these masks with the user's own lookups of the
        same layout, so a mask that the trial kept would disturb them."""
        for mask in self._masks:
            if mask.refcount:
                mask.release_mask()


def _masks_of(tensor: torch.Tensor) -> list[Any]:
    placements = getattr(getattr(tensor, "_spec", None), "placements", ())
    masks = (getattr(placement, "mask_buffer", None) for placement in placements)
    return [mask for mask in masks if mask is not None]


# Operators update running statistics although their schemas do not say so.
_STATISTICS = frozenset({"running_mean", "running_var"})


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the values of the arguments that the operator overload writes."""
    given = [(at, name) for at, name in _written_places(func) if at < len(args) or name in kwargs]
    return [args[at] if at < len(args) else kwargs[name] for at, name in given]


def writes(func: Any) -> bool:
    """Whether an overload of an operator writes any argument."""
    return bool(_written_places(func))


@cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    return [
        (at, spec.name)
        for at, spec in enumerate(func._schema.arguments)
        if (spec.alias_info is not None and spec.alias_info.is_write) or spec.name in _STATISTICS
    ]


def run_recorded(
    function: Callable[..., Any] | str, args: Any, kwargs: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the tensors that a call writes, and the tensors whose shape, strides or storage it
    changes.

    The call runs on fake stand-ins (:class:`_StandIns`), so the given tensors do not change. Writes
    show in the schemas of the operators that run, and in torch's version counters. `function` is a
    function or the name of a method. Raises any exception of the call, and CannotStandInError.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        stand_ins, writes = _StandIns(), _Writes()
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False):
            given, named = stand_ins.of((args, kwargs))
            before = [(t, o, t._version, placement_of(t)) for t, o in stand_ins.made]
            try:
                with writes:
                    call(function, given, named)
            finally:
                writes.forget_masks()
            written = [
                original
                for tensor, original, version, (*_, storage) in before
                if tensor._version != version or storage in writes.storages
            ]
            anew = [original for t, original, _, placed in before if placement_of(t) != placed]
    return written, anew


def triton_kernel_writes(kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Returns the tensors that a user's Triton kernel writes, as torch's own analysis of the kernel
    finds them.

    `kwargs` are the keywords of a `triton_kernel_wrapper_mutation` node, with tensors in place of
    nodes. Returns None if torch cannot tell.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    given = kwargs["kwargs"]
    try:
        names = triton_kernel_wrap.get_mutated_tensors(
            kwargs["kernel_idx"],
            kwargs["constant_args_idx"],
            given,
            kwargs.get("tma_descriptor_metadata", {}),
        )
    except Exception:  # torch analyses Triton's output, which needs a compiler for a GPU
        return None
    return [tensor for name in names for tensor in tensors_in(given[name])]
