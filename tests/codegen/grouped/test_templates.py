"""Tests the emitted kernel of `grouped_matmul` against the op's reference in float64, on Triton's
interpreter. The interpreter runs exactly the source that is emitted for SM100."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.experts import ONE_ROUNDING, SMALL_SM100, as_double
from tests.interpreted import Interpreter, interpret
from tests.tables import in_turn
from tilewright.codegen.grouped.plan import GroupedPlan, plan_grouped
from tilewright.codegen.grouped.tiles import GemmConfig
from tilewright.codegen.targets import TARGETS
from tilewright.ops import ArgumentError
from tilewright.ops.contract import get_op
from tilewright.ops.grouped.arguments import GroupedMatmulArguments
from tilewright.ops.grouped.cases import GROUPED_CASES, GroupedCase
from tilewright.ops.grouped.lowering import grouped_matmul_steps
from tilewright.ops.grouped.matmul import OP, reference, sample_inputs
from tilewright.ops.grouped.operands import grouped_problem, unsupported
from tilewright.ops.runtime.program import Buffer, drive
from tilewright.ops.runtime.replay import repeat

CONFIGS = {
    "swapped": GemmConfig(16, 64, 32, 4, 2, swapped=True),
    "tiled": GemmConfig(64, 32, 64, 4, 2),
}
CASES = [c for c in GROUPED_CASES if c.dtype in (torch.bfloat16, torch.float16) and any(c.sizes)]
CASES = [c for c in CASES if not c.coded_rows]  # test_scaled.py has the other cases


def run(a: GroupedMatmulArguments, config: GemmConfig, machine=None) -> torch.Tensor:
    """Computes a call with `grouped_gemm` and these tiles."""
    steps = grouped_matmul_steps(a, SMALL_SM100, GroupedPlan(config, None, ""))
    program = drive(steps, machine or Interpreter())
    assert [spec.kernel for spec in program.specs] == ["grouped_gemm"]
    return program.outcome.result


@pytest.mark.parametrize(("case", "config"), in_turn({case.name: case for case in CASES}, CONFIGS))
def test_kernel_computes_the_op(case, config):
    """Includes rows of groups without a weight and rows of no group. The result holds NaN before,
    and must be zero there."""
    a = sample_inputs(case)
    rounded = case.weight_format in ("int4", "fp8")
    tolerance = (OP.tolerances if rounded else ONE_ROUNDING)[a.result_dtype]
    problem = tolerance.problem(run(a, config), reference(as_double(a)))
    assert problem is None, problem


class Guarded(Interpreter):
    """An interpreter that puts rows of sevens before and after the result in memory."""

    def perform(self, step):
        if not isinstance(step, Buffer):
            return super().perform(step)
        rows, columns = step.shape
        self.memory = torch.full((rows + 128, columns), 7.0, dtype=step.dtype)
        return self.memory[64:-64]


def test_offsets_out_of_order_reach_no_memory_outside():
    """On a GPU no check reads the offsets, so bad offsets must not make the kernel read or write
    rows outside of x."""
    a = sample_inputs(GROUPED_CASES[0])
    for offsets in ([0, 9, 4, 500, -7, 79], [0, -3, 900, 2, 2, 2], [5, 1, 1, 1, 1, 1000]):
        machine = Guarded()
        bad = replace(a, group_offsets=torch.tensor(offsets, dtype=torch.int32))
        run(bad, CONFIGS["tiled"], machine)
        assert (machine.memory[:64] == 7).all()
        assert (machine.memory[-64:] == 7).all()


def every_other(tensor):
    """Returns a tensor with the same numbers that has other numbers between them in memory."""
    return torch.stack((tensor, tensor + 1), -1)[..., 0]


def test_numbers_of_groups_and_experts_may_lie_apart():
    a = sample_inputs(GroupedCase("apart", (5, 20, 3), (1, -1, 0), inner=96, weight_format="nvfp4"))
    names = ("group_offsets", "expert_ids", "weight_expert_scale")
    apart = replace(a, **{name: every_other(getattr(a, name)) for name in names})
    assert torch.equal(run(apart, CONFIGS["swapped"]), run(a, CONFIGS["swapped"]))


def test_weights_of_no_contiguous_dimension_are_left_to_the_reference():
    a = sample_inputs(GROUPED_CASES[0])
    spread = torch.stack([a.weight] * 8, -1)[..., 0]
    assert "neither rows nor columns" in unsupported(replace(a, weight=spread))


def with_nan_scale(a, form):
    """Returns arguments in which a scale of one block is NaN, if the format has such a scale. If
    the scale were infinity instead, the block's sum would be infinity."""
    if form != "mxfp4":
        return a
    a.weight_scale[0, 3, 1] = 255
    a.weight[0, 3, 16:32] = 0x22
    return replace(a, x=a.x.abs() + 0.1)


