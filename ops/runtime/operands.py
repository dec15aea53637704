"""Converts the tensors of a call to operands of a kernel's problem."""

from __future__ import annotations

from functools import cache
from typing import overload

import torch

from tilewright.codegen.operand import ALIGNMENT, Operand
from tilewright.ops.runtime.dtypes import TRITON_TYPES

# Operand is cached, because a look-up is faster than making the record.
_made = cache(Operand)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the first element of the tensor is aligned to 16 bytes. A meta tensor has no address;
    its storage counts as aligned."""
    return tensor.data_ptr() % ALIGNMENT == 0


def tma_reaches(tensor: torch.Tensor, *strides: int) -> bool:
    """Whether TMA can read the tensor in place. strides: the strides between the rows and tiles
    that it reads, in elements."""
    size = tensor.element_size()
    return is_aligned(tensor) and all(stride * size % ALIGNMENT == 0 for stride in strides)


@overload
def operand(tensor: torch.Tensor, *strides: int) -> Operand: ...
@overload
def operand(tensor: None, *strides: int) -> None: ...
@overload
def operand(tensor: torch.Tensor | None, *strides: int) -> Operand | None: ...
def operand(tensor: torch.Tensor | None, *strides: int) -> Operand | None:
    """Returns the tensor as an operand with these strides. For None, returns None."""
    if tensor is None:
        return None
    return _made(TRITON_TYPES[tensor.dtype], strides, is_aligned(tensor))


@overload
def operand_of(tensor: torch.Tensor, *dims: int, aligned: bool = True) -> Operand: ...
@overload
def operand_of(tensor: None, *dims: int, aligned: bool = True) -> None: ...
@overload
def operand_of(tensor: torch.Tensor | None, *dims: int, aligned: bool = True) -> Operand | None: ...
def operand_of(tensor: torch.Tensor | None, *dims: int, aligned: bool = True) -> Operand | None:
    """Returns the tensor as an operand with the strides of these dimensions. With `aligned`, the
    operand says whether the tensor is aligned. For None, returns None."""
    if tensor is None:
        return None
    strides = tuple([tensor.stride(dim) for dim in dims])
    return _made(TRITON_TYPES[tensor.dtype], strides, aligned and is_aligned(tensor))


def follows(second: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether each row of `second` begins where a row of `first` ends, in one storage. Two
    allocations on the meta device count as one storage."""
    alike = first.stride() == second.stride() and first.dtype == second.dtype
    after = second.data_ptr() - first.data_ptr() == first.shape[-1] * first.element_size()
    storages = {tensor.untyped_storage().data_ptr() for tensor in (first, second)}
    return alike and after and (len(storages) == 1 or first.device.type == "meta")


def mask_bytes(mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask in the form in which kernels read it: booleans as bytes, and numbers
    unchanged."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask
