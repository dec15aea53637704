"""Tests linears of many tokens with quantised weights: which of them decode the weight in the
product, the machine code of the kernel, and its results on a GPU."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from tests.agreement import in_float64, relative_error
from tests.ptx import bf16, bits, executed, halves, numbers, pair, results
from tilewright.codegen.audit import Expectations, check
from tilewright.codegen.build import compile_for
from tilewright.codegen.emit.source import find_module
from tilewright.codegen.formats import TABLES, bfloat16_table
from tilewright.codegen.mlp.mixed import (
    TILES,
    MixedConfig,
    lookup_assembly,
    mixed_config,
    pair_config,
)
from tilewright.codegen.targets import SM90, TARGETS
from tilewright.ops.formats import fp4
from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.mlp import linear_activation, linear_residual
from tilewright.ops.mlp import mixed as mixed_steps
from tilewright.ops.mlp.cases import LinearCase
from tilewright.ops.mlp.lowering import linear_activation_steps
from tilewright.ops.mlp.mixed import decoding_obstacle
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import drive

INT4 = {"weight_format": "int4_k", "scale_block": (1, 128), "zero_point": 8}
PACKED = {**INT4, "zeros": "packed", "zero_point": 0}
HALVES = {"scale_dtype": torch.float16}
FP4 = {"words": torch.uint8}
CASES = {
    "int4": INT4,
    "int4 bytes": {**INT4, "words": torch.uint8, "nibble_order": (1, 0)},
    "int4 rows": {**INT4, "scale_block": (1, 1 << 20)},
    "int4 groups of 32": {**INT4, "scale_block": (1, 32)},
    "int4 groups of 64": {**INT4, "scale_block": (1, 64), **HALVES},
    "gptq": {**PACKED, **HALVES},
    "gptq v1": {**PACKED, "zero_point": 1},
    "awq": {**PACKED, **HALVES, "nibble_order": AWQ_ORDER},
    "int4 zeros": {**INT4, "zeros": "int", "zero_point": 0, "scale_block": (1, 32)},
    "int4 floats": {**INT4, "scale_dtype": torch.float32},
    "int8": {"weight_format": "int8", "scale_block": (1, 1 << 20)},
    "int8 groups": {"weight_format": "int8", "scale_block": (1, 128), "factor": True},
    "uint8": {"weight_format": "int8", "words": torch.uint8, "scale_block": (1, 64),
              "zero_point": 128},
    "fp8 rows": {"weight_format": "fp8", "scale_block": (1, 1 << 20)},
    "fp8 blocks": {"weight_format": "fp8", "scale_block": (128, 128)},
    "fp8 exponents": {"weight_format": "fp8", "scale_block": (128, 128),
                      "scale_dtype": torch.uint8},
    "nvfp4": {"weight_format": "nvfp4", "scale_block": (1, 16), "factor": True, **FP4},
    "mxfp4": {"weight_format": "mxfp4", "scale_block": (1, 32), **FP4},
    "nf4": {"weight_format": "nf4", "scale_block": (1, 64), "scale_dtype": torch.float32, **FP4},
    "fp4": {"weight_format": "fp4", "scale_block": (1, 64), "scale_dtype": torch.float32, **FP4},
}  # fmt: skip
OPS = {"residual": linear_residual, "activation": linear_activation}


def case_of(name: str, tokens: int, n: int, k: int, **options) -> LinearCase:
    given = {**CASES[name], **options}
    rows, columns = given["scale_block"]
    return LinearCase(
        name, tokens, k, n, **given | {"scale_block": (min(rows, n), min(columns, k))}
    )


def planned(case: LinearCase, op=linear_residual, target: str = "sm90"):
    return op.OP.plan_for(op.sample_inputs(case, "meta"), target)


@pytest.mark.parametrize("name", CASES)
def test_each_format_has_a_kernel(name):
    few, many = (planned(case_of(name, tokens, 512, 1024)) for tokens in (128, 129))
    assert many.name == "decoding kernel", many.reason
    assert [spec.kernel for spec in many.specs] == ["mixed_linear"]
    assert few.specs[-1].kernel == "streamed_linear"


APART = ["mixed_linear", "mixed_linear", "activate_products"]


def kernels_of_gate(case: LinearCase) -> list[str]:
    return [spec.kernel for spec in planned(case, linear_activation).specs]


def test_both_weights_of_a_gate_are_decoded_by_one_kernel_after_a_norm():
    case = case_of("int4", 1000, 512, 1024, layout="separate", norm="rms")
    assert kernels_of_gate(case) == ["norm_x", "mixed_linear"]


def test_an_activation_without_a_second_weight_is_a_part_of_the_product():
    assert kernels_of_gate(case_of("int4", 1000, 512, 1024)) == ["mixed_linear"]


# Maps (n, k, tokens) to whether one kernel for both weights is faster. It is not if its tiles leave
# half of the multiprocessors idle, while separate kernels can split K.
PAIRS = {
    (14336, 4096, 1024): True,
    (14336, 4096, 8192): True,
    (14336, 4096, 256): True,
    (2048, 14336, 256): False,
}


@pytest.mark.parametrize("sizes", PAIRS, ids=str)
def test_a_pair_is_chosen_by_its_modelled_time(sizes):
    config = pair_config(*sizes, SM90)
    assert (config is not None) == PAIRS[sizes]
    assert config is None or not config.split


def test_weights_that_differ_in_their_layout_are_decoded_one_after_the_other():
    case = case_of("int4", 1000, 512, 1024, layout="separate")
    a = linear_activation.sample_inputs(case, "meta")
    turned = replace(a, up_scale=a.up_scale.t().contiguous().t())
    names = [spec.kernel for spec in linear_activation.OP.plan_for(turned, "sm90").specs]
    assert names == APART


NEAR = {
    "x is fp16": {"dtype": torch.float16},
    "has a norm": {"norm": "rms"},
    "contiguous along N": {"layout": "plain_n_major"},
    "columns that share a scale is 24": {"weight_format": "int8", "scale_block": (1, 24),
                                         "k": 960, "zero_point": 0},
    "not a multiple of 16 bytes": {"n": 260},
    "not integers": {"zeros": "float", "zero_point": 0},
    "zeros are added": {"weight_format": "int4_k_offset", "zeros": "float"},
    "exponents": {"weight_format": "mxfp4", "words": torch.uint8, "zero_point": 0, "k": 32,
                  "scale_block": (1, 32)},
    "32 columns of codes of a table": {"weight_format": "nf4", "words": torch.uint8,
                                       "zero_point": 0, "scale_block": (1, 32),
                                       "scale_dtype": torch.float32},
    "in different bytes": {"weight_format": "nf4", "words": torch.int32, "zero_point": 0,
                           "scale_block": (1, 64), "scale_dtype": torch.float32,
                           "nibble_order": AWQ_ORDER},
}  # fmt: skip


@pytest.mark.parametrize("why", NEAR)
def test_another_call_is_not_decoded(why):
    case = replace(case_of("int4", 200, 256, 1024), **NEAR[why])
    a = linear_residual.sample_inputs(case, "meta")
    assert why in decoding_obstacle(a, SM90)
    assert linear_residual.OP.plan_for(a, "sm90").name != "decoding kernel"


@pytest.mark.parametrize("target", [name for name, chip in TARGETS.items() if chip.is_gpu])
def test_other_chips_keep_what_they_had(target):
    found = planned(case_of("int4", 200, 256, 1024), target=target)
    assert (found.name == "decoding kernel") == TARGETS[target].has("wgmma")


def test_rows_that_tma_cannot_step_over_are_not_decoded():
    a = linear_residual.sample_inputs(case_of("int4", 200, 256, 1024), "meta")
    x = torch.empty(200, 1028, dtype=a.x.dtype, device="meta")[:, :1024]
    assert decoding_obstacle(a, SM90) is None
    assert decoding_obstacle(replace(a, x=x), SM90).startswith("the strides of x")


# Maps (n, k, tokens) of Llama-3-8B to the tiles that were fastest on an H100.
FASTEST = {
    (4096, 14336, 256): (256, True),
    (14336, 4096, 256): (256, False),
    (4096, 4096, 256): (128, True),
    (6144, 4096, 256): (128, False),
    (4096, 14336, 1024): (256, False),
    (14336, 4096, 1024): (256, True),
    (4096, 4096, 1024): (256, False),
    (4096, 14336, 4096): (256, False),
    (4096, 4096, 8192): (256, False),
}


@pytest.mark.parametrize("sizes", FASTEST, ids=str)
def test_the_plan_takes_the_tiles_that_were_measured_to_be_fastest(sizes):
    config = mixed_config(*sizes, SM90)
    assert (config.block_t, config.split) == FASTEST[sizes]


@pytest.mark.parametrize(
    ("name", "tokens"), [("awq", 256), ("int8", 200), ("nvfp4", 256), ("nf4", 256)]
)
def test_machine_code(name, tokens):
    """The kernel is compiled for Hopper. It must have no spills, use the tensor core's products,
    and load and store by TMA."""
    (spec,) = planned(case_of(name, tokens, 6144, 4096)).specs
    assert_is_good(spec)


def test_machine_code_of_a_pair():
    """Tests the codes that GPTQ and compressed-tensors store, in the kernel of both weights."""
    case = case_of("int4", 1024, 14336, 4096, layout="separate")
    (spec,) = planned(case, linear_activation).specs
    assert_is_good(spec)


def assert_is_good(spec):
    expected = Expectations("bf16", tma_loads=True, tma_stores=True, warp_specialized=True)
    assert check(compile_for(spec).audit, SM90, expected) == []


# --- the arithmetic of the template's inline assembly ---------------------------------------------

TEMPLATE = Path(find_module("tilewright.codegen.mlp.templates.mixed_gemm")).read_text("utf-8")
ASSEMBLY = [
    text.strip().strip("{}") for text in re.findall(r'"""(\{.*?\})"""', TEMPLATE, flags=re.DOTALL)
]


def assembly(*needed: str) -> str:
    """Returns the only inline assembly of the template that contains all of these texts."""
    (found,) = [text for text in ASSEMBLY if all(part in text for part in needed)]
    return found


@pytest.mark.parametrize("zero", [0, 8, 15])
def test_nibbles_become_their_distances_from_the_zero(zero):
    text = assembly("0x00F0000F")
    for low in range(16):
        word = (low | (15 - low) << 4) << 16
        made = executed(text, _1=word, _3=0x4242, _5=pair(-zero / 64, -zero / 64))
        assert numbers(made, 1 / 64) == (low - zero, 15 - low - zero)


def test_nibbles_in_another_order():
    """Tests nibbles in another order: the pair of AWQ's nibbles 1 and 5."""
    text = assembly("and.b32 p, p, $5", "$9")
    for code in range(16):
        word = code << 4 | (15 - code) << 20
        made = executed(text, _1=word, _3=0x4240, _5=0x00F000F0, _7=0x7D007D00, _9=pair(0, -1 / 64))
        assert numbers(made, 1 / 64) == (code, 15 - code - 1)


