"""Tests that `mla_decode` takes the codes of an up-projection that the graph decodes, and that a
report says why it takes the decoded weight instead."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.agreement import assert_no_worse, cloned, upcast
from tests.models import quantized
from tests.models.mla_absorbed import build
from tests.models.quantized import QuantizedLinear
from tests.patterns.mla.test_decode import site_of
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SIZES = {"nope": 24, "v_dim": 32, "kv_rank": 64, "num_heads": 4}


class Coded(nn.Module):
    """An up-projection of codes, which `form` decodes to the dtype `out`."""

    def __init__(self, form, rows: int, rank: int) -> None:
        super().__init__()
        self.layer = QuantizedLinear(form, rank, rows)
        self.out = torch.bfloat16

    @property
    def weight(self):
        return self.layer.form(self.layer, self.out)


def coded_model(form, spelling="bmm", **sizes):
    """Returns (model, args) of a model whose up-projection has the codes of a form."""
    model, args = build(spelling, **SIZES | sizes)
    model.kv_b = Coded(form, *model.kv_b.weight.shape)
    return model, args


def in_float64(model, args):
    """Computes the result of a model with the same numbers in float64."""
    exact = copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.data = parameter.data.double()
    exact.kv_b.out = torch.float64
    return exact(*(upcast(a) for a in args))


def check_fused(model, args):
    """Returns the fused site of a model, after a check that the result is no less accurate than
    eager's."""
    expected, exact = model(*cloned(args)), in_float64(model, args)
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    assert_no_worse(compiled(*cloned(args)), expected, exact, "coded weight")
    return site_of(reports()[-1])


TAKEN = {
    "nibbles_low_first": "int4_k",
    "nibbles_high_first": "int4_k",
    "gptq": "int4_k with zeros",
    "awq": "int4_n with zeros",
    "int8": "int8",
    "int8_unsigned_with_zeros": "int8 with zeros",
    "fp8_channel": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "nf4": "nf4",
}


@pytest.mark.parametrize("name", TAKEN)
def test_codes_reach_the_op_and_the_result_is_no_worse(name):
    site = check_fused(*coded_model(getattr(quantized, name)))
    assert site.shapes["weight"] == TAKEN[name]
    assert [kernel.spec.kernel for kernel in site.kernels if "head" in kernel.spec.kernel] == [
        "coded_head_products"
    ] * 2


@pytest.mark.parametrize("spelling", ["einsum", "sdpa", "in_float32"])
def test_codes_are_found_in_other_spellings(spelling):
    model, args = coded_model(quantized.gptq, spelling)
    assert site_of(lower(model, args)).shapes["weight"] == "int4_k with zeros"


def of_both_halves(layer, dtype):
    """Negates the codes of the values."""
    weight = quantized.int8(layer, dtype).unflatten(0, (4, -1))
    return torch.cat((weight[:, :24], -weight[:, 24:]), dim=1).flatten(0, 1)


of_both_halves.stored = quantized.int8_buffers


def scaled_by_element(layer, dtype):
    return layer.codes.to(dtype) * layer.scale.to(dtype)


def stored_by_element(rows, hidden, generator):
    codes = torch.randint(-128, 128, (rows, hidden), generator=generator).to(torch.int8)
    return {"codes": codes, "scale": quantized.scales(generator, rows, hidden)}


scaled_by_element.stored = stored_by_element

DECODED = {
    quantized.nf4_low_first: "decoded (WEIGHT_FORMAT)",
    scaled_by_element: "decoded (SCALE_BLOCK)",
    of_both_halves: "decoded (WEIGHT_FORMAT)",
}


@pytest.mark.parametrize("form", DECODED, ids=lambda form: form.__name__)
def test_other_codes_are_decoded_by_the_graph_and_the_report_says_why(form):
    assert check_fused(*coded_model(form)).shapes["weight"] == DECODED[form]


def test_codes_of_two_weights_are_decoded_by_the_graph():
    model, args = build("matmul", **SIZES)
    axes = model.axes
    halves = [
        Coded(quantized.int8, axes.num_heads * rows, axes.kv_rank)
        for rows in (axes.nope, axes.v_dim)
    ]
    model.kv_b = nn.ModuleList(halves)

    class Apart(type(model)):
        @property
        def halves(self):
            return [one.weight.unflatten(0, (self.axes.num_heads, -1)) for one in self.kv_b]

    model.__class__ = Apart
    assert site_of(lower(model, args)).shapes["weight"] == "decoded (two weights)"
