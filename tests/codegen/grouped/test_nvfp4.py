"""Compares the emitted NVFP4 grouped GEMM with the op's reference, on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import interpret
from tilewright.codegen.build import load_interpreted
from tilewright.codegen.grouped.tiles import GemmConfig
from tilewright.codegen.targets import SM100
from tilewright.ops.grouped import nvfp4_matmul as op
from tilewright.ops.grouped.nvfp4_matmul import grouped_nvfp4_steps
from tilewright.ops.runtime.program import Planner, drive

CONFIGS = {
    "tiled": GemmConfig(128, 128, 128, 4, 2),
    "specialised": GemmConfig(128, 128, 128, 4, 2, flatten=True, warp_specialize=True),
    "swapped": GemmConfig(16, 128, 128, 4, 2, swapped=True),
}


def run(a, config, block_scaled):
    out = torch.full((a.a.shape[0], a.b.shape[1]), float("nan"), dtype=torch.bfloat16)
    steps = grouped_nvfp4_steps(a, SM100, config, block_scaled=block_scaled)
    (spec,) = drive(steps, Planner(SM100), keep=True).specs
    load_interpreted(spec)[(3,)](
        a.a, a.b, a.a_scales, a.b_scales, a.group_offsets, a.group_scale_offsets, a.expert_ids,
        a.expert_scales, out, a.a.shape[0], a.a_scales.shape[0], a.num_groups,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("case", "config", "block_scaled"),
    [
        pytest.param(case, config, (row + column) % 2 == 1, id=f"{case.name}-{config}")
        for row, case in enumerate(op.CASES)
        for column, config in enumerate(CONFIGS)
    ],
)
def test_kernel_computes_the_op(case, config, block_scaled):
    """The cases are all pairs of a case, a tile size, and a way to multiply: scaled in blocks or
    dequantised."""
    a = op.sample_inputs(case)
    got = run(a, CONFIGS[config], block_scaled)
    end = int(a.group_offsets[-1])
    want = op.reference(replace(a, out_dtype=torch.bfloat16))
    # Products are exact in fp32. Only the order of the sum can change the one rounding.
    torch.testing.assert_close(got[:end].float(), want[:end].float(), rtol=2**-7, atol=1e-4)
    assert got[end:].isnan().all()


def test_numbers_of_groups_and_experts_may_lie_apart():
    a = op.sample_inputs(op.CASES[2])
    names = ("group_offsets", "group_scale_offsets", "expert_ids", "expert_scales")
    given = {name: getattr(a, name) for name in names}
    apart = {name: torch.stack((t, t + 1), 1)[:, 0] for name, t in given.items()}
    results = [interpret(op.OP, each).outcome.result for each in (a, replace(a, **apart))]
    assert torch.equal(*results)


def test_a_call_is_planned_for_both_chips():
    a = op.sample_inputs(op.CASES[1])
    for target, how in (("sm100", "block-scaled"), ("sm90", "dequantised exactly")):
        report = op.OP.plan_for(a, target)
        assert how in report.reason
        assert [spec.kernel for spec in report.specs] == ["grouped_nvfp4"]