def test_bytes_become_their_distances_from_the_zero():
    text = assembly("mov.b32 m, 0x7F007F00")
    for code in range(-128, 128):
        word = ((code & 0xFF) << 8 | (~code & 0xFF)) ^ 0x80808080
        made = executed(text, _1=word, _3=0x4041, _5=pair(-2, -2))
        assert numbers(made, 1 / 64) == (code, ~code)


def test_floats_of_eight_bits():
    """Tests every code in both halves of a word. NaN stays NaN."""
    text = assembly("0x07F007F0")
    known = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).tolist()
    for code in range(256):
        other = 255 - code
        made = executed(text, _1=code << 24 | other << 8, _3=0x3414)
        np.testing.assert_array_equal(numbers(made), (known[other], known[code]))


def test_floats_of_four_bits():
    text = assembly("0x01C001C0")
    known = fp4.decode(torch.arange(16), torch.float32).tolist()
    for code in range(16):
        # The even code is in the low nibble, so byte 4 is the byte of the shifted word.
        made = executed(text, _1=code | (15 - code) << 4, _3=0x0040)
        assert numbers(made, 1) == (known[code], known[15 - code])


def looked_up(name: str, code: int, scale: float, exact: bool, is_high_first: bool):
    """Returns four numbers of a table, each times the scale or its half, as the kernel's assembly
    computes them. The words are made so that the first pair has the code and its complement, and
    the second pair has them in the other order."""
    rounded, rests, unit = bfloat16_table(name)
    text = lookup_assembly(rounded, rests if exact else (), is_high_first)
    given = {}
    for number, one in enumerate((scale, scale / 2)):
        high = bits(one * unit)
        given |= {f"_{10 + number}": high * 0x10001}
        given |= {f"_{12 + number}": bits(one * unit - bf16(high)) * 0x10001}
    first, second = (code, 15 - code) if is_high_first else (15 - code, code)
    words = {"_2": (first << 4 | second) << 16, "_4": (second << 4 | first) << 16}
    made = results(text, 2, **words, _6=0x62, **given)
    return [number for word in made for number in numbers(word)]


