"""Compares `scaled_linear` on a GPU with float64 of the same codes, and tests the calls that it
refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import interpret
from tilewright.codegen.targets import SM89, SM90, SM100
from tilewright.ops.checks import ArgumentError
from tilewright.ops.formats.quantized_weight import expand_blocks
from tilewright.ops.mlp import scaled_linear
from tilewright.ops.mlp.cases import SCALED_CASES, ScaledCase
from tilewright.ops.runtime import scaled_products
from tilewright.ops.runtime.device import device_target

OP = scaled_linear.OP
BY_NAME = {case.name: case for case in SCALED_CASES}
ROWS = ScaledCase(
    "rows", num_tokens=1024, k=4096, n=6144, weight_format="fp8", scale_block=(1, 4096),
    x_scale=("tokens", 1),
)  # fmt: skip
BLOCKS = replace(ROWS, scale_block=(128, 128), x_scale=("tokens", "blocks"))
TENSORS = replace(ROWS, scale_block=(6144, 4096), x_scale=(1, 1))


def exact(a):
    """Computes the result in float64."""
    return scaled_linear.reference(replace(a, out_dtype=torch.float64))


def graphs_own(a):
    """Computes the result of the graph that the op replaces: both operands are decoded and rounded,
    and then multiplied."""
    rows = scaled_linear.scaled_numbers(a.x.double(), a.x_scale).to(a.out_dtype)
    weight = a.linear.dequantize(torch.float64).to(a.out_dtype)
    return torch.nn.functional.linear(rows, weight, a.bias)


@pytest.mark.parametrize("name", ["rows", "tensors", "blocks", "half_rows", "rows_in_blocks"])
def test_the_reference_is_float64_rounded(name):
    a = OP.sample_inputs(BY_NAME[name])
    assert OP.tolerances[a.out_dtype].problem(OP.reference(a), exact(a)) is None


@pytest.mark.parametrize("name", ["odd_blocks", "odd_sizes", "float"])
def test_what_the_library_does_not_multiply_has_a_reason(name):
    a = OP.sample_inputs(BY_NAME[name])
    assert OP.plan_for(a, "sm90").name == "reference"
    assert "scaled product" in OP.plan_for(a, "sm90").reason


@pytest.mark.parametrize(("target", "taken"), [(SM90, True), (SM100, False), (SM89, False)])
def test_blocks_are_multiplied_on_hopper_alone(target, taken):
    blocks, rows = (OP.sample_inputs(BY_NAME[name]) for name in ("blocks", "rows"))
    assert (OP.plan_for(blocks, target.name).name == "library") == taken
    assert OP.plan_for(rows, target.name).name == "library"


@pytest.mark.parametrize("tokens", [1, 3, 4, 6])
def test_rows_are_padded_for_blocks(tokens):
    a = OP.sample_inputs(replace(BY_NAME["blocks"], num_tokens=tokens))
    made = interpret(OP, a).outcome.result
    assert made.shape == (tokens, 384)
    assert OP.tolerances[a.out_dtype].problem(made, exact(a)) is None


@pytest.mark.parametrize("name", ["rows", "blocks"])
def test_no_tokens_ask_the_library_for_nothing(name, monkeypatch):
    a = OP.sample_inputs(replace(BY_NAME[name], num_tokens=0))
    for owner, product in ((torch, "_scaled_mm"), (torch.nn.functional, "scaled_mm")):
        monkeypatch.setattr(owner, product, None, raising=False)
    program = interpret(OP, a)
    assert program.outcome.name == "library"
    assert program.outcome.result.shape == (0, a.weight.shape[0])


def strided_bias(a):
    """Returns the call with a bias that has every second element of a tensor."""
    return replace(a, bias=torch.stack((a.bias, a.bias + 1), -1)[:, 0])


@pytest.mark.parametrize("name", ["tensors", "rows"])
def test_the_library_is_given_a_bias_of_neighbours(name, monkeypatch):
    """The library gets a contiguous bias, because it reads N adjacent numbers, whatever the stride
    is."""
    a = strided_bias(OP.sample_inputs(replace(BY_NAME[name], bias=True)))
    given = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, bias, **options: given.append(bias))
    interpret(OP, a)
    (bias,) = given
    assert bias.is_contiguous()
    assert torch.equal(bias, a.bias)


def test_blocks_are_given_a_bias_of_neighbours():
    """For scales by blocks, too, the library gets a contiguous bias. The stand-in for its product
    requires it."""
    a = strided_bias(OP.sample_inputs(replace(BY_NAME["blocks"], bias=True)))
    made = interpret(OP, a).outcome.result
    assert OP.tolerances[a.out_dtype].problem(made, exact(a)) is None


def part_of_wider(codes, columns, first):
    """Copies codes [T, K] into a tensor of `columns` columns, from column `first` on."""
    wide = torch.zeros(len(codes), columns, dtype=torch.uint8)
    made = wide[:, first : first + codes.shape[1]]
    made.copy_(codes.view(torch.uint8))
    return made.view(codes.dtype)


@pytest.mark.parametrize("argument", ["x", "weight"])
def test_rows_that_the_library_cannot_reach_have_a_reason(argument):
    a = OP.sample_inputs(BY_NAME["tensors"])
    codes = getattr(a, argument)
    taken = replace(a, **{argument: part_of_wider(codes, 288, 16)})
    assert scaled_linear.library_obstacle(taken) is None
    for other in (part_of_wider(codes, 264, 0), codes[:1].expand(len(codes), -1)):
        obstacle = scaled_linear.library_obstacle(replace(a, **{argument: other}))
        assert "at distances that are multiples of 16 bytes" in obstacle


@pytest.mark.parametrize("name", ["tensors", "blocks"])
@pytest.mark.parametrize("argument", ["x", "weight"])
def test_codes_at_any_address_are_given_from_whole_16_bytes_on(argument, name, monkeypatch):
    """The library gets codes that start at a multiple of 16 bytes. Calls with the same metadata
    differ only in the address."""
    a = OP.sample_inputs(BY_NAME[name])
    codes = getattr(a, argument)
    a = replace(a, **{argument: part_of_wider(codes, codes.shape[1] + 32, 8)})
    known, given = scaled_products._aligned, []
    monkeypatch.setattr(
        scaled_products, "_aligned", lambda one: given.append(known(one)) or given[-1]
    )
    made = interpret(OP, a).outcome.result
    assert [one.data_ptr() % 16 for one in given] == [0, 0]
    assert OP.tolerances[a.out_dtype].problem(made, exact(a)) is None


SCALE_BLOCKS = {
    "one": (384, 256),
    "rows": (1, 256),
    "blocks of rows": (128, 256),
    "blocks": (128, 128),
}


def with_scales(name, dtype):
    """Returns a call whose weight has scales of `dtype`, 384 rows and, by blocks, two blocks of
    columns."""
    block = SCALE_BLOCKS[name]
    x_scale = ("tokens", "blocks" if name == "blocks" else 1) if name != "one" else (1, 1)
    case = replace(BY_NAME["rows"], n=384, k=256, scale_block=block, x_scale=x_scale)
    a = OP.sample_inputs(replace(case, num_tokens=8))
    return replace(a, weight_scale=a.weight_scale.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCALE_BLOCKS)
def test_one_kernel_widens_the_scales_of_a_weight(name, dtype, monkeypatch):
    a, given = with_scales(name, dtype), []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, scale_b, **options: given.append(scale_b))
    program = interpret(OP, a)
    kernels = [spec.kernel for spec in program.specs]
    stored = dtype == torch.float32 and name in ("one", "rows")
    assert kernels == ([] if stored or dtype == torch.float64 else ["widen_scales"])
    if name == "blocks":
        assert OP.tolerances[a.out_dtype].problem(program.outcome.result, exact(a)) is None
        return
    (scale,) = given
    assert (scale.data_ptr() == a.weight_scale.data_ptr()) == stored
    each = expand_blocks(a.weight_scale.float(), (384, 1), a.scale_block)
    assert torch.equal(scale.flatten(), each.flatten()[: scale.numel()])


def test_blocks_want_a_torch_that_reads_their_strides(monkeypatch):
    a = OP.sample_inputs(BY_NAME["blocks"])
    assert scaled_linear.library_obstacle(a) is None
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0"))
    assert "requires torch 2.11" in scaled_linear.library_obstacle(a)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"out_dtype": None}, "out_dtype"),
        ({"weight_format": "int8"}, "weight_format"),
        ({"x_scale": torch.ones(2, 1)}, "x_scale"),
        ({"bias": torch.ones(128)}, "bias"),
        ({"x": torch.ones(5, 256)}, "x"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, argument):
    a = OP.sample_inputs(BY_NAME["tensors"])
    with pytest.raises(ArgumentError) as raised:
        OP.call(replace(a, **changes))
    assert raised.value.argument == argument


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def on_gpu(case, seed=0):
    """Returns arguments on the GPU. Skips the test if the GPU has no product of their kind."""
    a = OP.sample_inputs(case, device="cuda", seed=seed)
    obstacle = OP.target_obstacle(a, device_target(a.x.device)) or scaled_linear.library_obstacle(a)
    if obstacle:
        pytest.skip(obstacle)
    return a


@pytest.mark.parametrize("tokens", [1, 5, 130, 1024, 1027])
@pytest.mark.parametrize(
    "case",
    [TENSORS, ROWS, BLOCKS, replace(ROWS, bias=True), replace(ROWS, dtype=torch.float16)],
    ids=["tensors", "rows", "blocks", "bias", "half"],
)
class TestOnAGpu:
    pytestmark = GPU

    def test_no_further_from_float64_than_the_graph(self, case, tokens):
        a = on_gpu(replace(case, num_tokens=tokens))
        made, right = OP.call(a), exact(a)
        assert OP.choose("cuda", a).lowering.name == "library"
        assert OP.tolerances[a.out_dtype].problem(made, right) is None
        ours, own = ((one.double() - right).norm() for one in (made, graphs_own(a)))
        assert ours <= own + 2.0**-9 * right.norm()

    def test_a_call_repeats_itself(self, case, tokens):
        a = on_gpu(replace(case, num_tokens=tokens))
        first = OP.call(a)
        for _ in range(3):
            assert torch.equal(OP.call(a), first)
