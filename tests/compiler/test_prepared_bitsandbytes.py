"""Tests single linears of bitsandbytes, of four bits and of eight, and the modules that `prepare`
makes of them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.agreement import ALLOWANCE, relative_error
from tests.models.single_linear import SHAPES, assert_no_further, inputs, one_linear
from tests.tables import all_pairs
from tilewright.codegen.formats import TABLES
from tilewright.compiler import prepare
from tilewright.compiler.quantised.bitsandbytes import ByteLinear, OutlierLinear


def four_bits(
    columns=256, rows=64, bias=True, dtype=torch.bfloat16, compute_dtype=None, nested=True,
    quant_type="nf4", **options,
):  # fmt: skip
    """Returns a quantised linear of bitsandbytes that computes as on a CPU for which the library
    has no kernel."""
    nn4 = pytest.importorskip("bitsandbytes.nn")
    model = one_linear(columns, rows, bias, dtype)
    module = nn4.Linear4bit(
        columns, rows, bias, compute_dtype, compress_statistics=nested, quant_type=quant_type,
        **options,
    )  # fmt: skip
    module.load_state_dict(model[0].state_dict())
    module = module.to("cpu").eval().requires_grad_(False)
    module.support_avx512bf16_for_cpu = False
    if bias:
        module.bias.data = module.bias.data.to(dtype)
    return nn.Sequential(module)


def table_weight(module):
    """Returns the weight [N, K] in float64, decoded code by code."""
    state, table = module.weight.quant_state, module.weight.quant_state.code.double()
    absmax = state.absmax
    if state.nested:
        block = torch.arange(len(absmax)) // 256
        absmax = state.state2.code[absmax.long()].double() * state.state2.absmax[block].double()
        absmax = absmax + state.offset.double()
    at = torch.arange(module.in_features * module.out_features)
    packed = module.weight.data.view(torch.uint8).flatten().long()[at // 2]
    codes = torch.where(at % 2 == 0, packed >> 4, packed & 15)
    weight = table[codes] * absmax[at // state.blocksize].double()
    return weight.view(module.out_features, module.in_features)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, None),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, None),
    ],
)
def test_linears_of_bitsandbytes_are_the_librarys_to_the_bit(
    dtype, compute_dtype, nested, quant_type
):
    model = four_bits(
        dtype=dtype, compute_dtype=compute_dtype, nested=nested, quant_type=quant_type
    )
    theirs = copy.deepcopy(model)
    (one,) = prepare(model).replaced
    assert f"{quant_type}, compute_dtype={compute_dtype}" in str(one.module)
    for shape in SHAPES:
        x = inputs(shape, dtype)
        torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=0, msg=f"{shape}")
    if dtype == compute_dtype:
        assert_no_further(model, theirs, table_weight(theirs[0]), dtype)


@pytest.mark.parametrize(
    "options",
    [{"columns": 32}, {"columns": 96, "rows": 6}, {"quant_storage": torch.bfloat16}],
    ids=["blocks of two rows", "blocks across rows", "stored as bfloat16"],
)
def test_other_shapes_of_bitsandbytes(options):
    """The results are compared with the decoded codes, because the library's own kernel for CPUs is
    wrong for these shapes: it begins a new block with each row."""
    model = four_bits(compute_dtype=torch.bfloat16, **options)
    weight, bias = table_weight(model[0]), model[0].bias.double()
    assert len(prepare(model).replaced) == 1
    x = inputs((3, options.get("columns", 256)), torch.bfloat16)
    exact = nn.functional.linear(x.double(), weight, bias)
    assert relative_error(model(x), exact) <= ALLOWANCE[torch.bfloat16]


class Linear4bit(nn.Linear):
    """Stands for the library's module, on machines where the library is not installed."""

    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, quant_type):
        super().__init__(128, 8, bias=False)
        codes = torch.arange(8 * 64).to(torch.uint8).view(-1, 1)
        self.weight, self.compute_dtype = nn.Parameter(codes, requires_grad=False), None
        self.weight.quant_state = SimpleNamespace(
            shape=(8, 128), blocksize=64, absmax=torch.linspace(0.5, 2, 16), nested=False,
            quant_type=quant_type, code=torch.tensor(TABLES.get(quant_type, TABLES["nf4"])),
        )  # fmt: skip


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_codes_are_numbers_of_the_table_that_the_weight_names(quant_type):
    model = nn.Sequential(Linear4bit(quant_type))
    weight = table_weight(model[0])
    (one,) = prepare(model).replaced
    assert torch.equal(one.module.weight_of_codes(torch.float32), weight.float())


def test_codes_of_a_table_of_another_name_stay():
    prepared = prepare(nn.Sequential(Linear4bit("int4")))
    assert prepared.replaced == []
    assert "its table is not that of" in prepared.left[0].reason


def other_table(module):
    module.weight.quant_state.code[3] += 0.01


def packed_for_this_cpu(module):
    module.weight.quant_state.packing_format_for_cpu = True


def not_quantised(module):
    module.weight.quant_state = None


