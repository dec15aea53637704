"""The CUDA lowering of `grouped_matmul_dynamic_scaled_nvfp4`: one persistent kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.grouped.nvfp4_specs import Nvfp4Problem, nvfp4_config, nvfp4_spec
from tilewright.codegen.grouped.specs import GemmConfig, gemm_grid
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.grouped.nvfp4_matmul import Nvfp4MatmulArguments, fake
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.operands import is_aligned
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, Steps


def nvfp4_problem(a: Nvfp4MatmulArguments) -> Nvfp4Problem:
    """The static part of a call; metadata only."""
    indices = (a.group_offsets, a.group_scale_offsets, a.expert_ids)
    offsets, deltas, ids = (Operand(TRITON_TYPES[t.dtype], aligned=False) for t in indices)
    return Nvfp4Problem(
        num_experts=a.b.shape[0],
        max_groups=max(a.num_groups, 1),
        rows=a.b.shape[1],
        inner=2 * a.b.shape[2],
        a=Operand("u8", (a.a.stride(0),)),
        b=Operand("u8", a.b.stride()[:2]),
        offsets=offsets,
        deltas=deltas,
        expert_ids=ids,
        out_dtype=TRITON_TYPES[a.result_dtype],
    )


@cache
def _chosen(problem: Nvfp4Problem, num_rows: int, target: Target) -> tuple[GemmConfig, KernelSpec]:
    """Tiles and kernel for up to `num_rows` rows."""
    config = nvfp4_config(problem, num_rows, target)
    scaled = target.has("block_scaled_mma")
    return config, nvfp4_spec(problem, config, target.name, block_scaled=scaled)


def grouped_nvfp4_steps(a: Nvfp4MatmulArguments, target: Target) -> Steps:
    """The steps of a call."""
    a = _aligned(a)
    out = yield Buffer.like(fake(a))
    yield Library(torch.Tensor.zero_, (out,))  # rows of no group are in no tile
    config, spec = _chosen(nvfp4_problem(a), next_power_of_2(a.a.shape[0]), target)
    values = {
        "a_ptr": a.a,
        "b_ptr": a.b,
        "a_scales_ptr": a.a_scales,
        "b_scales_ptr": a.b_scales,
        "offsets_ptr": contiguous(a.group_offsets),
        "deltas_ptr": contiguous(a.group_scale_offsets),
        "expert_ids_ptr": contiguous(a.expert_ids),
        "expert_scales_ptr": contiguous(a.expert_scales),
        "out_ptr": out,
        "num_rows": a.a.shape[0],
        "num_scale_blocks": a.a_scales.shape[0],
        "num_groups": a.num_groups,
    }
    if 0 not in (out.numel(), a.num_groups, a.a_scales.numel()):
        yield Launch(spec, gemm_grid(config, target.num_sms), values)
    scaled = target.has("block_scaled_mma")
    how = "block-scaled" if scaled else "dequantised exactly"
    return Outcome(out, "grouped kernel", f"{how}, {config}")


def _aligned(a: Nvfp4MatmulArguments) -> Nvfp4MatmulArguments:
    """The arguments with a copy of whatever starts off the boundary that TMA wants."""
    tensors = {name: getattr(a, name) for name in ("a", "b", "a_scales", "b_scales")}
    off = {name: t.clone() for name, t in tensors.items() if not is_aligned(t)}
    return replace(a, **off) if off else a
