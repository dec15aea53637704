"""A tensor as a kernel's problem knows it."""

from __future__ import annotations

from dataclasses import dataclass

#: The address of an aligned tensor is a multiple of this, in bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class Operand:
    """What is static about one tensor of a call. A problem holds None for a tensor that is absent.

    dtype: Triton's name, "bf16". strides: in elements; a problem that does not build on them leaves
    them out, so that calls which differ in nothing else share a plan. aligned: the first element
    lies at a multiple of ALIGNMENT bytes.
    """

    dtype: str
    strides: tuple[int, ...] = ()
    aligned: bool = True


def first_strides(*operands: Operand | None) -> tuple[int, ...]:
    """Of each the first stride that a problem builds on, 0 for an absent one."""
    return tuple(0 if operand is None else operand.strides[0] for operand in operands)
