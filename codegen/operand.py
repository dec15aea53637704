"""Static facts about a tensor. They are a part of a kernel's problem."""

from __future__ import annotations

from dataclasses import dataclass

#: The address of an aligned tensor is a multiple of this number of bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class Operand:
    """The static facts about one tensor of a call. For an absent tensor, a problem has None.

    Attributes:
        dtype: The Triton name of the dtype, such as "bf16".
        strides: The strides in elements. A problem omits strides that it does not depend on, so
            that calls that differ only in these strides share a plan.
        aligned: Whether the address of the first element is a multiple of ALIGNMENT bytes.
    """

    dtype: str
    strides: tuple[int, ...] = ()
    aligned: bool = True


def first_strides(*operands: Operand | None) -> tuple[int, ...]:
    """Returns the first stride of each operand; 0 for an absent operand."""
    return tuple(0 if operand is None else operand.strides[0] for operand in operands)
