"""Tests that quantised weights are recognised by what the graph computes. A weight that no op takes
is missed by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse, assert_untouched, cloned, upcast
from tests.found import codes_of, matches_of, misses_of, patterns_in
from tests.models import quantized
from tests.models.quantized import GROUP, OTHER_LAYERS, STORED, WHOLE, QuantizedLinear
from tests.scaled_products import ROW_SCALES
from tilewright.codegen import formats
from tilewright.compiler import lower, reports
from tilewright.patterns.language import Stage

K, HQ, HK, D = 64, 4, 2, 32


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Attention(nn.Module):
    """Has three quantised projections, or one that contains all three. K and V are written, and q
    is returned."""

    def __init__(self, make, packed=False, heads_first=False):
        super().__init__()
        widths = (HQ * D, HK * D, HK * D)
        self.packed = packed
        widths = (sum(widths),) if packed else widths
        self.parts = nn.ModuleList(make(width, seed) for seed, width in enumerate(widths))

    def forward(self, x, slots, k_cache, v_cache):
        if self.packed:
            parts = self.parts[0](x).split((HQ * D, HK * D, HK * D), dim=-1)
        else:
            parts = [part(x) for part in self.parts]
        q, k, v = (part.view(*x.shape[:-1], -1, D) for part in parts)
        k_cache.view(-1, HK, D)[slots] = k.reshape(-1, HK, D)
        v_cache.view(-1, HK, D)[slots] = v.reshape(-1, HK, D)
        return q * 2


def arguments(*lead):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*lead, K, generator=generator).bfloat16()
    caches = [torch.randn(4, 4, HK, D, generator=generator).bfloat16() for _ in range(2)]
    return x, torch.randperm(16, generator=generator)[: x[..., 0].numel()], *caches


def linear_of(form, **options):
    return lambda width, seed: QuantizedLinear(form, K, width, seed, **options)


def check(module, args):
    """Checks that there is one match, that it is no less accurate than eager, and that nothing else
    has changed. Returns the facts of the match."""
    eager, ours, exact = cloned(args), cloned(args), [upcast(a) for a in args]
    expected, reference = module(*eager), upcast(module)(*exact)
    actual = torch.compile(module, backend="tilewright", options={"inner": "eager"})(*ours)
    found = reports()[-1]
    assert patterns_in(found, "qkv") == ["qkv_cache"], [str(m) for m in misses_of(found, "qkv")]
    assert_no_worse(actual, expected, reference, "q")
    for i in (2, 3):
        assert_no_worse(ours[i], eager[i], exact[i], f"cache {i}")
        assert_untouched(args[i], ours[i], exact[i], f"cache {i}")
    return matches_of(found, "qkv")[0].shapes


MISSED = (
    quantized.gptq_act_order,
    quantized.nvfp4_high_first,
    quantized.nf4_low_first,
    quantized.nf4_rounded,
)
FORMATS = {
    "nibbles": "int4_k",
    "gptq": "int4_k with zeros",
    "awq": "int4_n with zeros",
    "int8": "int8",
    "fp8": "fp8",
    "scaled": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "nf4": "nf4",
    "fp4": "fp4",
}
MATCHED = [form for form in STORED if form not in MISSED]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=ROW_SCALES if form is quantized.scaled_mm_token else ())
        for form in MATCHED
    ],
    ids=lambda f: f.__name__,
)
def test_every_form_is_matched_and_no_worse(form):
    facts = check(Attention(linear_of(form)), arguments(5))
    expected = FORMATS[form.__name__.partition("_")[0]]
    assert facts["weight"] == expected + (" with zeros" if "with_zeros" in form.__name__ else "")


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "form",
    [
        quantized.nibbles_low_first,
        quantized.awq,
        quantized.gptq,
        quantized.int8_after,
        quantized.fp8_blocks_repeated,
        pytest.param(quantized.scaled_mm_token, marks=ROW_SCALES),
    ],
    ids=lambda f: f.__name__,
)
def test_one_weight_for_all_three(form, bias):
    facts = check(Attention(linear_of(form, bias=bias), packed=True), arguments(2, 3))
    assert facts["projection"] == "packed"
    assert facts["bias"] == ("yes" if bias else "no")


class Rotated(Attention):
    """Has the same heads. q and k are rotated by position directly after the product."""

    def forward(self, x, slots, k_cache, v_cache):
        q, k, v = (part(x).view(*x.shape[:-1], -1, D) for part in self.parts)
        angles = slots[:, None] / torch.arange(1, D // 2 + 1)
        cos, sin = (
            torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (angles.cos(), angles.sin())
        )
        q, k = (
            t * cos + torch.cat((-t[..., D // 2 :], t[..., : D // 2]), -1) * sin for t in (q, k)
        )
        k_cache.view(-1, HK, D)[slots] = k
        v_cache.view(-1, HK, D)[slots] = v
        return q * 2


@pytest.mark.parametrize(
    ("form", "tokens"),
    [
        (quantized.int8, 1),
        (quantized.int8_after, 1),
        (quantized.int8_after, 5),
        (quantized.fp8_blocks_viewed, 5),
        pytest.param(quantized.scaled_mm_token, 1, marks=ROW_SCALES),
    ],
)
def test_a_rotation_is_no_scale_of_the_codes(form, tokens):
    """The rotation of a single token and a scale of the sums are both one number for each row of
    the weight."""
    assert check(Rotated(linear_of(form)), arguments(tokens))["rope"] == "half"


@pytest.mark.parametrize("number", [0.0, -0.25, torch.nan, torch.inf])
@pytest.mark.parametrize(
    "form", [quantized.int8, quantized.nibbles_low_first, quantized.fp8_blocks_repeated],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_scale_may_be_any_number(form, number):
    """A group of zeros has scale 0 in every quantiser that computes the scale from the largest
    number."""
    module, (x, *rest) = Attention(linear_of(form)), arguments(5)
    x[0] = 0
    for part in module.parts:
        part.scale.view(-1)[0] = number
    results = []
    for run in (module, torch.compile(module, backend="tilewright", options={"inner": "eager"})):
        caches = [t.clone() for t in rest]
        results.append([run(x, *caches), *caches])
    assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"]
    for eager, ours in zip(*results, strict=True):
        assert torch.equal(eager.isfinite(), ours.isfinite())
        same = (t.nan_to_num(0, 0, 0) for t in (ours, eager))
        torch.testing.assert_close(*same, atol=0.03, rtol=0.02)


STORED_AS = {
    quantized.nibbles_low_first: (torch.uint8, None),
    quantized.awq: (torch.int32, torch.int32),
    quantized.gptq: (torch.int32, torch.int32),
    quantized.awq_other_zeros: (torch.int32, torch.int8),
    quantized.int8_after: (torch.int8, None),
    quantized.fp8_blocks_repeated: (torch.float8_e4m3fn, None),
}


@pytest.mark.parametrize("form", STORED_AS, ids=lambda f: f.__name__)
def test_weights_are_read_as_they_are_stored(form):
    """No node of the rewritten graph decodes the codes."""
    graph = lower(Attention(linear_of(form)), arguments(5)).graphs[0].after.graph
    (fused,) = [n for n in graph.nodes if "fused_qkv_paged" in str(n.target)]
    graph.eliminate_dead_code()
    codes, zeros = STORED_AS[form]
    for letter, weight in zip("qkv", fused.args[1:4], strict=True):
        zero = fused.kwargs.get(f"{letter}_zero")
        assert weight.meta["example_value"].dtype == codes
        assert (zero is None) == (zeros is None)
        assert zero is None or zero.meta["example_value"].dtype == zeros
    shapes = [n.meta.get("example_value") for n in graph.nodes if n.op.startswith("call")]
    weight = (torch.bfloat16, torch.float32)
    assert not [t for t in shapes if t is not None and t.dtype in weight and t.numel() >= K * D]


# --- what is no such weight -----------------------------------------------------------------------


def stored(form):
    """Returns a decorator that gives a function the same stored buffers as `form`."""

    def told(function):
        function.stored = STORED[form]
        return function

    return told


@stored(quantized.nibbles_low_first)
def signed_nibbles(layer, dtype):
    """Decodes signed codes of four bits."""
    packed = layer.packed.to(torch.int8)
    codes = torch.stack(((packed << 4) >> 4, packed >> 4), dim=-1).flatten(-2)
    return quantized.grouped(layer, codes, dtype, zero=0)


@stored(quantized.nibbles_low_first)
def halves_side_by_side(layer, dtype):
    """Neighbours in a byte are not neighbours along K."""
    codes = torch.cat((layer.packed & 0xF, layer.packed >> 4), dim=-1)
    return quantized.grouped(layer, codes, dtype)


@stored(quantized.nibbles_low_first)
def low_nibble_twice(layer, dtype):
    low = layer.packed & 0xF
    return quantized.grouped(layer, torch.stack((low, low), dim=-1).flatten(-2), dtype)


@stored(quantized.nibbles_low_first)
def three_bits(layer, dtype):
    codes = torch.stack((layer.packed & 7, layer.packed >> 4), dim=-1).flatten(-2)
    return quantized.grouped(layer, codes, dtype)


@stored(quantized.nibbles_low_first)
def nibbles_that_wrap_around(layer, dtype):
    """Below zero, unsigned bytes wrap around."""
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2) - 8
    return quantized.grouped(layer, codes, dtype, zero=0)


@stored(quantized.gptq)
def a_mask_that_wraps_around(layer, dtype):
    """In a signed word, a mask of all bits keeps the sign, so the last nibble has a sign."""
    nibbles = [(layer.packed >> shift) & 15 for shift in range(0, 28, 4)]
    codes = torch.stack((*nibbles, (layer.packed & 0xFFFFFFFF) >> 28), dim=1)
    codes = codes.view(-1, GROUP, layer.width).to(dtype) - 8
    return (layer.scale[:, None].to(dtype) * codes).view(layer.hidden, layer.width).t()


@stored(quantized.int8_with_zeros)
def codes_that_wrap_around(layer, dtype):
    return (layer.codes - layer.zeros).to(dtype) * layer.scale[:, None].to(dtype)


@stored(quantized.int8_in_words)
def bytes_that_wrap_around(layer, dtype):
    codes = layer.packed.view(torch.uint8) - 127
    return codes.to(dtype) * layer.scale[:, :1].to(dtype)


@stored(quantized.int8_in_words)
def bytes_cast_to_signed(layer, dtype):
    """The cast wraps around, too."""
    codes = layer.packed.view(torch.uint8).to(torch.int8) - 64
    return codes.to(dtype) * layer.scale[:, :1].to(dtype)


@stored(quantized.int8_in_words)
def bytes_in_another_order(layer, dtype):
    codes = layer.packed.view(torch.uint8).unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    return (codes.to(dtype) - 128) * layer.scale[:, :1].to(dtype)


@stored(quantized.int8_in_words)
def halves_of_words(layer, dtype):
    codes = layer.packed.view(torch.int16).to(dtype).repeat(1, 2) - 128
    return codes * layer.scale[:, :1].to(dtype) / 256


@stored(quantized.nibbles_low_first)
def scaled_then_moved(layer, dtype):
    """Adds the minimum after the scale."""
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    scale = layer.scale[:, :1].to(dtype)
    return codes.to(dtype) * scale - layer.scale[:, 1:2].to(dtype)


@stored(quantized.nibbles_low_first)
def scales_in_tiles(layer, dtype):
    """Columns that are far apart share a scale."""
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    return (codes.to(dtype) - 8) * layer.scale.repeat(1, GROUP).to(dtype)


@stored(quantized.int8)
def scaled_twice(layer, dtype):
    return layer.codes.to(dtype) * layer.scale[:, None].to(dtype) * layer.scale[:1].to(dtype)


@stored(quantized.int8)
def scaled_by_nothing(layer, dtype):
    return layer.codes.to(dtype)


@stored(quantized.fp8_tensor)
def five_bits_of_exponent(layer, dtype):
    return layer.codes.view(torch.float8_e5m2).to(dtype) * layer.scale.to(dtype)


@stored(quantized.fp8_tensor)
def multiplied_codes(layer, dtype):
    return (layer.codes.to(dtype) * layer.codes.to(dtype)) * layer.scale.to(dtype)


@stored(quantized.nvfp4)
def floats_of_another_table(layer, dtype):
    """Exchanges two numbers of the table."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 3.0, 6.0]
    table = torch.tensor([*numbers, *(-n for n in numbers)], device=layer.packed.device)
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    blocks = table[codes.int()].view(layer.width, -1, GROUP) * layer.scale.float()[:, :, None]
    return (blocks * layer.factor).view(layer.width, -1).to(dtype)


