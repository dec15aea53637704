"""Sample inputs of sums over ranks, for a single rank."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.sampling import RowsCase, Sampler

REDUCE_CASES = (
    RowsCase("plain"),
    RowsCase("one", num_tokens=1, n=200),
    RowsCase("weightless", norm="weightless", dtype=torch.float16),
    RowsCase("gemma", norm_offset=1.0, num_tokens=17, n=1032),
    RowsCase("wide_weight", norm_dtype=torch.float32),
    RowsCase("strided", stride=96, n=72),
    RowsCase("odd", n=77),
    RowsCase("no_tokens", num_tokens=0),
    RowsCase("float", dtype=torch.float32),
    RowsCase("double", dtype=torch.float64),
)


def sample_reduce(case: RowsCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `all_reduce_residual_norm` by name, for a group of one rank."""
    sampler = Sampler(device, seed)
    x, residual = case.rows(sampler), sampler.normal(case.num_tokens, case.n, dtype=case.dtype)
    return {"x": x, "residual": residual, **case.norm_arguments(sampler)}
