"""The dtypes for which ops have kernels, and the names that misses use for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilewright.patterns.dataflow import Value
from tilewright.patterns.effects import Size, size_fact
from tilewright.patterns.language import Stage, reject

#: The dtypes of projections, of attention, and of the GEMMs of experts.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, for example "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def rows_fact(dtype: torch.dtype, rows: Size, columns: Size) -> str:
    """Returns the description of rows that reports show, for example "bfloat16[T,64]" for rows of
    64 numbers."""
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
    """Raises Reject (DTYPE) unless all `dtypes` are equal and in `known`. what: the words for the
    tensors that have these dtypes."""
    found = set(dtypes)
    if len(found) != 1 or not found <= set(known):
        expected = f"expected one of {dtype_names(known)} for all"
        message = f"{what} have {dtype_names(found)}; {expected}"
        reject("DTYPE", Stage.GUARDS, message, culprit, hint=hint)
