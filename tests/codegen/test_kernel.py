"""Compares the declaration of a kernel with the signature of its template's function."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tilewright.codegen.kernel import Kernel, Statics
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec

# def gather(x_ptr, ids_ptr, out_ptr, num_rows, X_STRIDES, BLOCK, bias_ptr=None, BIAS_STRIDE=0)
GATHER = Kernel(
    "tests.codegen.sample_templates.bound",
    "gather",
    {"X_STRIDES": (("x", 0), ("x", 1)), "BIAS_STRIDE": ("bias", 0)},
    types={"num_rows": "i64"},
    ranges=("num_rows",),
    divisible=("num_rows",),
    unaligned=("ids",),
)


@dataclass(frozen=True)
class Tiles:
    block: int = 64
    num_warps: int = 8


X = Operand("bf16", (128, 1))
TENSORS = {"x": X, "ids": Operand("i64"), "out": Operand("bf16"), "bias": None}


def test_a_spec_is_the_one_that_is_written_out():
    bias = Operand("fp32", (2,), aligned=False)
    made = GATHER.spec("sm90", {**TENSORS, "bias": bias}, {}, [Tiles()], ["num_rows"])
    assert made == KernelSpec.make(
        GATHER.template,
        "gather",
        {"X_STRIDES": (128, 1), "BLOCK": 64, "BIAS_STRIDE": 2},
        {"x_ptr": "*bf16", "ids_ptr": "*i64", "out_ptr": "*bf16", "num_rows": "i64",
         "bias_ptr": "*fp32"},
        divisible16=("ids_ptr", "num_rows", "out_ptr", "x_ptr"),
        ranges={"num_rows": (1, 2**31 - 1)}, target="sm90", num_warps=8,
    )  # fmt: skip


def test_a_number_that_is_constant_is_told_nothing_else_of():
    made = GATHER.spec("sm90", TENSORS, {"BLOCK": 32, "num_rows": 32}, divisible=["num_rows"])
    assert "num_rows" not in made.divisible16
    assert made.ranges == ()


def test_what_has_a_default_and_is_absent_is_left_out():
    made = GATHER.spec("sm90", TENSORS, {"BLOCK": 32})
    assert "bias_ptr" not in dict(made.constants)
    assert "BIAS_STRIDE" not in dict(made.constants)


def test_what_is_omitted_is_there_where_it_is_not_the_default():
    bias = {**TENSORS, "bias": Operand("fp32", (2,))}
    for value, there in ((0, False), (2, True)):
        given = {"BLOCK": 32, "BIAS_STRIDE": value}
        for omitted in ((), ("BIAS_STRIDE",)):
            made = replace(GATHER, omitted=omitted).spec("sm90", bias, given)
            assert ("BIAS_STRIDE" in dict(made.constants)) == (there or not omitted)


def test_a_tensor_without_a_default_that_is_absent_is_a_constant_of_stride_0():
    made = GATHER.spec("sm90", {**TENSORS, "x": None}, {"BLOCK": 32})
    assert made.constant("x_ptr") is None
    assert made.constant("X_STRIDES") == (0, 0)


def test_a_known_number_is_a_constant():
    made = GATHER.spec("sm90", TENSORS, {"BLOCK": 32, "num_rows": 7})
    assert made.constant("num_rows") == 7
    assert "num_rows" not in dict(made.signature)
    assert made.ranges == ()


def test_a_constant_that_is_given_counts_before_a_records():
    assert GATHER.spec("sm90", TENSORS, {"BLOCK": 32}, [Tiles()]).constant("BLOCK") == 32
    first = [Tiles(16, 4), Tiles()]
    made = GATHER.spec("sm90", TENSORS, {}, first)
    assert (made.constant("BLOCK"), made.num_warps) == (16, 4)


def test_an_option_may_be_given_as_a_constant_is():
    assert GATHER.spec("sm90", TENSORS, {"BLOCK": 32, "num_warps": 2}, [Tiles()]).num_warps == 2


def test_a_stride_by_its_tensor_s_name_is_that_of_the_first_dimension():
    # def scatter(x_ptr, k_ptr, out_ptr, X_STRIDE, OUT_STRIDE, K, K_STRIDE=1)
    scatter = Kernel(GATHER.template, "scatter", {"OUT_STRIDE": ("out", 1)})
    pointers = {pointer.tensor: pointer.dims for pointer in scatter.pointers}
    assert pointers == {"x": (0,), "k": (), "out": (1,)}
    given = {"x": Operand("bf16", (128,)), "k": Operand("bf16"), "out": Operand("bf16", (2,))}
    made = scatter.spec("sm90", given, {"K": 3})
    assert (made.constant("X_STRIDE"), made.constant("OUT_STRIDE")) == (128, 2)
    assert made.constant("K") == 3
    assert scatter.spec("sm90", given, {"K": 3, "X_STRIDE": 5}).constant("X_STRIDE") == 5


def test_statics_have_what_their_parts_have():
    statics = Statics(Tiles(), BLOCK=16)
    made = GATHER.spec("sm90", TENSORS, {}, [statics])
    assert (made.constant("BLOCK"), made.num_warps) == (16, 8)
    assert statics != Statics(Tiles(), BLOCK=16)
    with pytest.raises(AttributeError, match="rows"):
        statics.rows  # noqa: B018


@pytest.mark.parametrize(
    ("constants", "message"),
    [({}, "a value for the constant BLOCK"), ({"BLOCK": 1, "BLCK": 1}, "got \\['BLCK'\\]")],
)
def test_constants_are_those_of_the_signature(constants, message):
    with pytest.raises(ValueError, match=message):
        GATHER.spec("sm90", TENSORS, constants)


@pytest.mark.parametrize(
    "change",
    [{"strides": {"Y_STRIDE": ("x", 0)}}, {"strides": {"X_STRIDES": ("y", 0)}},
     {"types": {"rows": "i64"}}, {"ranges": ("rows",)}, {"divisible": ("BLOCK",)},
     {"unaligned": ("ids_ptr",)}, {"omitted": ("BLOCK",)},
     {"launch_strides": {"BLOCK": ("x", 0)}},
     {"broadcast": ("y",)}],
    ids=str,
)  # fmt: skip
def test_a_declaration_names_what_the_signature_has(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}: expected names of"):
        replace(GATHER, **change).spec("sm90", TENSORS, {"BLOCK": 1})