@pytest.mark.parametrize("sizes", [(5, 0, 20), (130, 0, 280)], ids=["few", "some"])
@pytest.mark.parametrize("form", ["int4", "nvfp4", "mxfp4"])
def test_rows_have_their_codes_streamed(form, sizes):
    case = GroupedCase("case", sizes, None, 80, 256, 4, spare=3, weight_format=form)
    a = with_nan_scale(sample_inputs(case), form)
    a = replace(a, bias=torch.ones(4, 80, dtype=a.x.dtype))
    program = interpret(OP, a)
    assert [spec.kernel for spec in program.specs] == ["moe_down_codes"]
    tolerance = (OP.tolerances if form == "int4" else ONE_ROUNDING)[torch.bfloat16]
    problem = tolerance.problem(program.outcome.result, reference(as_double(a)))
    assert problem is None, problem


@pytest.mark.parametrize(
    ("form", "kernel"), [("int4", "moe_down_codes"), ("nvfp4", "grouped_gemm")]
)
def test_scales_that_are_loaded_one_by_one_lie_anywhere(form, kernel):
    """Tests int4 scales, which are loaded one by one, at any address. For E2M1 codes, kernels load
    several scales at once, and these must be aligned."""
    a = sample_inputs(GroupedCase("case", (5, 0, 20), None, 80, 256, 4, weight_format=form))
    scale = a.weight_scale.view(torch.uint8)
    moved = torch.cat((scale.new_zeros(2), scale.flatten()))[2:].view(scale.shape)
    program = interpret(OP, replace(a, weight_scale=moved.view(a.weight_scale.dtype)))
    assert [spec.kernel for spec in program.specs] == [kernel]
    problem = OP.tolerances[torch.bfloat16].problem(program.outcome.result, reference(as_double(a)))
    assert problem is None, problem


@pytest.mark.parametrize("form", ["fp8", "int4", "nvfp4", "mxfp4"])
def test_many_rows_have_their_weights_dequantised_first(form):
    case = GroupedCase("case", (300, 190), (1, 0), 80, 160, 2, spare=3, weight_format=form)
    a = with_nan_scale(sample_inputs(case), form)
    program = interpret(OP, a)
    assert [spec.kernel for spec in program.specs] == ["dequantize_experts", "grouped_gemm"]
    tolerance = (OP.tolerances if form in ("int4", "fp8") else ONE_ROUNDING)[torch.bfloat16]
    problem = tolerance.problem(program.outcome.result, reference(as_double(a)))
    assert problem is None, problem


def test_rows_that_tma_could_not_step_through_are_not_dequantised_first():
    a = sample_inputs(GroupedCase("case", (300,), None, 80, 128, 1, weight_format="fp8"))
    problem, target = grouped_problem(a), TARGETS["sm90"]
    assert plan_grouped(problem, 512, target).decode
    assert not plan_grouped(replace(problem, inner=36), 512, target).decode


def test_a_tensor_that_tma_cannot_start_at_is_moved():
    a = sample_inputs(GROUPED_CASES[0])
    shifted = torch.zeros(a.x.numel() + 1, dtype=a.x.dtype)[1:].view(a.x.shape).copy_(a.x)
    moved, plain = (interpret(OP, each) for each in (replace(a, x=shifted), a))
    assert moved.specs == plain.specs
    assert torch.equal(moved.outcome.result, plain.outcome.result)


def test_a_moved_tensor_that_tma_cannot_step_through_goes_to_the_reference():
    """Tests rows of 20 columns. With a gap between them, they start at multiples of 16 bytes. The
    rows of a contiguous copy do not."""
    a = sample_inputs(replace(GROUPED_CASES[0], inner=20))
    x = torch.zeros(a.x.shape[0], 32, dtype=a.x.dtype)[:, 4:24].copy_(a.x)
    weight = torch.zeros(5, 48, 24, dtype=a.x.dtype)[..., :20].copy_(a.weight)
    a = replace(a, x=x, weight=weight)
    assert unsupported(a) is None
    program = interpret(OP, a)
    assert program.outcome.name == "reference"
    assert not program.repeatable
    assert not program.specs
    assert torch.equal(program.outcome.result, reference(a))


def test_a_call_is_remembered_unless_it_copied_an_argument():
    """A call is not remembered if a step copied an argument, because the remembered steps would not
    fill the copy again."""
    a = sample_inputs(GROUPED_CASES[0])
    machine = Interpreter(SMALL_SM100)
    apart = replace(a, group_offsets=every_other(a.group_offsets))
    for each, remembered in ((a, True), (apart, False)):
        program = drive(grouped_matmul_steps(each, machine.target), machine)
        again = repeat(program, *OP.split(each), machine)
        assert (again is not None) == remembered


def test_a_call_is_planned_for_both_chips():
    for target in ("sm90", "sm100"):
        for rows in (1, 40, 100, 4000):
            a = sample_inputs(GroupedCase("case", sizes=(rows,), num_experts=1))
            report = get_op("grouped_matmul").plan_for(a, target)
            assert report.name == "grouped kernel"
            assert [spec.kernel for spec in report.specs] == ["grouped_gemm"]


