"""Tests kernels that start while the kernel before them ends: they must wait before they touch
memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.codegen.qkv.test_templates import fused_spec
from tilewright.codegen.emit import emit
from tilewright.codegen.mlp.kernels import LinearConfig
from tilewright.codegen.qkv.kernels import SwappedConfig, TiledConfig
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import get_target
from tilewright.ops.mlp.linear_residual import LinearResidualArguments
from tilewright.ops.mlp.lowering import linear_residual_steps
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime.program import Planner, drive

MEMORY = ("tl.load(", "tl.store(", "tl.atomic_add(", "tl.make_tensor_descriptor(")


def specs(target: str) -> list[KernelSpec]:
    case = AttentionCase(
        "plain", hidden=256, head_dim=64, page_size=16, rope_style="half", rotary_dim=64
    )
    plain, normed = (
        qkv_cache.OP.sample_inputs(one, "meta") for one in (case, replace(case, input_norm="rms"))
    )
    few = SwappedConfig(32, 16, 64, 4, 2, split_k=2)
    square = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    linear = LinearResidualArguments(square, square, square)
    tiles = LinearConfig(64, 16, 64, 2, 4, 2, prefetch=64, lets_in=True)
    planner = Planner(get_target(target))
    return [
        *drive(linear_residual_steps(linear, planner.target, tiles), planner).specs,
        fused_spec(plain, few, target),
        fused_spec(plain, TiledConfig(64, 2, 64, 4, 2, persistent=True), target),
        fused_spec(normed, few, target),
    ]


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_the_wait_is_before_all_memory(target: str) -> None:
    for spec in specs(target):
        source = emit(spec)
        assert spec.launch_pdl
        assert "LAUNCH_PDL = True" in source
        wait = source.index("cuda.gdc_wait()")
        assert all(wait < source.find(name) for name in MEMORY if name in source)


def test_only_where_the_chip_can() -> None:
    for spec in specs("interpret"):
        assert not spec.launch_pdl
        assert "gdc_wait" not in emit(spec)


def test_a_spec_keeps_it() -> None:
    spec = specs("sm90")[1]
    assert KernelSpec.from_json(spec.to_json()) == spec
    assert replace(spec, launch_pdl=False) != spec