def of_other_orientation(module):
    state = module.weight.quant_state
    state.shape = state.shape[::-1]


def other_blocks_of_scales(module):
    module.weight.quant_state.state2.blocksize = 128


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_table, "its table is not that of nf4"),
        (packed_for_this_cpu, "the model ran before `prepare`"),
        (not_quantised, "not quantised yet"),
        (of_other_orientation, "its weight is [256, 64], not [64, 256]"),
        (other_blocks_of_scales, "its second-level scales cover 128 scales each, not 256"),
    ],
)
def test_linears_of_bitsandbytes_that_are_not_read_stay(change, reason):
    model = four_bits()
    change(model[0])
    prepared = prepare(model)
    assert prepared.replaced == []
    assert reason in prepared.left[0].reason


def test_a_last_block_that_is_not_full_stays():
    model = four_bits(columns=34, rows=3)
    assert "its last block is not full" in prepare(model).left[0].reason


def eight_bits(threshold, bias=True, dtype=torch.bfloat16):
    nn8 = pytest.importorskip("bitsandbytes.nn")
    model = one_linear(256, 64, bias, dtype)
    module = nn8.Linear8bitLt(256, 64, bias, has_fp16_weights=False, threshold=threshold)
    module.load_state_dict(model[0].state_dict())
    return nn.Sequential(module.to("cpu").to(dtype).eval().requires_grad_(False))


@pytest.mark.parametrize(
    ("dtype", "bias", "called_before"),
    all_pairs([torch.bfloat16, torch.float16], [False, True], [False, True]),
)
def test_linears_of_bytes_of_bitsandbytes_are_the_librarys_to_the_bit(dtype, bias, called_before):
    model, theirs = (eight_bits(0.0, bias, dtype) for _ in range(2))
    if called_before:
        model(inputs((1, 256), dtype))
    assert len(prepare(model).replaced) == 1
    for shape in SHAPES:
        x = inputs(shape, dtype)
        if len(shape) > 3:  # the library's own module does not take such an x
            continue
        torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=0, msg=f"{shape}")


def with_outliers(shape, dtype):
    """Returns x with magnitudes of 6 and more in three columns, each in one row, and with one
    magnitude just below 6."""
    x = inputs(shape, dtype).clamp(-5, 5)
    rows = x.view(-1, x.shape[-1])
    for column, number in ((3, 20.0), (100, -6.0), (200, 7.5), (17, 5.96875)):
        rows[column % len(rows), column] = number
    return x


def linear_of_bytes(kind, dtype, **options):
    """Returns a module that `prepare` makes; this needs no library."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (64, 256), generator=generator).to(torch.int8)
    scale, bias = torch.rand(2, 64, generator=generator)
    return kind(256, 64, {"codes": codes, "scale": scale, "bias": bias.to(dtype)}, **options)


@pytest.mark.parametrize("shape", [(1, 256), (5, 256), (2, 3, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_columns_with_outliers_are_not_rounded_and_the_others_are(dtype, shape):
    module, x = linear_of_bytes(OutlierLinear, dtype, threshold=6.0), with_outliers(shape, dtype)
    rows = x.view(-1, 256).double()
    inside = rows.where(rows.abs() < 6.0, 0.0)
    largest = inside.abs().amax(1, keepdim=True)
    exact = torch.round(inside * 127 / largest) * largest / 127
    exact[:, [3, 100, 200]] = rows[:, [3, 100, 200]]
    weight = module.codes.double() * module.scale.double()[:, None] / 127
    expected = nn.functional.linear(exact, weight, module.bias.double()).view(*shape[:-1], 64)
    assert relative_error(module(x), expected) <= 2 * ALLOWANCE[dtype]


@pytest.mark.parametrize("kind", [ByteLinear, OutlierLinear])
def test_no_rows_have_no_results(kind):
    made = linear_of_bytes(kind, torch.bfloat16)(torch.zeros(2, 0, 256, dtype=torch.bfloat16))
    assert made.shape == (2, 0, 64)


@pytest.mark.parametrize("shape", [(1, 256), (5, 256), (2, 3, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_columns_with_outliers_are_multiplied_as_they_are(dtype, shape):
    model, theirs = (eight_bits(6.0, True, dtype) for _ in range(2))
    (one,) = prepare(model).replaced
    x = with_outliers(shape, dtype)
    rows = x.view(-1, 256)
    quantise = torch.ops.bitsandbytes.int8_vectorwise_quant.default
    codes, largest, columns = quantise(rows.half().clone(), 6.0)
    assert set(columns.tolist()) == {3, 100, 200}
    weight = one.module.codes.double() * one.module.scale.double()[:, None] / 127
    exact = codes.double() * largest.double()[:, None] / 127
    exact[:, columns] = rows[:, columns].double()
    exact = nn.functional.linear(exact, weight, model[0].bias.double()).view(*shape[:-1], -1)
    allowed = relative_error(theirs(x), exact) + ALLOWANCE[dtype]
    assert relative_error(model(x), exact) <= allowed
    one.module.threshold = 100.0
    assert relative_error(model(x), exact) > allowed
