"""Tests the report of how much memory and time quantised weights save.

The bytes are compared with the tensors of the model, and the times with those of the same step with
weights in bfloat16.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import quantized
from tests.models.coded import build_coded
from tests.models.quantized import QuantizedLinear
from tilewright.codegen.targets import get_target
from tilewright.compiler import lower
from tilewright.compiler.report.savings import savings_of
from tilewright.compiler.report.step import step_of
from tilewright.compiler.report.work import share_of_experts

H200 = get_target("sm90")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

#: For each format: its name in words, and the names of the buffers with scales and zeros that a
#: step reads.
FORMATS = {
    "int8": ("int8 codes with a scale for each row", ("scale",), ()),
    "awq": ("int4 codes in groups of 16", ("scale",), ("zeros",)),
    "gptq": ("int4 codes in groups of 16", ("scale",), ("zeros",)),
    "fp8_block": ("fp8 codes in blocks of 32 x 32", ("scale",), ()),
    "mxfp4": ("mxfp4 codes in groups of 32", ("exponents",), ()),
}


@functools.cache
def lowered(name, *formats):
    """Returns (model, report). The tests only read them."""
    case = build_coded(name, list(formats))
    torch._dynamo.reset()
    return case.model, lower(case.model, case.args, case.kwargs, target="sm90")


def held(model, names):
    """Returns the bytes that the named buffers of quantised linears take."""
    linears = [one for one in model.modules() if isinstance(one, QuantizedLinear)]
    tensors = [one.get_buffer(name) for one in linears for name in names]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_are_those_that_the_model_holds(form):
    words, scales, zeros = FORMATS[form]
    model, report = lowered("llama", form)
    savings = savings_of(report)
    linears = [one for one in model.modules() if isinstance(one, QuantizedLinear)]
    codes = {"awq": "packed", "gptq": "packed", "mxfp4": "packed"}.get(form, "codes")
    assert savings.forms == (words,)
    assert savings.read.codes == held(model, (codes,)) > 0
    assert savings.read.scales == held(model, scales) > 0
    assert savings.read.zeros == held(model, zeros)
    assert savings.read.bfloat16 == 2 * sum(one.hidden * one.width for one in linears)
    assert sum(row.count for row in savings.rows) == 4  # qkv, o, gate and up, down


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llama", "int8"),
        ("llama", "awq"),
        ("llama", "nf4"),
        ("llama", "nvfp4"),
        ("qwen3_moe", "fp8_block"),
    ],
)
def test_the_other_step_is_that_of_the_dense_model(name, form):
    there = step_of(lowered(name, "bf16")[1]).total
    _, report = lowered(name, form)
    savings = savings_of(report)
    here = step_of(report).total
    assert savings.times.bfloat16_floor_us == pytest.approx(there.floor_us)
    assert savings.times.bfloat16_modelled_us == pytest.approx(there.modelled_us)
    assert savings.times.floor_us == pytest.approx(here.floor_us)
    assert savings.times.modelled_us == pytest.approx(here.modelled_us)
    assert savings.times.floor_us < savings.times.bfloat16_floor_us


def test_the_tokens_in_caches_are_in_both_times():
    _, report = lowered("llama", "awq")
    empty, some = savings_of(report), savings_of(report, 4)
    more = some.times.floor_us - empty.times.floor_us
    assert more > 0
    there = some.times.bfloat16_floor_us - empty.times.bfloat16_floor_us
    assert there == pytest.approx(more)


def test_of_experts_those_in_use_are_read():
    model, report = lowered("qwen3_moe", "mxfp4")
    (site,) = (site for site in report.matches if site.pattern == "moe")
    (row,) = (row for row in savings_of(report).rows if row.by == "moe")
    share = share_of_experts(site)
    assert row.form == "mxfp4 codes in groups of 32"
    config = model.config
    numbers = 3 * config.num_experts * config.moe_intermediate_size * config.hidden_size
    assert row.read.bfloat16 == pytest.approx(2 * share * numbers, abs=8)
    assert row.read.codes == pytest.approx(row.read.bfloat16 / 4, abs=8)


def test_a_dense_model_saves_nothing():
    assert savings_of(lowered("llama", "bf16")[1]) is None


def test_what_is_dense_in_a_model_with_codes_is_named():
    model, report = lowered("llama", "awq", "bf16")
    savings = savings_of(report)
    found = {one.scope: one for one in savings.unread}
    assert found["lm_head"].reason == "the model stores it in bfloat16, not as codes"
    assert not found["lm_head"].has_codes
    assert found["model.layers.*.mlp"].count == 2  # gate and up of one layer
    # They are for the layer, its projections, the two products after it, and the head.
    assert len(found) == 4
    head = model.lm_head.weight
    assert found["lm_head"].bytes == head.numel() * head.element_size()


class Gated(nn.Module):
    """A gated MLP. Its down projection decodes codes in a way that no op supports."""

    def __init__(self, form):
        super().__init__()
        self.gate, self.up = (QuantizedLinear(quantized.awq, 64, 128, seed) for seed in (1, 2))
        self.down = QuantizedLinear(form, 128, 64, 3)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_codes_that_are_decoded_are_named_with_the_miss():
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    near = savings_of(lower(Gated(quantized.awq), (x,), target="sm90"))
    assert not near.unread
    torch._dynamo.reset()
    report = lower(Gated(quantized.gptq_act_order), (x,), target="sm90")
    savings = savings_of(report)
    (one,) = savings.unread
    assert (one.scope, one.count, one.has_codes) == ("down", 1, True)
    (miss,) = (miss for miss in report.misses if miss.scope == "down")
    assert one.reason == f"{miss.code}: {miss.message}"
    # In bfloat16 the graph decodes nothing. The step reads the weight of the product, and has no
    # kernel for decoding.
    assert savings.times.bfloat16_modelled_us < savings.times.modelled_us
    assert savings.read.bfloat16 == near.read.bfloat16 - 2 * 64 * 128
    assert savings.times.bfloat16_floor_us == pytest.approx(near.times.bfloat16_floor_us)


def test_a_model_that_reads_no_codes_as_such_says_so():
    x = torch.ones(2, 64, dtype=torch.bfloat16)

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = QuantizedLinear(quantized.awq, 64, 128, 1)

        def forward(self, x):
            return self.linear(x)

    savings = savings_of(lower(Alone(), (x,), target="sm90", patterns=["-coded_linear"]))
    assert savings.rows == ()
    assert savings.read.bytes == 0
    (one,) = savings.unread
    assert one.has_codes
    assert one.reason.endswith("the graph decodes the codes")


@torch.library.custom_op("tilewright_test_savings::gemv", mutates_args=())
def gemv(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(len(x), len(codes))


gemv.register_fake(lambda x, codes, scale: x.new_empty(len(x), len(codes)))


def test_an_operator_that_takes_codes_is_named_and_in_no_sum():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.zeros(128, 32, dtype=torch.uint8))
            self.register_buffer("scale", torch.ones(128, 4))
            self.gate, self.up = (QuantizedLinear(quantized.awq, 64, 128, s) for s in (1, 2))

        def forward(self, x):
            return F.silu(self.gate(x)) * self.up(x), gemv(x, self.codes, self.scale)

    savings = savings_of(lower(Hidden(), (torch.ones(2, 64, dtype=torch.bfloat16),)))
    (one,) = savings.unread
    assert one.has_codes
    assert one.bytes == 0
    assert "gemv" in one.reason
    assert [row.by for row in savings.rows] == ["linear_activation"]


def test_rounded_activations_are_said_to_be_in_both():
    _, rounded = lowered("llama", "fp8_fp8")
    _, plain = lowered("llama", "fp8_row")
    assert savings_of(rounded).rounds
    assert not savings_of(plain).rounds


def test_a_library_s_product_of_codes_is_read_as_codes():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.zeros(256, 128).to(torch.float8_e4m3fn))
            self.register_buffer("scale", torch.ones(1, 256))

        def forward(self, x):
            top = x.float().abs().amax(-1, keepdim=True) / 448
            codes = (x.float() / top).to(torch.float8_e4m3fn)
            y = torch._scaled_mm(codes, self.codes.t(), scale_a=top, scale_b=self.scale,
                                 out_dtype=torch.bfloat16)  # fmt: skip
            return y

    report = lower(Scaled(), (torch.ones(16, 128, dtype=torch.bfloat16),), target="sm90")
    savings = savings_of(report)
    assert not report.matches
    (row,) = savings.rows
    assert (row.by, row.form, row.count) == ("_scaled_mm", "fp8 codes", 1)
    read = row.read
    assert (read.codes, read.scales, read.bfloat16) == (256 * 128, 4 * 256, 2 * 256 * 128)


def test_sizes_that_are_symbols_do_not_stop_it():
    model, _ = lowered("llama", "awq")
    case = build_coded("llama", ["awq"])
    torch._dynamo.reset()
    report = lower(case.model, case.args, case.kwargs, target="sm90", dynamic=True)
    savings = savings_of(report)
    assert savings.read.codes == held(model, ("packed",))
