"""Dtypes and devices that ops have kernels for, and how misses name dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilewright.codegen.targets import detect_target
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.language import Stage, reject

#: Dtypes of projections and attention, and of experts' GEMMs.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HALVES = (torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Several names, in alphabetical order."""
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


def check_device(x: View) -> None:
    """Without kernels for the GPU at hand an op would run its reference: slower than the graph."""
    device = x.value.device
    if device.type == "cuda" and detect_target(device.index) is None:
        reject("UNSUPPORTED", Stage.CAPABILITY, "there are no kernels for this GPU's generation", x)
