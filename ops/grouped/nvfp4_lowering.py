"""The CUDA implementation of `grouped_matmul_dynamic_scaled_nvfp4`: one persistent kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.grouped.nvfp4_specs import Nvfp4Problem, nvfp4_config, nvfp4_spec
from tilewright.codegen.grouped.specs import TMA_BYTES, GemmConfig, gemm_grid
from tilewright.codegen.qkv.heads import next_power_of_2
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, TARGETS, Target
from tilewright.ops.contract import LoweringReport
from tilewright.ops.formats.row_groups import dense
from tilewright.ops.grouped.nvfp4_matmul import Nvfp4MatmulArguments, fake
from tilewright.ops.qkv.lowering import device_target
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.launch import launch


def problem_of(a: Nvfp4MatmulArguments) -> Nvfp4Problem:
    """The static part of a call; metadata only."""
    indices = (a.group_offsets, a.group_scale_offsets, a.expert_ids)
    return Nvfp4Problem(
        num_experts=a.b.shape[0],
        max_groups=max(a.num_groups, 1),
        rows=a.b.shape[1],
        inner=2 * a.b.shape[2],
        a_stride=a.a.stride(0),
        b_expert_stride=a.b.stride(0),
        b_stride=a.b.stride(1),
        out_dtype=TRITON_TYPES[a.result_dtype],
        index_types=tuple(TRITON_TYPES[t.dtype] for t in indices),  # type: ignore[arg-type]
    )


@cache
def chosen(problem: Nvfp4Problem, num_rows: int, target: Target) -> tuple[GemmConfig, KernelSpec]:
    """Tiles and kernel for up to `num_rows` rows."""
    config = nvfp4_config(problem, num_rows, target)
    scaled = "block_scaled_mma" in target.features
    return config, nvfp4_spec(problem, config, target.name, block_scaled=scaled)


def launch_grouped_nvfp4(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`grouped_matmul_dynamic_scaled_nvfp4` on CUDA tensors; see Nvfp4MatmulArguments."""
    a = _aligned(Nvfp4MatmulArguments(*args, **kwargs))
    # Rows of no group are in no tile.
    out = fake(a).zero_()
    if 0 in (out.numel(), a.num_groups, a.a_scales.numel()):
        return out
    target = device_target(a.a.device) or SM90
    config, spec = chosen(problem_of(a), next_power_of_2(a.a.shape[0]), target)
    values = {
        "a_ptr": a.a,
        "b_ptr": a.b,
        "a_scales_ptr": a.a_scales,
        "b_scales_ptr": a.b_scales,
        "offsets_ptr": dense(a.group_offsets),
        "deltas_ptr": dense(a.group_scale_offsets),
        "expert_ids_ptr": dense(a.expert_ids),
        "expert_scales_ptr": dense(a.expert_scales),
        "out_ptr": out,
        "num_rows": a.a.shape[0],
        "num_scale_blocks": a.a_scales.shape[0],
        "num_groups": a.num_groups,
    }
    sms = torch.cuda.get_device_properties(a.a.device).multi_processor_count
    launch(spec, gemm_grid(config, sms), values, a.a.device)
    return out


def _aligned(a: Nvfp4MatmulArguments) -> Nvfp4MatmulArguments:
    """The arguments with a copy of whatever starts off the boundary that TMA wants."""
    tensors = {name: getattr(a, name) for name in ("a", "b", "a_scales", "b_scales")}
    off = {name: t.clone() for name, t in tensors.items() if t.data_ptr() % TMA_BYTES}
    return replace(a, **off) if off else a


def plan_grouped_nvfp4(a: Any, target: str) -> LoweringReport:
    """What a call will run on a target; `a` may hold meta tensors."""
    config, spec = chosen(problem_of(a), next_power_of_2(a.a.shape[0]), TARGETS[target])
    how = (
        "block-scaled" if "block_scaled_mma" in TARGETS[target].features else "dequantised exactly"
    )
    return LoweringReport("grouped kernel", f"{how}, {config}", (spec,))
