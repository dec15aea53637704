"""Dtypes that ops have kernels for, and their names in misses."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilewright.patterns.dataflow import Value
from tilewright.patterns.effects import Size, size_fact
from tilewright.patterns.language import Stage, reject

#: Dtypes of projections and attention, and of experts' GEMMs.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name, e.g. "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def rows_fact(dtype: torch.dtype, rows: Size, columns: Size) -> str:
    """Returns rows as reports show them, e.g. "bfloat16[T,64]" for rows of 64 numbers."""
    return f"{dtype_name(dtype)}[{size_fact(rows)},{columns}]"


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Returns the names of several dtypes in alphabetical order, separated by commas."""
    return ", ".join(sorted(map(dtype_name, dtypes)))


def check_dtypes(
    dtypes: Iterable[torch.dtype],
    what: str,
    culprit: Value,
    known: Collection[torch.dtype] = FLOATS,
    hint: str = "",
) -> None:
    """Raises Reject (DTYPE) unless `what` (its tensors, in words) has one dtype, one of `known`."""
    found = set(dtypes)
    if len(found) != 1 or not found <= set(known):
        expected = f"expected one of {dtype_names(known)} for all"
        message = f"{what} have {dtype_names(found)}; {expected}"
        reject("DTYPE", Stage.GUARDS, message, culprit, hint=hint)