@stored(quantized.mxfp4)
def powers_from_126(layer, dtype):
    table = torch.tensor([*quantized.E2M1, *(-m for m in quantized.E2M1)]).to(dtype)
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    values = table[codes.int()].view(layer.width, -1, 32)
    exponents = layer.exponents.to(torch.int32) - 126
    return torch.ldexp(values, exponents[:, :, None]).view(layer.width, -1)


@stored(quantized.nvfp4)
def floats_scaled_twice(layer, dtype):
    scale = layer.scale.to(dtype).repeat_interleave(GROUP, dim=1)
    return quantized.nvfp4(layer, dtype) * scale


@stored(quantized.nf4)
def blocks_that_begin_within_one(layer, dtype):
    codes = torch.stack((layer.packed >> 4, layer.packed & 0xF), dim=-1).flatten(-2)
    table = torch.tensor(formats.TABLES["nf4"], device=codes.device)
    scale = layer.scale.repeat_interleave(GROUP, dim=1)
    scale = torch.cat([scale[:, GROUP // 2 :], scale[:, : GROUP // 2]], 1)
    return (table[codes.int()] * scale).to(dtype)


NEAR_MISSES = {
    signed_nibbles: "WEIGHT_FORMAT",
    halves_side_by_side: "WEIGHT_FORMAT",
    low_nibble_twice: "WEIGHT_FORMAT",
    three_bits: "WEIGHT_FORMAT",
    nibbles_that_wrap_around: "WEIGHT_FORMAT",
    a_mask_that_wraps_around: "WEIGHT_FORMAT",
    codes_that_wrap_around: "WEIGHT_FORMAT",
    bytes_that_wrap_around: "WEIGHT_FORMAT",
    bytes_cast_to_signed: "WEIGHT_FORMAT",
    halves_of_words: "WEIGHT_FORMAT",
    scaled_then_moved: "WEIGHT_FORMAT",
    scaled_twice: "WEIGHT_FORMAT",
    scaled_by_nothing: "WEIGHT_FORMAT",
    five_bits_of_exponent: "WEIGHT_FORMAT",
    multiplied_codes: "WEIGHT_FORMAT",
    scales_in_tiles: "SCALE_BLOCK",
    quantized.gptq_act_order: "SCALE_BLOCK",
    quantized.nvfp4_high_first: "WEIGHT_FORMAT",
    quantized.nf4_low_first: "WEIGHT_FORMAT",
    quantized.nf4_rounded: "WEIGHT_FORMAT",
    blocks_that_begin_within_one: "SCALE_BLOCK",
    floats_of_another_table: "WEIGHT_FORMAT",
    powers_from_126: "WEIGHT_FORMAT",
    floats_scaled_twice: "WEIGHT_FORMAT",
}


@pytest.mark.parametrize("form", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_are_missed_by_name_and_still_right(form):
    module, args = Attention(linear_of(form)), arguments(5)
    assert_missed(module, args, NEAR_MISSES[form])


@stored(quantized.gptq)
def gptq_in_bytes(layer, dtype):
    """Zeros are packed along the other axis. A difference of nibbles fits into a signed byte."""
    codes, zeros = (t.to(torch.int8) for t in quantized.gptq_codes(layer))
    codes = codes.view(-1, GROUP, layer.width) - zeros[:, None]
    return (layer.scale[:, None].to(dtype) * codes.to(dtype)).view(layer.hidden, layer.width).t()


@stored(quantized.gptq)
def gptq_selected(layer, dtype):
    codes, zeros = quantized.gptq_codes(layer)
    group = torch.arange(layer.hidden, device=codes.device) // GROUP
    codes = (codes - zeros.index_select(0, group)).to(dtype)
    return (layer.scale.t().to(dtype).index_select(-1, group)).t().mul(codes).t()


def int8_with_words_of_zeros(layer, dtype):
    shifts = torch.arange(0, 32, 4, device=layer.words.device)
    zeros = ((layer.words[:, None] >> shifts[:, None]) & 15).view(layer.width, 1)
    return (layer.codes.to(dtype) - zeros.to(dtype)) * layer.scale[:, None].to(dtype)


def codes_and_words(rows, hidden, generator):
    words = quantized.words(generator, rows // 8, 1)
    return quantized.int8_buffers(rows, hidden, generator) | {"words": words}


int8_with_words_of_zeros.stored = codes_and_words


@pytest.mark.parametrize(
    ("form", "weight"),
    [
        (gptq_in_bytes, "int4_k with zeros"),
        (gptq_selected, "int4_k with zeros"),
        (int8_with_words_of_zeros, "int8 with zeros"),
    ],
)
def test_zeros_are_read_however_they_are_packed_and_selected(form, weight):
    assert check(Attention(linear_of(form)), arguments(5))["weight"] == weight


# --- factors -----------------------------------------------------------------------------------


@stored(quantized.nvfp4)
def nvfp4_factors_of_rows(layer, dtype):
    """Has a factor for each half of the rows."""
    both = torch.stack((layer.factor, 2 * layer.factor))
    factor = both.repeat_interleave(layer.width // 2)[:, None]
    return (quantized.nvfp4_unscaled(layer, torch.float32) * factor).to(dtype)


@stored(quantized.nvfp4)
def nvfp4_factor_of_a_cast(layer, dtype):
    """The factor is stored in bfloat16, and there is another number."""
    factor = layer.factor.bfloat16().float()
    return (quantized.nvfp4_unscaled(layer, torch.float32) * factor * 0.5).to(dtype)


@stored(quantized.nvfp4)
def nvfp4_by_a_number(layer, dtype):
    return (quantized.nvfp4_unscaled(layer, torch.float32) * 0.125).to(dtype)


@pytest.mark.parametrize(
    ("form", "apart"),
    [
        (quantized.nvfp4, True),
        (quantized.nvfp4_divided, True),
        (nvfp4_factor_of_a_cast, True),
        (nvfp4_by_a_number, True),
        (quantized.nvfp4_unscaled, None),
        (nvfp4_factors_of_rows, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_factor_for_all_of_a_weight_is_an_argument(form, apart, graphs_kept):
    """The op then reads the scale as it is stored. Factors by blocks are multiplied into the
    scale."""
    check(Attention(linear_of(form)), arguments(5))
    graph = reports()[-1].after.graph
    (fused,) = [n for n in graph.nodes if "fused_qkv_paged" in str(n.target)]
    assert (fused.kwargs.get("factors") is not None) is (apart is True)
    if apart:
        assert fused.kwargs["factors"].meta["example_value"].shape == (3,)
    scale = torch.float32 if apart is False else torch.float8_e4m3fn
    for letter in "qkv":
        assert fused.kwargs[f"{letter}_scale"].meta["example_value"].dtype == scale


# --- zeros behind the scale -----------------------------------------------------------------------


def offset_buffers(rows, hidden, generator):
    buffers = quantized.nibble_buffers(rows, hidden, generator)
    offset = torch.randn(rows, hidden // GROUP, generator=generator).bfloat16() / 8
    return buffers | {"offset": offset, "zero": offset.float() + 8}


def offset(form):
    """Makes a form that gets the codes in groups [N, K / group, group], and their scale."""

    def made(layer, dtype):
        codes = torch.stack((layer.packed & 15, layer.packed >> 4), dim=-1).flatten(-2)
        scale, zero = (t.unsqueeze(-1) for t in (layer.scale, layer.offset))
        blocks = form(layer, codes.unflatten(-1, (-1, GROUP)), scale, zero)
        return blocks.flatten(-2).to(dtype)

    made.__name__ = form.__name__
    made.stored = offset_buffers
    return made


@offset
def in_float32(layer, codes, scale, zero):
    return (codes.float() - 8) * scale.float() + zero.float()


@offset
def in_its_own_dtype(layer, codes, scale, zero):
    """Rounds twice."""
    return zero + scale * (codes.to(scale.dtype) - 8)


@offset
def codes_from_zero(layer, codes, scale, zero):
    return codes.to(scale.dtype) * scale + zero


@pytest.mark.parametrize("form", [in_float32, in_its_own_dtype, codes_from_zero])
def test_zeros_may_be_added_behind_the_scale(form):
    facts = check(Attention(linear_of(form)), arguments(5))
    assert facts["weight"] == "int4_k_offset with zeros"


@offset
def zeros_on_both_sides(layer, codes, scale, zero):
    return (codes.float() - layer.zero.unsqueeze(-1)) * scale + zero


@offset
def scaled_behind_the_zeros(layer, codes, scale, zero):
    return ((codes.float() - 8) * scale + zero) * scale


@offset
def added_twice(layer, codes, scale, zero):
    return (codes.float() - 8) * scale + zero + zero


@offset
def subtracted(layer, codes, scale, zero):
    return (codes.float() - 8) * scale - zero


@offset
def added_with_a_factor(layer, codes, scale, zero):
    return torch.add((codes.float() - 8) * scale, zero, alpha=2)


NOT_ADDED = [
    zeros_on_both_sides,
    scaled_behind_the_zeros,
    added_twice,
    subtracted,
    added_with_a_factor,
]


@pytest.mark.parametrize("form", NOT_ADDED, ids=lambda form: form.__name__)
def test_other_sums_of_codes_and_zeros_are_no_format(form):
    assert_missed(Attention(linear_of(form)), arguments(5), "WEIGHT_FORMAT")


@stored(quantized.int8)
def int8_with_offset(layer, dtype):
    weight = layer.codes.to(dtype) * layer.scale[:, None].to(dtype)
    return weight + layer.zeros.to(dtype)


def test_codes_of_eight_bits_have_no_zeros_behind_the_scale():
    assert_missed(Attention(linear_of(int8_with_offset)), arguments(5), "WEIGHT_FORMAT")


@stored(quantized.gptq)
def a_difference_that_wraps_around(layer, dtype):
    codes, zeros = (t.to(torch.int8) for t in quantized.gptq_codes(layer))
    codes = codes.view(-1, GROUP, layer.width) - 100 - (zeros + 100)[:, None]
    return (layer.scale[:, None].to(dtype) * codes.to(dtype)).view(layer.hidden, layer.width).t()


def test_a_difference_that_may_wrap_around_is_no_code():
    form = a_difference_that_wraps_around
    assert_missed(Attention(linear_of(form)), arguments(5), "WEIGHT_FORMAT")


def test_bytes_that_the_graph_puts_in_another_order_are_read_in_that():
    assert check(Attention(linear_of(bytes_in_another_order)), arguments(5))["weight"] == "int8"


def assert_missed(module, args, code):
    eager, ours = cloned(args), cloned(args)
    expected = module(*eager)
    actual = torch.compile(module, backend="tilewright", options={"inner": "eager"})(*ours)
    found = reports()[-1]
    assert "qkv_cache" not in set(patterns_in(found, "qkv"))
    assert code in codes_of(found, "qkv"), [str(m) for m in misses_of(found, "qkv")]
    if code in ("WEIGHT_FORMAT", "SCALE_BLOCK"):  # the weight of q, k or v
        assert {m.stage for m in misses_of(found, "qkv") if m.code == code} == {Stage.GUARDS}
    for a, b in zip((actual, *ours), (expected, *eager), strict=True):
        assert torch.equal(a, b)


def test_a_shift_table_that_is_a_buffer_is_not_known():
    class Shifts(QuantizedLinear):
        def __init__(self, *args):
            super().__init__(quantized.awq_plain, *args)
            self.register_buffer("shifts", torch.arange(0, 32, 4))

        def forward(self, x):
            codes = ((self.packed.unsqueeze(-1) >> self.shifts) & 15).flatten(-2).to(x.dtype)
            scale = self.scale.repeat_interleave(GROUP, dim=0).to(x.dtype)
            return x @ (codes * scale)

    module = Attention(lambda width, seed: Shifts(K, width, seed))
    assert_missed(module, arguments(5), "WEIGHT_FORMAT")


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (quantized.by_operator, "quantized_tests::linear "),
        (quantized.by_operator_in_place, "quantized_tests::linear_out "),
    ],
)
def test_projections_by_an_operator_are_told_by_its_name(form, name):
    """One of the operators writes its result in place. Its weights are buffers."""
    report = lower(Attention(linear_of(form)), arguments(5))
    assert patterns_in(report, "qkv") == ["cache_store"]
    (miss,) = misses_of(report, "qkv")
    assert (miss.code, miss.is_lost) == ("K_PATH", True)
    assert f"{name}computes the projection" in miss.message
    assert "dequantize=True" in miss.hint


@pytest.mark.parametrize(
    "form",
    [
        quantized.buffer_einsum,
        pytest.param(
            quantized.scaled_mm_v2_token,
            marks=[
                ROW_SCALES,
                pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this PyTorch has none"),
            ],
        ),
    ],
)
def test_projections_from_buffers_are_matched(form):
    check(Attention(linear_of(form)), arguments(5))


def test_a_site_that_the_op_refuses_hides_no_miss_of_another():
    """The op refuses the second site, and another round offers that site to the next pattern. In
    that round, `cache_store` rewrites the first site."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            forms = (quantized.nvfp4_high_first, quantized.int8)
            self.parts = nn.ModuleList(Attention(linear_of(form)) for form in forms)

        def forward(self, x, y, slots, *caches):
            return self.parts[0](x, slots, *caches[:2]), self.parts[1](y, slots, *caches[2:])

    x, slots, *caches = arguments(5)
    y = x.t().contiguous().t()
    report = lower(Two(), (x, y, slots, *caches, *cloned(caches)))
    assert codes_of(report, "qkv") == {"WEIGHT_FORMAT", "UNSUPPORTED"}
    assert patterns_in(report, "qkv") == ["cache_store", "cache_store"]


def sums_scaled_besides(layer, x):
    """Scales the weight, and scales its sums by column once more."""
    return x @ quantized.int8(layer, x.dtype).t() * layer.scale.to(x.dtype)


def sums_of_bare_codes(layer, x):
    return x @ layer.codes.to(x.dtype).t()


@pytest.mark.parametrize(
    ("form", "tokens", "code"),
    [(sums_scaled_besides, 1, "K_PATH"), (sums_of_bare_codes, 5, "WEIGHT_FORMAT")],
)
def test_rotated_sums_with_two_scales_or_none_are_missed(form, tokens, code, monkeypatch):
    monkeypatch.setitem(OTHER_LAYERS, form, STORED[quantized.int8])
    assert_missed(Rotated(linear_of(form)), arguments(tokens), code)


def one_of(forms):
    """Makes projections of different forms."""
    return lambda width, seed: QuantizedLinear(forms[seed], K, width, seed)


@pytest.mark.parametrize(
    "forms",
    [
        (quantized.nibbles_low_first, quantized.nibbles_high_first, quantized.nibbles_low_first),
        (quantized.int8, quantized.int8, quantized.fp8_channel),
        (quantized.awq, quantized.awq_plain, quantized.awq),
        (quantized.gptq, quantized.awq, quantized.awq),
    ],
)
def test_projections_of_different_formats_are_refused(forms):
    assert_missed(Attention(one_of(forms)), arguments(5), "WEIGHT_FORMAT")


def test_one_dense_projection_among_quantised_ones_is_refused():
    def make(width, seed):
        if seed == 2:
            return nn.Linear(K, width, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        return QuantizedLinear(quantized.int8, K, width, seed)

    assert_missed(Attention(make), arguments(5), "WEIGHT_FORMAT")


def test_blocks_of_different_size_are_cut_to_the_smaller():
    forms = (quantized.fp8_channel, quantized.fp8_tensor, quantized.fp8_blocks_viewed)
    check(Attention(one_of(forms)), arguments(5))


def test_whole_layers_are_all_tested():
    assert set(WHOLE) <= set(MATCHED)
