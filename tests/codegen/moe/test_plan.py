"""Tests which kernels a mixture of experts runs, depending on the number of rows that its experts
get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright.codegen.grouped.codes import codes_obstacle, order_of
from tilewright.codegen.grouped.problem import WeightOperands
from tilewright.codegen.grouped.tiles import CodesConfig
from tilewright.codegen.moe.kernels import order_config
from tilewright.codegen.moe.plan import plan_moe
from tilewright.codegen.moe.problem import MoeProblem, address_obstacle, down_problem
from tilewright.codegen.operand import Operand
from tilewright.codegen.targets import SM90, SM100

K, N, EXPERTS = 2048, 768, 128
DENSE = MoeProblem(
    num_experts=EXPERTS,
    num_slots=8,
    hidden=K,
    inner=N,
    dtype="bf16",
    gate=WeightOperands(Operand("bf16", (2 * N * K, K, 1))),
    up=WeightOperands(Operand("bf16", (2 * N * K, K, 1))),
    down=WeightOperands(Operand("bf16", (N * K, N, 1))),
    interleaved=False,
    distance=N * K,
    up_first=False,
    activation="silu",
    alpha=1.0,
    limit=0.0,
)


def nvfp4(rows, columns, halves=1):
    """Returns a weight [EXPERTS, rows, columns] in NVFP4. It is a part of a tensor with `halves`
    such weights."""
    expert = halves * rows * columns
    data = Operand("u8", (expert // 2, columns // 2, 1))
    scale = Operand("fp8e4nv", (expert // 16, columns // 16, 1))
    return WeightOperands(data, "nvfp4", (1, 16), scale)


def as_int4(weight):
    scale = replace(weight.scale, dtype="bf16")
    return replace(weight, format="int4", scale_block=(1, 128), scale=scale)


NVFP4 = replace(
    DENSE, gate=nvfp4(N, K, 2), up=nvfp4(N, K, 2), down=nvfp4(K, N), distance=N * K // 2
)
INT4 = replace(NVFP4, gate=as_int4(NVFP4.gate), up=as_int4(NVFP4.up), down=as_int4(NVFP4.down))
TILES = CodesConfig(16, 64, 128, 4, 4)


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


@pytest.mark.parametrize("target", [SM90, SM100], ids=lambda target: target.name)
@pytest.mark.parametrize("problem", [DENSE, NVFP4, INT4], ids=["dense", "nvfp4", "int4"])
def test_the_programs_of_a_multiprocessor_fit_its_shared_memory(problem, target):
    """The programs that the plan counts on a multiprocessor fit into its shared memory with all
    their stages. Triton's tiles are powers of two."""
    for tokens in (1, 16, 64, 256, 512, 640, 768, 1024, 2048, 4096, 8192):
        plan = plan_moe(problem, tokens, target)
        coded = problem is not DENSE and plan.decode is None
        for tiles in (plan.up, plan.down):
            extents = tiles.block_m, tiles.block_n, tiles.block_k
            assert all(extent.bit_count() == 1 for extent in extents), plan.reason
            x = 2 * tiles.block_m * tiles.block_k
            weight = tiles.block_n * tiles.block_k * 2 // (4 if coded else 1)
            held = tiles.programs_per_sm * tiles.num_stages * (x + weight)
            assert held <= target.max_shared_bytes, plan.reason


@pytest.mark.parametrize("problem", [NVFP4, INT4], ids=["nvfp4", "int4"])
@pytest.mark.parametrize("tokens", [1, 64, 1024, 2048])
def test_codes_stream_and_few_hidden_rows_lie_in_their_order(problem, tokens):
    plan = plan_moe(problem, tokens, SM90)
    assert isinstance(plan.up, CodesConfig)
    assert isinstance(plan.down, CodesConfig)
    assert plan.down.ordered == (1 < tokens <= 64)
    step, _ = order_of(problem.down, plan.down)
    assert (step > 0) == plan.down.ordered
    assert not step or N % step == 0


