"""Tests single linears of quantisation libraries, and the modules that `prepare` puts in their
place."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models import gptq_modules
from tests.models.shipped import calibrate
from tests.models.single_linear import SHAPES, assert_no_further, inputs, one_linear
from tilewright.compiler import prepare
from tilewright.compiler.quantised import tensor_subclasses
from tilewright.compiler.quantised.compressed_tensors import CompressedLinear
from tilewright.compiler.quantised.gptqmodel import GptqLinear


def compressed(preset, model=None, **weights):
    """Returns a linear as compressed-tensors stores it. `weights` are fields of the scheme's
    `weights`."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors import compressors, quantization

    model = one_linear() if model is None else model
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    if weights:
        fields = scheme.weights.model_dump() | weights
        scheme.weights = quantization.QuantizationArgs(**fields)
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme})
    quantization.apply_quantization_config(model, config)
    linear = model[0]
    calibrate(linear)
    compressors.compress_module(linear)
    return model


def decompressed(model):
    from compressed_tensors import compressors

    model = copy.deepcopy(model)
    compressors.decompress_module(model[0])
    return model


ASYMMETRIC = {"symmetric": False, "zp_dtype": torch.int8}
SCHEMES = {
    "FP8": {},
    "FP8_DYNAMIC": {},
    "FP8_BLOCK": {"block_structure": [32, 64]},
    "W8A8": {},
    "W8A16": {},
    "W4A16": {},
    "W4A16_ASYM": {},
    "W4A8": {},
    "W4AFP8": {},
    "NVFP4A16": {},
    "NVFP4": {},
    "MXFP4A16": {},
    "MXFP4": {},
}


# Formats whose weights the library decodes to bfloat16, whatever the dtype of x is.
BFLOAT16 = ("NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4")
CALLS = [(preset, torch.bfloat16) for preset in SCHEMES]
CALLS += [(preset, torch.float16) for preset in SCHEMES if preset not in BFLOAT16]


@pytest.mark.parametrize(("preset", "dtype"), CALLS)
def test_linears_of_compressed_tensors_are_the_librarys_to_the_bit(preset, dtype):
    model = compressed(preset, one_linear(dtype=dtype), **SCHEMES[preset])
    theirs = decompressed(model)
    assert prepare(model).left == []
    for shape in SHAPES:
        x = inputs(shape, dtype)
        torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=0, msg=f"{preset} {shape}")


#: A divisor for scales. For one scale, the product with the divisor's reciprocal and the quotient
#: are rounded to different bfloat16 numbers.
ROUNDS_OTHERWISE = 1402.5213623046875


@pytest.mark.parametrize("divisor", [3.0, ROUNDS_OTHERWISE])
def test_a_divisor_of_scales_is_that_of_the_last_file(divisor):
    """After `load_state_dict`, a linear holds the reciprocal of the new divisor. If products with
    the reciprocal would differ from the library's in a bit, the scales are divided."""
    model = compressed("NVFP4A16")
    state = model.state_dict() | {"0.weight_global_scale": torch.tensor([divisor])}
    state = {name: tensor.clone() for name, tensor in state.items()}
    prepare(model)
    assert model[0].weight_factors is not None
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    theirs = compressed("NVFP4A16")
    theirs.load_state_dict(state)
    theirs = decompressed(theirs)
    assert (model[0].weight_factors is None) == (divisor == ROUNDS_OTHERWISE)
    x = inputs((3, 256), torch.bfloat16)
    torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=0)