@pytest.mark.parametrize("is_high_first", [True, False])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_numbers_of_a_table(name, is_high_first):
    """Tests every code in each place. The product with a scale is rounded once."""
    for code, exponent in product(range(16), range(3)):
        scale = 0.7391 / 3**exponent
        made = looked_up(name, code, scale, True, is_high_first)
        codes = (code, 15 - code, 15 - code, code)
        for found, one, factor in zip(made, codes, (1, 1, 0.5, 0.5), strict=True):
            wanted = TABLES[name][one] * scale * factor
            spacing = 2.0 ** (math.frexp(wanted)[1] - 8)
            assert abs(found - wanted) <= 0.505 * spacing


# The lines of the template that find the bytes of a pair's codes. They are Python, too.
SELECTION = re.search(r"^    even = place.*?(?=^    chosen = )", TEMPLATE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("order", [0x76543210, 0x73625140], ids=["in order", "awq"])
def test_floats_of_four_bits_are_those_of_their_places_in_a_word(order):
    """Every nibble of the word is different, so another nibble is another number."""
    nibbles = [3, 14, 9, 1, 12, 7, 5, 10]
    word = sum(nibble << 4 * i for i, nibble in enumerate(nibbles))
    known = fp4.decode(torch.arange(16), torch.float32)
    for column in range(8):
        names = {"CODES": "e2m1", "PER": 8, "ORDER": order, "place": column}
        exec(textwrap.dedent(SELECTION[0]), names)
        made = executed(assembly("0x01C001C0"), _1=word, _3=names["select"])
        places = (order >> 4 * (column & 6) & 7, order >> 4 * (column | 1) & 7)
        assert numbers(made, 1) == tuple(known[[nibbles[place] for place in places]].tolist())


def test_rounded_numbers_of_a_table():
    """Without the rounding errors, a number of nf4 is rounded before its product with the scale is
    rounded. The numbers of fp4 are exact."""
    for name, code in product(TABLES, range(16)):
        found = looked_up(name, code, 0.7391, False, True)[0]
        wanted = TABLES[name][code] * 0.7391
        spacing = 2.0 ** (math.frexp(wanted)[1] - 8)
        assert abs(found - wanted) <= (0.505 if name == "fp4" else 1.01) * spacing


def test_a_table_keeps_its_last_bits_where_the_product_is_the_result():
    """A residual or an activation follows a rounding of the product in PyTorch, which the kernel
    does not do. A plain product has no such rounding, so its table is exact."""
    case = case_of("nf4", 256, 512, 1024)
    gate = planned(replace(case, activation="silu"), linear_activation)
    plain = planned(replace(case, activation=""), linear_activation)
    counts = [
        dict(spec.constants)["LOOKUP"].count("prmt")
        for found in (planned(case), gate, plain)
        for spec in found.specs
    ]
    assert counts == [8, 8, 14]


def test_a_scale_of_more_digits_is_rounded_once():
    """A scale with more digits than bfloat16 is passed as two bfloat16 numbers, and is rounded only
    once."""
    text = assembly("mul.rn.bf16x2 p, $1, $3")
    for digits in range(1024, 2048, 7):
        scale = digits / 2**14
        high = bf16(bits(scale))
        for code in range(-8, 8):
            given = (pair(code / 64, 0), pair(64 * high, 0), pair(64 * (scale - high), 0))
            made = executed(text, **dict(zip(("_1", "_2", "_3"), given, strict=True)))
            assert halves(made)[0] == bits(code * scale)


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
# Rows, columns and tokens. There are whole tiles, incomplete tiles in each dimension, a tile that
# programs share, and many waves of tiles.
SHAPES = [
    (512, 1024, 256),
    (264, 1056, 131),
    (1032, 2080, 517),
    (128, 8192, 129),
    (4096, 512, 1500),
]


def on_gpu(op, case, seed=0):
    a = op.sample_inputs(case, device="cuda", seed=seed)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this chip has no such kernel")
    assert decoding_obstacle(a, SM90) is None
    return a


def roundings(op, a):
    """Returns how many values are rounded to bfloat16 on the way to an element of the result.

    For each product these are the weight, the normalised x and, before an activation, the product.
    The result itself is rounded, too.
    """
    products = sum(weight is not None for weight in a.weights)
    return 1 + products * (1 + bool(a.norm.kind) + (op is linear_activation))


def assert_near(op, a, made):
    """Asserts that the result is as near to float64 as a graph that rounds its weight to bfloat16,
    or as one that does not. Roundings are independent, and each has an error of at most 2^-9."""
    exact = op.reference(in_float64(a))
    assert made.isfinite().all()
    error, most = relative_error(made, exact), roundings(op, a) ** 0.5 * 2.0**-9
    assert error < most, f"off by {error:.2e}, not {most:.2e}"
    if op is linear_residual:
        weight = a.linear.dequantize(torch.float32).bfloat16().double()
        rounded = linear(a.x.double(), weight)
        if a.bias is not None:
            rounded += a.bias.double()
        rounded = a.residual.double() + a.scale * rounded
        error = min(error, relative_error(made, rounded))
        assert error < 1.5 * 2.0**-9, f"off by {error:.2e} from the product of rounded weights"


@pytest.mark.parametrize(
    ("name", "shape", "bias"),
    [
        pytest.param(name, SHAPES[(number + more) % 3], bool(more), id=f"{name}-{more}")
        for number, name in enumerate(CASES)
        for more in range(2)
    ],
)
class TestFormatsOnGpu:
    pytestmark = GPU

    def test_residual(self, name, shape, bias):
        n, k, tokens = shape
        columns = CASES[name]["scale_block"][1]
        if columns < k and k % columns:
            k = k // columns * columns
        case = case_of(name, tokens, n, k, bias=bias, scale=0.5 if bias else 1.0)
        a = on_gpu(linear_residual, case)
        assert_near(linear_residual, a, linear_residual.OP.call(a))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestShapesOnGpu:
    pytestmark = GPU

    def test_residual(self, shape):
        n, k, tokens = shape
        a = on_gpu(linear_residual, case_of("int4 groups of 32", tokens, n, k))
        first = linear_residual.OP.call(a)
        assert_near(linear_residual, a, first)
        assert torch.equal(first, linear_residual.OP.call(a))

    @pytest.mark.parametrize("layout", ["separate", "halves"])
    def test_activation(self, shape, layout):
        n, k, tokens = shape
        norm = "rms" if layout == "halves" else ""
        a = on_gpu(
            linear_activation,
            case_of("int4 groups of 32", tokens, n, k, layout=layout, norm=norm),
        )
        assert_near(linear_activation, a, linear_activation.OP.call(a))

    @pytest.mark.parametrize("tiles", TILES, ids=str)
    @pytest.mark.parametrize("activation", ["silu", "gelu"])
    def test_pair(self, shape, tiles, activation, monkeypatch):
        """Tests one kernel for both weights and two separate kernels, whichever the plan would
        choose."""
        n, k, tokens = shape
        case = case_of("nvfp4", tokens, n, k, layout="separate", bias=True, activation=activation)
        a = on_gpu(linear_activation, case)
        chosen = MixedConfig(tiles.block_t, tiles.stages, False, SM90.num_sms)
        for config in (chosen, None):
            monkeypatch.setattr(mixed_steps, "pair_config", lambda *_, config=config: config)
            machine = machine_of(a.x.device)
            made = drive(linear_activation_steps(a, machine.target), machine)
            assert len(made.specs) == (3 if config is None else 1)
            assert_near(linear_activation, a, made.outcome.result)

    def test_activation_of_one_weight(self, shape):
        n, k, tokens = shape
        a = on_gpu(linear_activation, case_of("int4", tokens, n, k // 128 * 128, bias=True))
        assert_near(linear_activation, a, linear_activation.OP.call(a))


@pytest.mark.parametrize("tokens", [256, 1024])
class TestReplaysOnGpu:
    pytestmark = GPU

    def test_graph(self, tokens):
        """A captured call gives the same numbers in each replay, also after the activations have
        changed."""
        a = on_gpu(linear_residual, case_of("int4", tokens, 6144, 4096))
        expected = linear_residual.OP.call(a)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            linear_residual.OP.call(a)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = linear_residual.OP.call(a)
        for _ in range(3):
            made.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(made, expected)
        a.x.mul_(2)
        graph.replay()
        assert_near(linear_residual, a, made)