@pytest.mark.parametrize("problem", [NVFP4, INT4], ids=["nvfp4", "int4"])
def test_few_rows_have_warps_with_columns_of_their_own(problem):
    """With few rows, each warp of a program has separate columns. A single token needs no sort.
    More rows, or columns that are not a multiple of a step, get other tiles."""
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
    ragged = replace(NVFP4, inner=N + 32, down=nvfp4(K, N + 32))
    down = plan_moe(ragged, 64, SM90).down
    assert isinstance(down, CodesConfig)
    assert not down.ordered
    assert order_of(ragged.down, down) == (0, 0)


def test_scales_of_both_weights_lie_as_the_columns_do():
    turned = replace(NVFP4.up.scale, strides=(2 * N * K // 16, 1, N))
    turned = replace(NVFP4, up=replace(NVFP4.up, scale=turned))
    assert not isinstance(plan_moe(turned, 16, SM90).up, CodesConfig)


@pytest.mark.parametrize("inner", [N // 2, N + 128])
def test_a_row_is_put_in_order_by_whole_parts(inner):
    """A row must consist of whole parts. If it ended inside a part, the kernel would write the rest
    of the part into the next row."""
    ragged = replace(NVFP4, inner=inner, num_experts=4, down=nvfp4(K, inner))
    plan = plan_moe(ragged, 1, SM90)
    assert isinstance(plan.down, CodesConfig)
    step, _ = order_of(ragged.down, plan.down)
    assert plan.down.ordered
    assert inner % step == 0


def scale_at(*strides):
    return {"scale": Operand("fp8e4nv", strides)}


# Maps the text of an obstacle to changes of the weight and of the problem that cause it.
OBSTACLES = {
    "not 4-bit codes": ({"format": "dense"}, {}),
    "not whole words": ({"data": Operand("u8", (N * K // 2, N // 2 + 2, 1))}, {}),
    "differs from the layout of the columns": (scale_at(N * K // 16, 1, K), {}),
    "into whole quarters": ({}, {"inner": N + 16}),
    "multiples of 2 bytes": (scale_at(N * K // 16, N // 16 + 1, 1), {}),
    "powers of two": ({"format": "mxfp4", "scale_block": (1, 32)}, {"x": "fp16"}),
    "do not fit steps": ({"format": "int4", "scale_block": (1, 256)}, {}),
}


@pytest.mark.parametrize("words", OBSTACLES)
def test_what_codes_cannot_stream_is_said(words):
    problem, (of_weight, others) = down_problem(NVFP4), OBSTACLES[words]
    assert codes_obstacle(problem, TILES) is None
    other = replace(problem, weight=replace(problem.weight, **of_weight), **others)
    assert words in codes_obstacle(other, TILES)


def off(operand):
    return replace(operand, aligned=False)


def test_scales_off_their_units_are_no_codes_to_stream():
    up = replace(NVFP4.up, scale=off(NVFP4.up.scale))
    assert not isinstance(plan_moe(replace(NVFP4, up=up), 16, SM90).up, CodesConfig)


@pytest.mark.parametrize("which", ["gate", "up", "down"])
def test_a_weight_at_an_address_that_tma_cannot_reach_is_named(which):
    """If two weights are in one tensor, the lower address counts, because the other weight is a
    fixed distance from it."""
    weight = getattr(DENSE, which)
    moved = replace(DENSE, **{which: replace(weight, data=off(weight.data))})
    apart = replace(moved, distance=None)
    assert address_obstacle(apart, decoded=False).startswith(f"{which}_weight: ")
    assert address_obstacle(apart, decoded=True) is None
    assert (address_obstacle(moved, decoded=False) is None) == (which == "up")
    other = replace(moved, up_first=True)
    assert (address_obstacle(other, decoded=False) is None) == (which == "gate")


@pytest.mark.parametrize("routes", [1, 16, 128, 500, 2048, 2049, 16384, 65536])
def test_chunks_of_the_sort_are_compared_in_whole_steps(routes):
    config = order_config(DENSE, routes)
    assert config.chunk % config.routes_per_step == 0
    assert config.counted == (routes > 2048)
    assert config.chunk <= 256
