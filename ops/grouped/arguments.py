"""The arguments of `grouped_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.groups import Group


@dataclass(frozen=True)
class GroupedMatmulArguments:
    """The arguments of `grouped_matmul`, for M rows, K inner columns, N outer columns, E experts
    and G groups.

    - `x` [M, K]: the rows, sorted by group.
    - `weight` [E, N, K]: any strides in which N or K is contiguous.
    - `group_offsets` int [G + 1]: exclusive offsets that start at 0. Group g has the rows
      [offsets[g], offsets[g + 1]). With end_offsets, it is int [G], the end of each group (`offs`
      of torch's grouped_mm). The ends may have any order: negative ends count from the last row,
      larger ends are clamped to M, and a row in several groups belongs to the last of them. On a
      GPU, the result is undefined for ends that torch refuses.
    - `expert_ids` int [G]: the expert of each group, -1 for a group without an expert. If it is
      None, group g has expert g, and G is at most E.
    - `bias` [E, N]: the bias of each expert.
    - `weight_format`, `scale_block`, `weight_scale`, `weight_expert_scale`: as in
      ops.formats.expert_weight.
    - `x_scale` fp32 [M, ceil(K/128)]: the scales of x, if x has float8_e4m3fn codes. The weights
      must then have the format "fp8" with blocks of 128 columns.

    The result is [M, N]. Its dtype is out_dtype. If out_dtype is None, the result has x's dtype, or
    bfloat16 if x has codes.
    """

    x: torch.Tensor
    weight: torch.Tensor
    group_offsets: torch.Tensor
    expert_ids: torch.Tensor | None = None
    _: KW_ONLY
    bias: torch.Tensor | None = None
    end_offsets: bool = False
    weight_format: str = "dense"
    scale_block: Sequence[int] = ()
    weight_scale: torch.Tensor | None = None
    weight_expert_scale: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    experts = Group(
        ExpertWeight, data="weight", scale="weight_scale", expert_scale="weight_expert_scale"
    )

    @property
    def ends(self) -> torch.Tensor:
        """The end of each group [G]."""
        return self.group_offsets if self.end_offsets else self.group_offsets[1:]

    @property
    def result_dtype(self) -> torch.dtype:
        if self.out_dtype is not None:
            return self.out_dtype
        return torch.bfloat16 if self.x_scale is not None else self.x.dtype
