"""The emitted kernel of `grouped_matmul` against the op's reference in float64, on Triton's
interpreter. What runs is the very source emitted for SM100."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tilewright.codegen.build import load_interpreted
from tilewright.codegen.grouped.plan import plan_grouped
from tilewright.codegen.grouped.specs import GemmConfig, grouped_spec
from tilewright.codegen.targets import TARGETS
from tilewright.ops import ArgumentError
from tilewright.ops.contract import Tolerance, get_op
from tilewright.ops.grouped import lowering as grouped_lowerings
from tilewright.ops.grouped.cases import GROUPED_CASES, GroupedCase
from tilewright.ops.grouped.lowering import kernel_values
from tilewright.ops.grouped.matmul import OP, GroupedMatmulArguments, reference, sample_inputs
from tilewright.ops.grouped.operands import grouped_problem, unsupported

CONFIGS = {
    "swapped": GemmConfig(16, 64, 32, True, 4, 2),
    "tiled": GemmConfig(64, 32, 64, False, 4, 2),
}
CASES = [c for c in GROUPED_CASES if c.dtype in (torch.bfloat16, torch.float16) and c.sizes]
CASES = [c for c in CASES if not c.coded_rows]  # test_scaled.py has them
# One rounding of the result, where the weights need none.
ONE_ROUNDING = {
    torch.bfloat16: Tolerance(2.0**-8, 2.0**-16),
    torch.float16: Tolerance(2.0**-11, 2.0**-16),
    torch.float32: Tolerance(2.0**-20, 2.0**-18),
}


def run(a: GroupedMatmulArguments, config: GemmConfig) -> torch.Tensor:
    out = torch.full((a.x.shape[0], a.weight.shape[1]), float("nan"), dtype=a.result_dtype)
    spec = grouped_spec(grouped_problem(a), config, "sm100")
    values = kernel_values(a, out)
    load_interpreted(spec)[(3,)](*(values[name] for name, _ in spec.signature))
    return out


def as_double(a: GroupedMatmulArguments) -> GroupedMatmulArguments:
    values = {f.name: getattr(a, f.name) for f in fields(a)}
    floats = ("bias", "x" if a.x_scale is None else "x_scale")
    wide = {n: v.double() for n, v in values.items() if n in floats and v is not None}
    return replace(a, **wide, out_dtype=torch.float64)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_op(case, config):
    """Rows without a weight and rows of no group included: they were NaN and come out zero."""
    a = sample_inputs(case)
    rounded = case.weight_format in ("int4", "fp8")
    tolerance = (OP.tolerances if rounded else ONE_ROUNDING)[a.result_dtype]
    problem = tolerance.problem(run(a, CONFIGS[config]), reference(as_double(a)))
    assert problem is None, problem


def test_offsets_out_of_order_reach_no_memory_outside():
    """On a GPU nobody looks at them: no row outside of x is read or written."""
    a = sample_inputs(GROUPED_CASES[0])
    for offsets in ([0, 9, 4, 500, -7, 79], [0, -3, 900, 2, 2, 2], [5, 1, 1, 1, 1, 1000]):
        bad = replace(a, group_offsets=torch.tensor(offsets, dtype=torch.int32))
        guarded = torch.full((a.x.shape[0] + 128, a.weight.shape[1]), 7.0, dtype=a.x.dtype)
        out = guarded[64:-64]
        spec = grouped_spec(grouped_problem(bad), CONFIGS["tiled"], "sm100")
        values = kernel_values(bad, out)
        load_interpreted(spec)[(3,)](*(values[name] for name, _ in spec.signature))
        assert (guarded[:64] == 7).all()
        assert (guarded[-64:] == 7).all()


def every_other(tensor):
    """The same numbers, with others between them."""
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


@pytest.fixture
def interpreted(monkeypatch):
    """Launches run the emitted source on the CPU; the names of their kernels, in order."""
    names = []

    def interpret(spec, grid, values, device):
        names.append(spec.kernel)
        full_grid = (*grid, *(1,) * (3 - len(grid)))
        load_interpreted(spec)[full_grid](*(values[name] for name, _ in spec.signature))

    few = type("Properties", (), {"multi_processor_count": 2})
    monkeypatch.setattr(grouped_lowerings, "launch", interpret)
    monkeypatch.setattr(grouped_lowerings, "device_target", lambda device: TARGETS["sm90"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    return names


@pytest.mark.parametrize("sizes", [(5, 0, 20), (130, 0, 280)], ids=["few", "some"])
@pytest.mark.parametrize("form", ["int4", "nvfp4", "mxfp4"])
def test_rows_have_their_codes_streamed(form, sizes, interpreted):
    case = GroupedCase("case", sizes, None, 80, 256, 4, spare=3, weight_format=form)
    a = sample_inputs(case)
    args, options = OP.split(replace(a, bias=torch.ones(4, 80, dtype=a.x.dtype)))
    out = grouped_lowerings.launch_grouped_matmul(*args, **options)
    assert interpreted == ["moe_down_codes"]
    tolerance = (OP.tolerances if form == "int4" else ONE_ROUNDING)[torch.bfloat16]
    exact = reference(as_double(OP.arguments(*args, **options)))
    problem = tolerance.problem(out, exact)
    assert problem is None, problem


@pytest.mark.parametrize("form", ["fp8", "int4", "nvfp4", "mxfp4"])
def test_many_rows_have_their_weights_decoded_first(form, interpreted):
    case = GroupedCase("case", (300, 190), (1, 0), 80, 160, 2, spare=3, weight_format=form)
    a = sample_inputs(case)
    args, options = OP.split(a)
    out = grouped_lowerings.launch_grouped_matmul(*args, **options)
    assert interpreted == ["dequantize_experts", "grouped_gemm"]
    tolerance = (OP.tolerances if form in ("int4", "fp8") else ONE_ROUNDING)[torch.bfloat16]
    problem = tolerance.problem(out, reference(as_double(a)))
    assert problem is None, problem


def test_rows_that_tma_could_not_step_through_are_not_decoded_first():
    a = sample_inputs(GroupedCase("case", (300,), None, 80, 128, 1, weight_format="fp8"))
    problem, target = grouped_problem(a), TARGETS["sm90"]
    assert plan_grouped(problem, 512, target).decode
    assert not plan_grouped(replace(problem, inner=36), 512, target).decode


def test_a_tensor_that_tma_cannot_start_at_is_moved(interpreted):
    a = sample_inputs(GROUPED_CASES[0])
    shifted = torch.zeros(a.x.numel() + 1, dtype=a.x.dtype)[1:].view(a.x.shape).copy_(a.x)
    args, options = OP.split(replace(a, x=shifted))
    assert torch.equal(
        grouped_lowerings.launch_grouped_matmul(*args, **options),
        run(a, plan_grouped(grouped_problem(a), 128, TARGETS["sm90"]).gemm),
    )


def test_a_moved_tensor_that_tma_cannot_step_through_goes_to_the_reference(interpreted):
    """Rows of 20 columns with a gap are whole 16 bytes apart, those of a copy are not."""
    a = sample_inputs(replace(GROUPED_CASES[0], inner=20))
    x = torch.zeros(a.x.shape[0], 32, dtype=a.x.dtype)[:, 4:24].copy_(a.x)
    weight = torch.zeros(5, 48, 24, dtype=a.x.dtype)[..., :20].copy_(a.weight)
    a = replace(a, x=x, weight=weight)
    assert unsupported(a) is None
    args, options = OP.split(a)
    out = grouped_lowerings.launch_grouped_matmul(*args, **options)
    assert not interpreted
    assert torch.equal(out, reference(a))


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
        (replace(a, x=torch.zeros(79, 73, dtype=a.x.dtype)[:, :72]), "x: rows 73"),
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
