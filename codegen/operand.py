"""Static facts about a tensor, as a part of a kernel's problem."""

from __future__ import annotations

from dataclasses import dataclass

#: The address of an aligned tensor is a multiple of this, in bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class Operand:
    """The static facts about one tensor of a call. A problem has None for an absent tensor.

    dtype: Triton's name, such as "bf16". strides: in elements; a problem leaves out strides that do
    not matter to it, so that calls which differ only in those share a plan. aligned: whether the
    address of the first element is a multiple of ALIGNMENT bytes.
    """

    dtype: str
    strides: tuple[int, ...] = ()
    aligned: bool = True


def first_strides(*operands: Operand | None) -> tuple[int, ...]:
    """Returns the first listed stride of each operand; 0 for an absent one."""
    return tuple(0 if operand is None else operand.strides[0] for operand in operands)
