"""The CUDA lowering of `grouped_matmul_dynamic_scaled_nvfp4`: one persistent kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.grouped.nvfp4_kernels import GROUPED_NVFP4, nvfp4_config, nvfp4_statics
from tilewright.codegen.grouped.tiles import GemmConfig
from tilewright.codegen.kernel import Statics
from tilewright.codegen.targets import Target
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.grouped.nvfp4_matmul import Nvfp4MatmulArguments, fake
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.operands import is_aligned
from tilewright.ops.runtime.program import Buffer, Library, Outcome, Steps


@cache
def _chosen(
    max_groups: int, num_rows: int, target: Target, config: GemmConfig | None, scaled: bool
) -> tuple[GemmConfig, Statics]:
    """Tiles, those of `config` where it is given, and constants for up to `num_rows` rows."""
    config = config or nvfp4_config(max_groups, num_rows, target)
    return config, nvfp4_statics(max_groups, config, block_scaled=scaled)


def grouped_nvfp4_steps(
    a: Nvfp4MatmulArguments,
    target: Target,
    config: GemmConfig | None = None,
    *,
    block_scaled: bool | None = None,
) -> Steps:
    """The steps of a call. config: in place of the planner's. block_scaled: whether the tensor core
    multiplies NVFP4 itself; None: as the target's does."""
    a = _aligned(a)
    out = yield Buffer.like(fake(a))
    yield Library(torch.Tensor.zero_, (out,))  # rows of no group are in no tile
    scaled = target.has("block_scaled_mma") if block_scaled is None else block_scaled
    covered = next_power_of_2(a.a.shape[0])
    config, statics = _chosen(max(a.num_groups, 1), covered, target, config, scaled)
    values = {
        "a": a.a,
        "b": a.b,
        "a_scales": a.a_scales,
        "b_scales": a.b_scales,
        "offsets": contiguous(a.group_offsets),
        "deltas": contiguous(a.group_scale_offsets),
        "expert_ids": contiguous(a.expert_ids),
        "expert_scales": contiguous(a.expert_scales),
        "out": out,
        "num_rows": a.a.shape[0],
        "num_scale_blocks": a.a_scales.shape[0],
        "num_groups": a.num_groups,
    }
    if 0 not in (out.numel(), a.num_groups, a.a_scales.numel()):
        experts, rows, half = a.b.shape
        sizes = {"NUM_EXPERTS": experts, "ROWS_OUT": rows, "INNER": 2 * half}
        grid = config.grid(target.num_sms)
        yield launch(GROUPED_NVFP4, target, grid, values, statics, **sizes)
    how = "block-scaled" if scaled else "dequantised exactly"
    return Outcome(out, "grouped kernel", f"{how}, {config}")


def _aligned(a: Nvfp4MatmulArguments) -> Nvfp4MatmulArguments:
    """The arguments with a copy of whatever starts off the boundary that TMA wants."""
    tensors = {name: getattr(a, name) for name in ("a", "b", "a_scales", "b_scales")}
    off = {name: t.clone() for name, t in tensors.items() if not is_aligned(t)}
    return replace(a, **off) if off else a
