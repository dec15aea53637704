"""Tests the emitted mixture-of-experts kernels against the op's reference in float64, on Triton's
interpreter. The interpreter runs exactly the source that is emitted for SM100."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tests.experts import SMALL_SM100, as_double
from tests.interpreted import Interpreter
from tilewright.codegen.build import compile_for
from tilewright.codegen.build.interpreter import interpret
from tilewright.codegen.emit import emit
from tilewright.codegen.grouped.codes import codes_obstacle
from tilewright.codegen.grouped.tiles import CodesConfig, GemmConfig
from tilewright.codegen.moe.kernels import (
    CombineConfig,
    OrderConfig,
    order_config,
    sort_grids,
    sort_kernels,
)
from tilewright.codegen.moe.plan import MoePlan
from tilewright.codegen.moe.problem import down_problem
from tilewright.codegen.targets import SM90, SM100
from tilewright.codegen.templates.expert_weights import e2m1_codes
from tilewright.ops.formats import fp4
from tilewright.ops.moe import moe
from tilewright.ops.moe.cases import MOE_CASES, MoeCase
from tilewright.ops.moe.lowering import fused_moe_steps
from tilewright.ops.moe.operands import moe_problem
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.program import Planner, drive

CASES = [c for c in MOE_CASES if c.dtype != torch.float64]
CASES = [c for c in CASES if c.num_tokens and not c.weight_on_input]
CASES = [
    c for c in CASES if c.activation_format == "dense"
]  # ../grouped/test_scaled.py has the other cases
SWAPPED = GemmConfig(16, 64, 32, 4, 2, swapped=True)
TILED = GemmConfig(64, 32, 32, 4, 2)
# This kernel finds a tile's expert in memory. (The interpreter does not run warps separately.)
SPECIALISED = GemmConfig(16, 32, 32, 4, 2, flatten=True, warp_specialize=True)


def sorted_routes(problem, ids, config):
    """Returns (order, ends) as the kernels compute them."""
    num_routes = ids.numel()
    grids = sort_grids(problem, config, num_routes)
    sizes = {
        "counts": grids["count"][0] * problem.experts, "total": problem.experts,
        "order": num_routes, "ends": 2 * problem.num_experts,
    }  # fmt: skip
    values = {name: torch.full((size,), -7, dtype=torch.int32) for name, size in sizes.items()}
    values |= {"ids": ids, "num_routes": num_routes, "num_chunks": grids["count"][0]}
    if not config.counted:
        values |= {"counts": None, "total": None}
    for step, (kernel, statics) in sort_kernels(problem, config).items():
        made = launch(kernel, SMALL_SM100, grids[step], values, statics)
        Interpreter(SMALL_SM100).perform(made)
    return values["order"], values["ends"]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("chunk", [16, 128])
@pytest.mark.parametrize("routing", ["random", "one", "none"])
def test_routes_are_sorted_by_expert_and_stay_in_order(routing, chunk, counted):
    a = moe.sample_inputs(MoeCase("case", num_tokens=37, num_experts=5, routing=routing))
    config = OrderConfig(
        chunk,
        counted,
        routes_per_load=32,
        routes_per_step=16,
        chunks_per_load=2,
        experts_per_scan=4,
        row_block=16,
    )  # fmt: skip
    order, ends = sorted_routes(moe_problem(a), a.expert_ids, config)
    ends, blocks = ends.chunk(2)
    ids = a.expert_ids.flatten()
    expected = [r for e in range(5) for r in range(ids.numel()) if ids[r] == e]
    assert order[: len(expected)].tolist() == expected
    sizes = torch.stack([ids == e for e in range(5)]).sum(1)
    assert ends.tolist() == sizes.cumsum(0).tolist()
    assert blocks.tolist() == [0, *((sizes + 15) // 16).cumsum(0).tolist()[:-1]]


def plan_in(a, config):
    """Returns a plan whose two GEMMs have these tiles."""
    sort = order_config(moe_problem(a), a.expert_ids.numel())
    sort = replace(sort, row_block=config.block_m if config.warp_specialize else 0)
    return MoePlan(sort, config, config, CombineConfig(2, 32), "")


def gemms(a, config, target):
    """Returns the specs of both GEMMs with these tiles."""
    steps = fused_moe_steps(a, target, plan_in(a, config))
    specs = drive(steps, Planner(target), keep=True).specs
    return [spec for spec in specs if "SWAPPED" in dict(spec.constants)]


def fused(a, config):
    """Computes the call with these tiles for both GEMMs."""
    program = drive(fused_moe_steps(a, SMALL_SM100, plan_in(a, config)), Interpreter())
    assert program.outcome.name == "grouped kernels"
    return program.outcome.result


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, config, id=f"{case.name}-{'tiled' if config is TILED else 'swapped'}")
        for number, case in enumerate(CASES)
        for config in (SWAPPED, TILED)
        if number == 0 or (number % 2 == 1) == (config is TILED)
    ],
)
def test_kernels_compute_the_op(case, config):
    """The first case runs with tiles of both kinds, and the other cases take one of the kinds in
    turn."""
    a = moe.sample_inputs(case)
    exact = moe.reference(as_double(a))
    problem = moe.OP.tolerances[case.dtype].problem(fused(a, config), exact)
    assert problem is None, problem


@pytest.mark.parametrize("activation", ["relu", "clamped_swiglu"])
def test_nan_passes_the_activation(activation):
    """Tests NaN in the activation by the emitted text as well: the interpreter's maximum of NaN is
    always NaN, so it alone would not show a fault."""
    a = moe.sample_inputs(MoeCase("case", activation=activation, limit=1.0, hidden=32, inner=32))
    ptx = compile_for(gemms(a, SWAPPED, SM90)[0]).ptx
    assert "max.NaN." in ptx or "min.NaN." in ptx
    assert "min.f32" not in ptx
    assert "max.f32" not in ptx


CODES = [
    ("nvfp4", "up_first", False, False), ("nvfp4", "interleaved", True, True),
    ("nvfp4", "plain", True, False), ("mxfp4", "up_first", True, True),
    ("mxfp4", "interleaved", True, False), ("int4", "up_first", True, True),
    ("int4", "interleaved", True, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "ordered", "swapped"), CODES)
def test_codes_stream_in_the_order_of_their_words(name, layout, ordered, swapped):
    case = MoeCase("codes", weight_format=name, layout=layout, hidden=160, inner=128, num_tokens=3)
    block_k = {"nvfp4": 256 if swapped else 64, "mxfp4": 128, "int4": 64}[name]
    a = moe.sample_inputs(case)
    part_k = 128 if layout == "interleaved" else 256
    config = CodesConfig(16, 32, block_k, 4, 2, ordered=ordered, swapped=swapped, part_k=part_k)
    exact = moe.reference(as_double(a))
    assert codes_obstacle(down_problem(moe_problem(a)), config) is None
    problem = moe.OP.tolerances[case.dtype].problem(fused(a, config), exact)
    assert problem is None, problem


SPLIT = [
    ("nvfp4", "halves", 2, 64, False), ("nvfp4", "plain", 4, 64, True),
    ("mxfp4", "interleaved", 2, 128, False), ("int4", "up_first", 2, 32, True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "split", "part_k", "by_route"), SPLIT)
def test_warps_have_columns_of_their_own(name, layout, split, part_k, by_route):
    """Warps have separate columns, and K is not a multiple of a step. An expert has two blocks of
    rows, or each route has a block, including routes without an expert."""
    case = MoeCase("codes", weight_format=name, layout=layout, hidden=192, inner=64, num_tokens=5,
                   routing="none" if by_route else "one", num_experts=3)  # fmt: skip
    if name == "mxfp4":
        case = replace(case, inner=128)
    a = moe.sample_inputs(case)
    config = CodesConfig(
        8, 64, split * part_k, split, 2, ordered=name == "mxfp4", part_k=part_k, split=split,
        by_route=by_route,
    )  # fmt: skip
    assert codes_obstacle(down_problem(moe_problem(a)), config) is None
    exact = moe.reference(as_double(a))
    problem = moe.OP.tolerances[case.dtype].problem(fused(a, config), exact)
    assert problem is None, problem


@pytest.mark.parametrize("by_route", [False, True])
def test_experts_that_are_not_there_add_nothing(by_route):
    """On a GPU no check reads the ids. The kernel must not read memory behind the experts, or
    memory that nothing has written."""
    case = MoeCase("case", weight_format="nvfp4", hidden=64, inner=64, num_tokens=3, num_experts=4)
    config = CodesConfig(8, 64, 128, 2, 2, part_k=64, split=2, by_route=by_route)
    a = moe.sample_inputs(case)
    parts = [f"{x}_{what}" for x in ("gate", "up", "down") for what in ("weight", "scale")]
    parts += [f"{x}_expert_scale" for x in ("gate", "up", "down")]
    a = replace(a, expert_ids=a.expert_ids % 3, **{name: getattr(a, name)[:3] for name in parts})
    a.expert_ids[0, 0], a.expert_ids[2, 1] = -1, -1
    want = fused(a, config)
    a.expert_ids[0, 0], a.expert_ids[2, 1] = 3, -7
    assert torch.equal(fused(a, config), want)
    assert want.isfinite().all()


@pytest.mark.parametrize("routing", ["random", "one", "none"])
def test_specialised_warps_find_the_expert_in_memory(routing):
    case = MoeCase("case", num_tokens=37, num_experts=5, routing=routing)
    test_kernels_compute_the_op(case, SPECIALISED)
    made = gemms(moe.sample_inputs(case), SPECIALISED, SM100)
    assert len(made) == 2
    for spec in made:
        loop = emit(spec).partition("warp_specialize=True")[2]
        assert "tl.sum(" not in loop
        assert "tl.cumsum(" not in loop


@triton.jit
def scaled_codes(words_ptr, scales_ptr, out_ptr, DTYPE: tl.constexpr):
    rows = tl.arange(0, 256)[:, None]
    words = tl.load(words_ptr + rows * 16 + tl.arange(0, 16)[None, :])
    scales = tl.load(scales_ptr + rows * 4 + tl.arange(0, 4)[None, :])
    codes = e2m1_codes(words, scales, DTYPE, "nvfp4", 2, True)
    tl.store(out_ptr + rows * 128 + tl.arange(0, 128)[None, :], codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_times_every_scale_is_exact(dtype):
    """Row r has all codes, in some order, and the scale of code r. The scales include negative
    numbers and NaN."""
    words = torch.tensor([0x76543210, -0x01234568], dtype=torch.int32).repeat(256, 8)
    scales = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 8)
    out = torch.empty(256, 128, dtype=dtype)
    kind = tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
    interpret(scaled_codes)[(1,)](words, scales.view(torch.int16), out, DTYPE=kind)
    unit = 256.0 if dtype == torch.bfloat16 else 1.0
    codes = fp4.decode(fp4.unpack(words.view(torch.uint8))).double()
    exact = codes * scales[:, :1].view(torch.float8_e4m3fn).double()
    got = out.double().sort(1).values * unit
    torch.testing.assert_close(got, exact.sort(1).values, rtol=0, atol=0, equal_nan=True)