def test_what_no_kernel_takes_goes_to_the_reference():
    a = sample_inputs(GROUPED_CASES[0])
    for other, why in (
        (replace(a, x=a.x[:, :63], weight=a.weight[..., :63].contiguous()), "weight: strides"),
        (replace(a, x=torch.zeros(79, 73, dtype=a.x.dtype)[:, :72]), "x: the stride of rows, 73"),
        (sample_inputs(GroupedCase("single", dtype=torch.float32)), "torch.float32"),
    ):
        choice = OP.choose("cuda", other)
        assert choice.lowering.name == "reference"
        assert why in choice.rejected[0][1]


def coded_rows() -> GroupedMatmulArguments:
    return sample_inputs(next(case for case in GROUPED_CASES if case.coded_rows))


BAD = {
    "group_offsets": [
        lambda a: replace(a, group_offsets=a.group_offsets.flip(0)),
        lambda a: replace(a, group_offsets=a.group_offsets + 1),
        lambda a: replace(a, group_offsets=2 * a.group_offsets),
        lambda a: replace(a, group_offsets=torch.zeros(9, dtype=torch.int32)),
        lambda a: replace(a, group_offsets=a.group_offsets[:0]),
        lambda a: replace(a, group_offsets=a.group_offsets.float()),
    ],
    "expert_ids": [
        lambda a: replace(a, expert_ids=torch.tensor([0, 1, 5, 2, 2], dtype=torch.int32)),
        lambda a: replace(a, expert_ids=torch.tensor([0, 1, -2, 2, 2], dtype=torch.int32)),
        lambda a: replace(a, expert_ids=torch.zeros(2, dtype=torch.int32)),
    ],
    "weight": [
        lambda a: replace(a, weight=a.weight[..., :64].contiguous()),
        lambda a: replace(a, weight=a.weight.float()),
        lambda a: replace(a, weight=a.weight[0]),
    ],
    "weight_scale": [
        lambda a: replace(a, weight=a.weight.to(torch.float8_e4m3fn), weight_format="fp8"),
        lambda a: replace(a, weight_scale=torch.ones(5, 1, 1)),
    ],
    "weight_format": [
        lambda a: replace(a, weight_format="int3"),
        lambda a: replace(coded_rows(), weight_format="dense", weight_scale=None),
    ],
    "x_scale": [
        lambda a: replace(coded_rows(), x_scale=torch.ones(79, 2)),
        lambda a: replace(coded_rows(), x_scale=coded_rows().x_scale.bfloat16()),
    ],
    "bias": [lambda a: replace(a, bias=torch.zeros(5, 47, dtype=a.x.dtype))],
    "out_dtype": [lambda a: replace(a, out_dtype=torch.int8)],
    "x": [
        lambda a: replace(a, x=a.x.to(torch.float8_e4m3fn)),
        lambda a: replace(coded_rows(), x=coded_rows().x.bfloat16()),
        lambda a: replace(a, x=a.x[0]),
        lambda a: replace(a, x=a.x.T.contiguous().T),
    ],
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_named(argument):
    a = sample_inputs(GROUPED_CASES[0])
    OP.call(a)
    for spoil in BAD[argument]:
        with pytest.raises(ArgumentError, match=rf"^grouped_matmul: {argument}: "):
            OP.call(spoil(a))


def test_offsets_of_torch_and_exclusive_ones_are_the_same():
    a = sample_inputs(GROUPED_CASES[0])
    ends = replace(a, group_offsets=a.group_offsets[1:], end_offsets=True)
    assert torch.equal(OP.call(a), OP.call(ends))


def test_the_result_is_that_of_torch():
    a = sample_inputs(GroupedCase("case", num_experts=5))
    want = torch.nn.functional.grouped_mm(a.x, a.weight.mT, offs=a.group_offsets[1:])
    torch.testing.assert_close(OP.call(a), want)


def test_512_experts_most_without_rows():
    sizes = tuple(3 if g in (0, 7, 511) else 0 for g in range(512))
    a = sample_inputs(GroupedCase("many", sizes=sizes, num_experts=512, inner=16, rows=16))
    got = run(a, CONFIGS["swapped"])
    problem = ONE_ROUNDING[torch.bfloat16].problem(got, reference(as_double(a)))
    assert problem is None, problem


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("form", ["dense", "fp8", "fp8_rows", "int4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("rows", "sizes"), [(352, (0, 3, 40, 0)), (704, (129, 0, 100, 127)), (2880, (700, 1, 513, 0))]
)
def test_widths_that_no_tile_divides(rows, form, sizes):
    coded = form == "fp8_rows"
    form = form.removesuffix("_rows")
    case = GroupedCase(
        "case", sizes, (2, -1, 0, 1), rows, 704, 3, spare=5, weight_format=form, coded_rows=coded
    )
    exact = reference(as_double(sample_inputs(case)))
    tolerance = (OP.tolerances if form in ("int4", "fp8") else ONE_ROUNDING)[torch.bfloat16]
    problem = tolerance.problem(OP.call(sample_inputs(case, "cuda")), exact)
    assert problem is None, problem
