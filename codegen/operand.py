"""Static facts about one tensor of a call. A problem, the record of all static facts about a call,
has an `Operand` for each tensor."""

from __future__ import annotations

from dataclasses import dataclass

#: The address of an aligned tensor is a multiple of this number of bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class Operand:
    """The static facts about one tensor of a call. For a tensor that is absent from the call, the
    problem has None instead.

    Attributes:
        dtype: The Triton name of the dtype, such as "bf16".
        strides: The strides in elements. A problem omits the strides on which it does not depend.
            Calls that differ only in these strides then share a plan.
        aligned: Whether the address of the first element is a multiple of ALIGNMENT bytes.
    """

    dtype: str
    strides: tuple[int, ...] = ()
    aligned: bool = True


def first_strides(*operands: Operand | None) -> tuple[int, ...]:
    """Returns the first stride of each operand. The stride of an absent operand is 0."""
    return tuple(0 if operand is None else operand.strides[0] for operand in operands)