def test_factors_of_one_parent_lie_together():
    """One tensor holds the factors of all linears of a parent. Loading a new divisor changes only
    the factor of its linear."""

    def attention():
        names = ("q", "k", "v")
        return nn.ModuleDict({name: compressed("NVFP4A16", one_linear())[0] for name in names})

    model, theirs = attention(), attention()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["k.weight_global_scale"] *= 3
    prepare(model)
    (held,) = {id(linear.weight_factors) for linear in model.values()}
    assert [linear.place for linear in model.values()] == [0, 1, 2]
    model.load_state_dict(state)
    theirs.load_state_dict(state)
    assert {id(linear.weight_factors) for linear in model.values()} == {held}
    wanted = [1 / state[f"{name}.weight_global_scale"] for name in model]
    assert torch.equal(model["q"].weight_factors, torch.cat(wanted))
    x = inputs((3, 256), torch.bfloat16)
    for name, linear in model.items():
        own = decompressed(nn.Sequential(theirs[name]))
        torch.testing.assert_close(linear(x), own(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("preset", "weights"),
    [
        ("W8A8", ASYMMETRIC),
        ("W8A8", {"strategy": "tensor"} | ASYMMETRIC),
        ("W8A8", {"strategy": "block", "block_structure": [32, 64]} | ASYMMETRIC),
        ("W4A16", {"strategy": "channel", "group_size": None} | ASYMMETRIC),
        ("W8A16", {"strategy": "channel", "group_size": None} | ASYMMETRIC),
    ],
)
def test_zeros_are_subtracted_whatever_shares_them(preset, weights):
    model = compressed(preset, **weights)
    theirs = decompressed(model)
    assert model[0].weight_zero_point.any()
    prepare(model)
    x = inputs((2, 3, 256), torch.bfloat16)
    torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("strategy", "shape"), [("group", (6, 4)), ("channel", (6, 1)), ("block", (3, 4))]
)
def test_zeros_and_scales_are_those_of_each_weight(strategy, shape):
    """The test does not need the library. It decodes a weight [6, 32] with each scale and zero one
    by one."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (6, 32), generator=generator).to(torch.int8)
    zeros = torch.randint(-8, 8, shape, generator=generator).to(torch.int8)
    scales = torch.rand(shape, generator=generator)
    linear = nn.Linear(32, 6, bias=False)
    linear.weight = nn.Parameter(codes, requires_grad=False)
    for name, numbers in (("weight_scale", scales), ("weight_zero_point", zeros)):
        linear.register_buffer(name, numbers)
    made = CompressedLinear(linear, None, strategy, (2, 8)).weight_of_codes(torch.float32)
    for row in range(6):
        for column in range(32):
            at = row * shape[0] // 6, column * shape[1] // 32
            assert made[row, column] == (codes[row, column] - zeros[at]) * scales[at]


def test_a_last_word_that_is_not_full():
    """The last word may be incomplete. 252 columns need 32 words, and 60 rows of zeros need 8
    words; in both cases, four codes of the last word are unused."""
    small = {"strategy": "channel", "group_size": None}
    model = compressed("W4A16_ASYM", one_linear(252, 60), **small)
    theirs = decompressed(model)
    prepare(model)
    x = inputs((3, 252), torch.bfloat16)
    torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=0)


@pytest.mark.parametrize("preset", ["MXFP8", "MXFP8A16", "W4A4"])
def test_schemes_that_are_not_read_stay(preset):
    prepared = prepare(compressed(preset))
    assert prepared.replaced == []
    assert len(prepared.left) == 1


def test_a_linear_that_is_decompressed_already_is_told():
    prepared = prepare(decompressed(compressed("W4A16")))
    assert prepared.replaced == []
    assert "the model ran before `prepare`" in str(prepared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Intx"])
def test_linears_of_torchao(config, dtype):
    quantization = pytest.importorskip("torchao.quantization")
    model = one_linear(dtype=dtype)
    if config == "Intx":
        groups = quantization.PerGroup(64)
        kind = quantization.MappingType.ASYMMETRIC
        made = quantization.IntxWeightOnlyConfig(torch.int4, groups, mapping_type=kind)
    else:
        made = getattr(quantization, config)()
    quantization.quantize_(model, made)
    theirs = copy.deepcopy(model)
    assert len(prepare(model).replaced) == 1
    for shape in SHAPES:
        x = inputs(shape, dtype)
        # torchao rounds float8 products before it adds the bias, and a linear of PyTorch rounds
        # torchao rounds float8 products before it adds the bias. A linear of PyTorch rounds after
        # it.
        rounding = torch.finfo(dtype).eps if config.startswith("Float8") else 0
        torch.testing.assert_close(model(x), theirs(x), rtol=rounding, atol=rounding)


def int4_linear(tiled, rows=20, columns=192, **fields):
    """Returns a linear as torchao has it, and its weight in float64."""
    pytest.importorskip("torchao.quantization")
    from tests.models import torchao_int4

    model = one_linear(columns, rows)
    made = torchao_int4.quantised(model[0].weight.detach(), tiled)
    for name, value in fields.items():
        setattr(made, name, value)
    model[0].weight = nn.Parameter(made, requires_grad=False)
    if fields:
        return model, None
    if tiled:
        codes = torchao_int4.unpack_tiles(made.qdata) - 8
        scale, zero = made.scale_and_zero.unbind(-1)
    else:
        codes = torch.stack((made.qdata << 4 >> 4, made.qdata >> 4), dim=-1).flatten(-2)
        scale, zero = made.scale, made.zero_point
    scale, zero = (part.t().double().unsqueeze(-1) for part in (scale, zero))
    exact = codes.double().unflatten(-1, (scale.shape[1], -1)) * scale + zero
    return model, exact.flatten(-2)[:rows, :columns]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tiled", [False, True])
def test_int4_linears_of_torchao(tiled, dtype):
    """Tests a linear whose last tiles are not full: 20 rows and 192 columns, with tiles of 8 rows
    and 1024 columns."""
    model, exact = int4_linear(tiled)
    theirs = copy.deepcopy(model)
    prepared = prepare(model)
    assert prepared.left == []
    assert torch.equal(model[0].weight_of_codes(torch.bfloat16), exact.to(torch.bfloat16))
    for shape in [(1, 192), (2, 3, 192)]:
        x = inputs(shape, torch.bfloat16).to(dtype)
        assert model(x).dtype == dtype
        if tiled or dtype == torch.bfloat16:
            torch.testing.assert_close(model(x), theirs(x), rtol=0.01, atol=0.01)
    prepared.undo()
    assert torch.equal(model(x.bfloat16()), theirs(x.bfloat16()))


@pytest.mark.parametrize(
    ("tiled", "fields", "why"),
    [
        (False, {"activation_dtype": torch.float8_e4m3fn}, "its activations are float8"),
        (False, {"act_pre_scale": torch.ones(192)}, "its activations are scaled before"),
        (True, {"act_pre_scale": torch.ones(192)}, "its activations are scaled before"),
        (True, {"block_size": [1, 256]}, "its columns do not fill groups of 256"),
        (
            True,
            {"qdata": torch.zeros(3, 16, 64, 2, dtype=torch.int32)},
            "its words do not form tiles",
        ),
    ],
)
def test_int4_weights_that_stay(tiled, fields, why):
    model, _ = int4_linear(tiled, **fields)
    assert why in prepare(model).left[0].reason


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("factor", [None, 0.0125])
def test_nvfp4_linears_of_torchao(swizzled, factor):
    """Tests a linear of 140 rows with 16 groups, whose last block in the library's layout is not
    full."""
    formats = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    model = one_linear(256, 140)
    made = formats.NVFP4Tensor.to_nvfp4(
        model[0].weight.detach(),
        per_tensor_scale=None if factor is None else torch.tensor(factor),
        is_swizzled_scales=swizzled,
    )
    model[0].weight = nn.Parameter(made, requires_grad=False)
    theirs = copy.deepcopy(model)
    assert len(prepare(model).replaced) == 1
    for shape in SHAPES:
        x = inputs(shape, torch.bfloat16)
        torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["qint8", "qfloat8"])
def test_linears_of_quanto(weights, dtype):
    quanto = pytest.importorskip("optimum.quanto")
    model, theirs = one_linear(dtype=dtype), one_linear(dtype=dtype)
    for one in (model, theirs):
        quanto.quantize(one, weights=getattr(quanto, weights))
        quanto.freeze(one)
    weight = theirs[0].weight._data.double() * theirs[0].weight._scale.double()
    assert len(prepare(model).replaced) == 1
    # On a CPU, the library's int8 kernel multiplies the scales into the finished sum.
    assert_no_further(model, theirs, weight, dtype)


def marlin_words(codes):
    """Returns bytes [K, N] as words [K / 16, 4 N], in the order of the Marlin kernel's operands.

    The tiles have 16 rows and 64 columns. In each tile, a thread reads two pairs of rows of two
    columns.
    """
    tile = [
        16 * row + lane // 4 + 8 * half + 256 * j
        for lane in range(32)
        for j in range(4)
        for half in (0, 1)
        for row in (2 * (lane % 4) + at for at in (0, 1, 8, 9))
    ]
    order = torch.tensor(tile).view(-1, 4)[:, [0, 2, 1, 3]].flatten()
    tiles = codes.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).transpose(1, 2).flatten(1)
    tiles = tiles.view(-1, order.numel())[:, order].reshape(len(tiles), -1)
    return tiles.contiguous().view(torch.int32)


@pytest.fixture
def marlin(monkeypatch):
    """Returns a function that makes a weight of quanto from words, which are in the order of its
    GPU kernel."""
    pytest.importorskip("optimum.quanto")
    from optimum.quanto.tensor.qtype import qfloat8_e4m3fn
    from optimum.quanto.tensor.weights.marlin.fp8 import MarlinF8QBytesTensor, packed

    def new_words(cls, data, size, stride, requires_grad=False):
        return wrapped(cls, size, strides=stride, dtype=data.dtype)

    def new(cls, qtype, axis, size, stride, data, scale, requires_grad=False):
        return wrapped(cls, size, strides=stride, dtype=scale.dtype)

    def make(words, scale, *size):
        inside = packed.MarlinF8PackedTensor(words, size, (size[1], 1))
        return MarlinF8QBytesTensor(qfloat8_e4m3fn, 0, size, (size[1], 1), inside, scale)

    wrapped = torch.Tensor._make_wrapper_subclass
    monkeypatch.setattr(packed.MarlinF8PackedTensor, "__new__", new_words)
    monkeypatch.setattr(MarlinF8QBytesTensor, "__new__", new)
    return make


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (64, 128), (256, 192)])
def test_linears_of_quanto_in_the_order_of_a_gpu_s_kernel(rows, columns, marlin):
    """On a GPU, quanto makes such weights from float8 weights."""
    from optimum.quanto.tensor.weights.marlin.fp8.packed import get_scale_perms

    make = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=make)
    codes = torch.where(codes & 127 == 127, 0, codes)  # no NaN
    scale = torch.rand(rows, 1, generator=make).bfloat16()
    ordered = scale.view(-1, 32)[:, get_scale_perms()].view(1, rows)
    parts = marlin_words(codes.t()), ordered
    model, biased = one_linear(columns, rows, bias=False), one_linear(columns, rows)
    for one in (model, biased):
        one[0].weight = nn.Parameter(marlin(*parts, rows, columns), requires_grad=False)
    assert len(prepare(model).replaced) == 1
    assert torch.equal(model[0].codes.view(torch.uint8), codes)
    wanted = codes.view(torch.float8_e4m3fn).bfloat16() * scale
    assert torch.equal(model[0].weight_of_codes(torch.bfloat16), wanted)

    (left,) = prepare(biased).left
    assert "ignores the bias" in left.reason
    with FakeTensorMode() as mode:
        fake = marlin(*map(mode.from_tensor, parts), rows, columns)
        told = tensor_subclasses.obstacle(fake)
    assert told == ("`prepare` puts its codes in order, once", True)


#: The linears of gptqmodel, or stand-ins that run if it is not installed.
SOURCES = pytest.mark.parametrize("source", ["gptqmodel", "stand-in"])


def gptq_linear(source, columns=256, rows=64, dtype=torch.float16, order=None, **options):
    if source == "gptqmodel":
        pytest.importorskip("gptqmodel")
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    else:
        TorchLinear = gptq_modules.TorchLinear
    stored = {"bits": 4, "group_size": 64, "sym": True, "desc_act": False, "bias": True} | options
    module = TorchLinear(**stored, in_features=columns, out_features=rows, register_buffers=True)
    if order is not None:
        module.g_idx = order.to(torch.int32)
    return nn.Sequential(gptq_modules.fill(module, dtype=dtype))


def gptq_weight(module):
    """Returns the weight [N, K] in float64, decoded code by code."""
    columns, rows = module.in_features, module.out_features
    words, zeros = (t.long() & 0xFFFFFFFF for t in (module.qweight, module.qzeros))
    k, n = torch.arange(columns).view(-1, 1), torch.arange(rows).view(1, -1)
    codes = (words[k // 8, n] >> (4 * (k % 8))) & 15
    below = (zeros[k // 64, n // 8] >> (4 * (n % 8))) & 15
    return (module.scales[k // 64, n].double() * (codes - below)).t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@SOURCES
def test_linears_of_gptq(source, bias, dtype):
    model = gptq_linear(source, bias=bias, dtype=dtype)
    theirs = copy.deepcopy(model)
    (one,) = prepare(model).replaced
    assert isinstance(one.module, GptqLinear)
    # The library rounds before it adds a bias. A linear of PyTorch rounds after it.
    assert_no_further(model, theirs, gptq_weight(theirs[0]), dtype)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"order": torch.arange(255, -1, -1) // 64, "desc_act": True}, "desc_act"),
        ({"bits": 8}, "8-bit codes"),
        ({"columns": 264}, "padded"),
    ],
)
@SOURCES
def test_linears_of_gptq_that_are_not_read_stay(source, options, reason):
    (left,) = prepare(gptq_linear(source, **options)).left
    assert reason in left.reason


def hqq_linear(columns=256, rows=64, bias=True, dtype=torch.bfloat16, bits=4, axis=1):
    quantize = pytest.importorskip("hqq.core.quantize")
    model = one_linear(columns, rows, bias, dtype)
    config = quantize.BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    made = quantize.HQQLinear(model[0], config, compute_dtype=dtype, device="cpu")
    return nn.Sequential(made).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_linears_of_hqq(bias, dtype):
    model, theirs = hqq_linear(bias=bias, dtype=dtype), hqq_linear(bias=bias, dtype=dtype)
    (one,) = prepare(model).replaced
    weight = theirs[0].dequantize()
    assert torch.equal(one.module.weight_of_codes(dtype), weight)
    # The library rounds before it adds a bias. A linear of PyTorch rounds after it.
    assert_no_further(model, theirs, weight.double(), dtype)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"bits": 3}, "3-bit codes"), ({"bits": 2}, "2-bit codes"), ({"axis": 0}, "axis 0")],
)
def test_linears_of_hqq_that_are_not_read_stay(options, reason):
    (left,) = prepare(hqq_linear(**options)).left
    assert reason in left.reason


@SOURCES
def test_gptq_zeros_stored_less_one_stay(source):
    model = gptq_linear(source)
    model[0].qzero_format(format=1)
    assert "v1" in prepare(model).left[0].reason


def test_tensors_on_the_meta_device():
    """Modules on the meta device are prepared, if this is possible without numbers."""
    assert "meta" in prepare(gptq_linear("stand-in").to("meta")).left[0].reason
    model = compressed("FP8_DYNAMIC").to("meta")
    assert len(prepare(model).replaced) == 1
    assert model(torch.empty(2, 3, 256, dtype=torch.bfloat16, device="meta")).shape == (2, 3, 64)


def test_a_module_in_two_places_is_replaced_in_both():
    model = compressed("W4A16")
    both = nn.ModuleDict({"a": model, "b": nn.Sequential(model[0])})
    original = model[0]
    prepared = prepare(both)
    assert [one.name for one in prepared.replaced] == ["a.0", "b.0"]
    assert both["a"][0] is both["b"][0] is not original
    prepared.undo()
    assert both["a"][0] is both["b"][0] is original


def test_hooks_go_with_the_linear_and_their_handles_remove_them():
    model = compressed("W4A16")
    calls = []
    handle = model[0].register_forward_hook(lambda module, args, out: calls.append(out.shape))
    prepared = prepare(model)
    x = inputs((3, 256), torch.bfloat16)
    model(x)
    handle.remove()
    model(x)
    assert calls == [(3, 64)]
    prepared.undo()
    assert not model[0]._forward_hooks


def test_a_linear_that_is_the_whole_model_stays():
    linear = compressed("W4A16")[0]
    prepared = prepare(linear)
    assert prepared.model is linear
    assert "it is the model itself" in prepared.left[0].reason


def test_training_mode_dtype_and_files_are_those_of_modules():
    model = compressed("W4A16").train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepare(model)
    assert model[0].training
    assert {name: t.dtype for name, t in model.state_dict().items()} == {
        name: t.dtype for name, t in state.items()
    }
    x = inputs((3, 256), torch.bfloat16)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), expected, rtol=0, atol=0)
    for tensor in model.state_dict().values():
        tensor.zero_()
    model.load_state_dict(state)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
