"""Which kernels a mixture of experts runs, by the rows that its experts get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright.codegen.grouped.codes_specs import (
    CodesConfig,
    codes_config,
    codes_obstacle,
    order_of,
)
from tilewright.codegen.grouped.specs import ExpertLayout
from tilewright.codegen.moe.plan import plan_moe
from tilewright.codegen.moe.specs import MoeProblem, down_problem, order_config
from tilewright.codegen.targets import SM90, SM100

K, N, EXPERTS = 2048, 768, 128
DENSE = MoeProblem(
    dtype="bf16",
    id_dtype="i64",
    weight_dtype="bf16",
    num_experts=EXPERTS,
    num_slots=8,
    hidden=K,
    inner=N,
    x_stride=K,
    weight_strides=(8, 1),
    gate_up=ExpertLayout(2 * N * K, K, False),
    down=ExpertLayout(N * K, N, False),
    gated=True,
    interleaved=False,
    distance=N * K,
    up_first=False,
    activation="silu",
    alpha=1.0,
    limit=0.0,
)
NVFP4 = replace(
    DENSE,
    format="nvfp4",
    scale_block=(1, 16),
    scale_dtype="fp8e4nv",
    gate_up=ExpertLayout(N * K, K // 2, False),
    down=ExpertLayout(N * K // 2, N // 2, False),
    scale_strides=((2 * N * K // 16, K // 16, 1),) * 2 + ((N * K // 16, N // 16, 1),),
    distance=N * K // 2,
)
INT4 = replace(NVFP4, format="int4", scale_block=(1, 128), scale_dtype="bf16")
TILES = codes_config(16, 64, 128, 4, 4)


@pytest.mark.parametrize("tokens", [1, 16, 256])
def test_few_rows_have_the_weights_on_the_m_side(tokens):
    plan = plan_moe(DENSE, tokens, SM90)
    assert plan.up.swapped
    assert plan.down.swapped
    assert plan.up.block_m >= min(tokens * 8 // EXPERTS, 32)


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 64), (4096, 128), (8192, 128)])
def test_many_rows_have_tiles_as_long_as_they_are(tokens, rows):
    plan = plan_moe(DENSE, tokens, SM90)
    assert (plan.up.block_m, plan.down.block_m) == (rows, rows)
    assert not plan.up.swapped
    assert f"{tokens * 8 // EXPERTS} rows per expert" in plan.reason


@pytest.mark.parametrize("problem", [NVFP4, INT4], ids=["nvfp4", "int4"])
@pytest.mark.parametrize("tokens", [1, 64, 1024, 2048])
def test_codes_stream_and_few_hidden_rows_lie_in_their_order(problem, tokens):
    plan = plan_moe(problem, tokens, SM90)
    assert isinstance(plan.up, CodesConfig)
    assert isinstance(plan.down, CodesConfig)
    assert plan.down.ordered == (1 < tokens <= 64)
    step, _ = order_of(down_problem(problem), plan.down)
    assert (step > 0) == plan.down.ordered
    assert not step or N % step == 0


@pytest.mark.parametrize("problem", [NVFP4, INT4], ids=["nvfp4", "int4"])
def test_few_rows_have_warps_with_columns_of_their_own(problem):
    """One token needs no sort; more rows, or columns that are no whole steps, have other tiles."""
    one, some, more = (plan_moe(problem, tokens, SM90) for tokens in (1, 64, 128))
    assert one.by_route
    assert not some.by_route
    assert one.up.split == one.up.num_warps == 2
    assert some.up.split == some.up.num_warps == 2
    assert more.up.split == 1
    other = replace(problem, hidden=K + 128)
    assert plan_moe(other, 1, SM90).up.split == 1


def test_tensor_memory_takes_no_streamed_codes():
    assert not isinstance(plan_moe(NVFP4, 16, SM100).up, CodesConfig)


def test_rows_that_are_no_whole_steps_stay_as_they_are():
    ragged = replace(
        NVFP4,
        inner=N + 32,
        down=ExpertLayout(K * (N + 32) // 2, (N + 32) // 2, False),
        scale_strides=(*NVFP4.scale_strides[:2], (K * (N + 32) // 16, (N + 32) // 16, 1)),
    )
    down = plan_moe(ragged, 64, SM90).down
    assert isinstance(down, CodesConfig)
    assert not down.ordered
    assert order_of(down_problem(ragged), down) == (0, 0)


def test_scales_of_both_weights_lie_as_the_columns_do():
    gate, _, down = NVFP4.scale_strides
    turned = replace(NVFP4, scale_strides=(gate, (gate[0], 1, N), down))
    assert not isinstance(plan_moe(turned, 16, SM90).up, CodesConfig)


@pytest.mark.parametrize("inner", [N // 2, N + 128])
def test_a_row_is_put_in_order_by_whole_parts(inner):
    """A part that a row ends in would be written into the next row."""
    scales = (*NVFP4.scale_strides[:2], (K * inner // 16, inner // 16, 1))
    down = ExpertLayout(K * inner // 2, inner // 2, False)
    ragged = replace(NVFP4, inner=inner, num_experts=4, down=down, scale_strides=scales)
    plan = plan_moe(ragged, 1, SM90)
    assert isinstance(plan.down, CodesConfig)
    step, _ = order_of(down_problem(ragged), plan.down)
    assert plan.down.ordered
    assert inner % step == 0


OBSTACLES = {
    "no 4-bit codes": {"format": "dense"},
    "not whole words": {"weight": ExpertLayout(N * K // 2, N // 2 + 2, False)},
    "do not lie as the columns do": {"scale_strides": (N * K // 16, 1, K)},
    "not whole quarters": {"inner": N + 16},
    "units of 2 bytes": {"scale_strides": (N * K // 16, N // 16 + 1, 1)},
    "powers of two": {"format": "mxfp4", "scale_block": (1, 32), "dtype": "fp16"},
    "do not fit steps": {"format": "int4", "scale_block": (1, 256)},
}


@pytest.mark.parametrize("words", OBSTACLES)
def test_what_codes_cannot_stream_is_said(words):
    problem = down_problem(NVFP4)
    assert codes_obstacle(problem, TILES) is None
    assert words in codes_obstacle(replace(problem, **OBSTACLES[words]), TILES)


def test_scales_off_their_units_are_no_codes_to_stream():
    plan = plan_moe(replace(NVFP4, unaligned=("up_scale_ptr",)), 16, SM90)
    assert not isinstance(plan.up, CodesConfig)


@pytest.mark.parametrize("routes", [1, 16, 128, 500, 2048, 2049, 16384, 65536])
def test_chunks_of_the_sort_are_compared_in_whole_steps(routes):
    config = order_config(DENSE, routes)
    assert config.chunk % config.routes_per_step == 0
    assert config.counted == (routes > 2048)
    assert config.chunk <= 256
