"""Sample inputs of `grouped_matmul`. The cases are small and random, and together they use every
option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.sample_experts import quantized_weight
from tilewright.ops.grouped.arguments import GroupedMatmulArguments
from tilewright.ops.sampling import Sampler


@dataclass(frozen=True)
class GroupedCase:
    """One case of `grouped_matmul`.

    Attributes:
        name: The name of the case.
        sizes: The number of rows of each group.
        ids: The expert of each group. If it is None, group g has expert g.
        rows: The number of rows of each weight, N.
        inner: The number of columns of x and of each weight, K.
        num_experts: The number of experts, E.
        spare: The number of rows that belong to no group.
        dtype: The dtype of x.
        weight_format: The argument of the op.
        bias: Whether the call has a bias.
        end_offsets: Whether offsets are ends, as in torch.
        transposed: Whether weights are stored as [E, K, N].
        out_dtype: The argument of the op.
        index: The dtype of offsets and ids.
        coded_rows: Whether x has float8_e4m3fn codes.
    """

    name: str
    sizes: tuple[int, ...] = (3, 0, 70, 5, 1)
    ids: tuple[int, ...] | None = None
    rows: int = 48
    inner: int = 64
    num_experts: int = 5
    spare: int = 0
    dtype: torch.dtype = torch.bfloat16
    weight_format: str = "dense"
    bias: bool = False
    end_offsets: bool = False
    transposed: bool = False
    out_dtype: torch.dtype | None = None
    index: torch.dtype = torch.int32
    coded_rows: bool = False


GROUPED_CASES = (
    GroupedCase("dense", inner=72),
    GroupedCase("ends", sizes=(0, 1, 2, 3, 0), end_offsets=True, dtype=torch.float16),
    GroupedCase("across_blocks", sizes=(129, 2, 65), ids=(2, 0, 1), transposed=True, bias=True),
    GroupedCase("no_expert", sizes=(20, 40, 10), ids=(-1, 3, -1), spare=3, bias=True,
                index=torch.int64),
    GroupedCase("repeated", sizes=(5, 0, 9), ids=(1, 1, 1), out_dtype=torch.float32),
    GroupedCase("single", dtype=torch.float32),
    GroupedCase("double", dtype=torch.float64, end_offsets=True),
    GroupedCase("no_groups", sizes=(), spare=4),
    GroupedCase("no_rows", sizes=(0, 0, 0, 0, 0)),
    GroupedCase("fp8", weight_format="fp8", rows=144, inner=160),
    GroupedCase("fp8_rows", weight_format="fp8", rows=144, inner=272, coded_rows=True, bias=True),
    GroupedCase("int4", weight_format="int4", dtype=torch.float16),
    GroupedCase("nvfp4", weight_format="nvfp4", inner=96, spare=2),
    GroupedCase("mxfp4", weight_format="mxfp4", bias=True),
)  # fmt: skip


def sample_grouped(case: GroupedCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `grouped_matmul` by name."""
    sampler = Sampler(device, seed)
    num_rows = sum(case.sizes) + case.spare
    shape = (case.num_experts, case.rows, case.inner)
    weight = sampler.normal(*shape, dtype=case.dtype, scale=case.inner**-0.5)
    if case.transposed:
        weight = weight.mT.contiguous().mT
    offsets = torch.tensor([0, *case.sizes]).cumsum(0).to(case.index)
    coded = quantized_weight(case.weight_format, weight)
    made: dict[str, Any] = {
        "x": sampler.normal(num_rows, case.inner, dtype=case.dtype),
        **GroupedMatmulArguments.experts.arguments(coded),
        "group_offsets": (offsets[1:] if case.end_offsets else offsets).to(device),
        "end_offsets": case.end_offsets,
        "out_dtype": case.out_dtype,
    }
    if case.ids is not None:
        made["expert_ids"] = torch.tensor(case.ids, dtype=case.index, device=device)
    if case.bias:
        made["bias"] = sampler.normal(case.num_experts, case.rows, dtype=case.dtype)
    if case.coded_rows:
        made["x"], made["x_scale"] = fp8_block.quantize_rows(made["x"])
    return made
