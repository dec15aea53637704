"""The Triton names of torch dtypes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint32: "u32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}

_TORCH_TYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}


def torch_types(names: Iterable[str]) -> tuple[torch.dtype, ...]:
    """Returns the torch dtypes with these Triton names."""
    return tuple(_TORCH_TYPES[name] for name in names)
