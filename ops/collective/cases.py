"""Sample inputs of sums over ranks. One rank: the others are not there to take part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.sampling import Sampler


@dataclass(frozen=True)
class ReduceCase:
    """norm: "rms" or "weightless". stride: columns that a row of x takes in memory, 0 for n."""

    name: str
    num_tokens: int = 5
    n: int = 64
    dtype: torch.dtype = torch.bfloat16
    norm: str = "rms"
    norm_dtype: torch.dtype | None = None
    norm_offset: float = 0.0
    stride: int = 0


REDUCE_CASES = (
    ReduceCase("plain"),
    ReduceCase("one", num_tokens=1, n=200),
    ReduceCase("weightless", norm="weightless", dtype=torch.float16),
    ReduceCase("gemma", norm_offset=1.0, num_tokens=17, n=1032),
    ReduceCase("wide_weight", norm_dtype=torch.float32),
    ReduceCase("strided", stride=96, n=72),
    ReduceCase("odd", n=77),
    ReduceCase("no_tokens", num_tokens=0),
    ReduceCase("float", dtype=torch.float32),
    ReduceCase("double", dtype=torch.float64),
)


def sample_reduce(case: ReduceCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Arguments of `all_reduce_residual_norm` by name, of a rank that is alone."""
    sampler = Sampler(device, seed)
    x = sampler.normal(case.num_tokens, case.stride or case.n, dtype=case.dtype)
    given: dict[str, Any] = {
        "x": x[:, : case.n],
        "residual": sampler.normal(case.num_tokens, case.n, dtype=case.dtype),
        "norm_weight": None,
        "norm_offset": case.norm_offset,
    }
    if case.norm == "rms":
        dtype = case.norm_dtype or case.dtype
        given["norm_weight"] = sampler.normal(case.n, dtype=dtype) + (1 - case.norm_offset)
    return given
