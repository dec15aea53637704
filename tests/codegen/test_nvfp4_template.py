"""The emitted NVFP4 grouped GEMM against the op's reference, on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tilewright.codegen.build import load_interpreted
from tilewright.codegen.moe_kernels import GemmConfig
from tilewright.codegen.nvfp4_kernels import Nvfp4Problem, nvfp4_spec
from tilewright.ops import grouped_matmul_nvfp4 as op
from tilewright.ops.formats import nvfp4, scale_layout

CONFIGS = {
    "tiled": GemmConfig(128, 128, 128, False, 4, 2),
    "swapped": GemmConfig(16, 128, 128, True, 4, 2),
}


def arguments(sizes, ids, rows=144, inner=160, num_experts=5, spare=3):
    """A call whose last rows belong to no group."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    x = torch.randn(int(offsets[-1]) + spare, inner, generator=generator)
    w = torch.randn(num_experts, rows, inner, generator=generator) * inner**-0.5
    a, a_scales = nvfp4.quantize_grouped(x, offsets)
    b, b_scales = nvfp4.quantize(w)
    layout = scale_layout.swizzle(b_scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    return op.Nvfp4MatmulArguments(
        a, b, a_scales, layout, offsets, scale_layout.group_scale_offsets(offsets),
        torch.tensor(ids, dtype=torch.int32), 1 + (torch.arange(num_experts) + 1.0) / num_experts,
    )  # fmt: skip


def run(a, config, block_scaled):
    problem = Nvfp4Problem(
        a.b.shape[0], a.num_groups, a.b.shape[1], 2 * a.b.shape[2], a.a.stride(0), a.b.stride(0),
        a.b.stride(1),
    )  # fmt: skip
    out = torch.full((a.a.shape[0], a.b.shape[1]), float("nan"), dtype=torch.bfloat16)
    spec = nvfp4_spec(problem, config, "sm100", block_scaled=block_scaled)
    load_interpreted(spec)[(3,)](
        a.a, a.b, a.a_scales, a.b_scales, a.group_offsets, a.group_scale_offsets, a.expert_ids,
        a.expert_scales, out, a.a.shape[0], a.a_scales.shape[0], a.num_groups,
    )  # fmt: skip
    return out


GROUPS = {
    "one block each": ([31, 97, 63], [0, 3, 2]),
    "across blocks": ([65, 130, 3], [2, 0, 1]),
    "empty first": ([0, 1, 2, 3], [0, 3, 2, 4]),
    "no expert": ([20, 40, 10], [-1, 0, 2]),
}


@pytest.mark.parametrize("block_scaled", [False, True], ids=["dequantised", "block_scaled"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("groups", GROUPS)
def test_kernel_computes_the_op(groups, config, block_scaled):
    a = arguments(*GROUPS[groups])
    got = run(a, CONFIGS[config], block_scaled)
    end = int(a.group_offsets[-1])
    want = op.reference(a)
    # Products are exact in fp32: only the order of the sum can turn the one rounding.
    torch.testing.assert_close(got[:end].float(), want[:end].float(), rtol=2**-7, atol=1e-4)
    assert got[end:].isnan().all()
