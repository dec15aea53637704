"""Tests that `prepare` lays out the codes of GPTQ and AWQ along K, once, and that memory holds only
one copy of them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the models are those of transformers")

from tests.found import matches_of
from tests.models import gptq_modules
from tests.models.shipped import SHIPPED, dense, step_of
from tests.models.single_linear import SHAPES, assert_no_further, inputs
from tests.tables import all_pairs
from tilewright.codegen.formats import AWQ_ORDER
from tilewright.compiler import lower, prepare
from tilewright.compiler.quantised.coded_linear import turned_words
from tilewright.compiler.quantised.gptqmodel import AwqLinear, GptqLinear
from tilewright.ops.formats.quantized_weight import unpack_nibbles

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

METHODS = ("gptq", "awq")
CODES = {"gptq": "qweight", "awq": "words"}


@pytest.fixture(params=["gptqmodel", "stand-in"])
def linear_of(request):
    """Returns a function that makes single linears of a method, by the library or by its
    stand-ins."""
    return partial(one_packed, request.param)


def one_packed(source, method, columns=256, rows=64, dtype=torch.float16, **options):
    if source == "gptqmodel":
        pytest.importorskip("gptqmodel")
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    else:
        TorchLinear, AwqTorchLinear = gptq_modules.TorchLinear, gptq_modules.AwqTorchLinear
    made = {"gptq": TorchLinear, "awq": AwqTorchLinear}[method]
    stored = {"bits": 4, "group_size": 64, "sym": True, "desc_act": False, "bias": False} | options
    module = made(**stored, in_features=columns, out_features=rows, register_buffers=True)
    return nn.Sequential(gptq_modules.fill(module, dtype=dtype))


def awq_weight(module):
    """Returns the weight [N, K] in float64, decoded code by code."""
    words, zeros = (t.long() & 0xFFFFFFFF for t in (module.qweight, module.qzeros))
    k, n = torch.arange(module.in_features).view(-1, 1), torch.arange(module.out_features)
    shift = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])[n % 8]
    codes, below = (words[k, n // 8] >> shift) & 15, (zeros[k // 64, n // 8] >> shift) & 15
    return ((codes - below) * module.scales[k // 64, n].double()).t()


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (64, 24), (1032, 16), (2056, 8)])
def test_words_that_are_turned_have_the_same_codes(rows, columns):
    """Tests more rows than are transposed at once. The last part of the rows is smaller."""
    make = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=make).int()
    turned = turned_words(words, AWQ_ORDER)
    assert turned.is_contiguous()
    codes = [unpack_nibbles(one, 1, AWQ_ORDER) for one in (words, turned)]
    assert torch.equal(codes[0].t(), codes[1])
    assert torch.equal(turned_words(turned, AWQ_ORDER), words)


@pytest.mark.parametrize(
    ("group", "bias", "dtype"), all_pairs([64, -1], [True, False], [torch.bfloat16, torch.float16])
)
def test_linears_of_awq(linear_of, group, bias, dtype):
    model = linear_of("awq", bias=bias, dtype=dtype, group_size=group)
    theirs = copy.deepcopy(model)
    (one,) = prepare(model).replaced
    assert isinstance(one.module, AwqLinear)
    weight = theirs[0]._weight() if hasattr(theirs[0], "_weight") else None
    if weight is not None:
        assert torch.equal(one.module.weight_of_codes(dtype), weight.t())
    if group == 64:
        assert_no_further(model, theirs, awq_weight(theirs[0]), dtype)
    for shape in SHAPES:
        x = inputs(shape, dtype)
        torch.testing.assert_close(model(x), theirs(x), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bits": 8}, "8-bit codes"),
        ({"columns": 260, "group_size": 52}, "padded"),
        ({"columns": 288, "group_size": 64}, "padded"),
    ],
)
def test_linears_of_awq_that_are_not_read_stay(options, reason):
    model = one_packed("stand-in", "awq", **options)
    original = model[0]
    prepared = prepare(model)
    assert model[0] is original
    assert reason in prepared.left[0].reason
    assert original.qweight.numel()


def test_words_of_another_order_stay():
    model = one_packed("stand-in", "awq")
    model[0].qweight = model[0].qweight.view(-1, 16)
    assert "not int32 [K, N / 8]" in prepare(model).left[0].reason
    other = gptq_modules.AwqGEMMLinear(bits=4, group_size=64, in_features=256, out_features=64)
    (left,) = prepare(nn.Sequential(other)).left
    assert 'load the model with backend="torch_awq"' in left.reason


@pytest.mark.parametrize("method", METHODS)
def test_codes_of_a_row_lie_next_to_each_other(method, linear_of):
    model = linear_of(method)
    stored = model[0].qweight.clone()
    prepare(model)
    codes = getattr(model[0], CODES[method])
    along_k = codes.t() if method == "gptq" else codes
    assert along_k.shape == (64, 32)
    assert along_k.is_contiguous()
    # Every copy of a module has the codes, too.
    assert copy.deepcopy(model)[0].get_buffer(CODES[method]).stride() == codes.stride()
    if method == "gptq":
        assert isinstance(model[0], GptqLinear)
        assert torch.equal(codes, stored)


@pytest.mark.parametrize("method", METHODS)
def test_codes_are_in_memory_once_until_they_are_put_back(method, linear_of):
    model = linear_of(method)
    original, stored = model[0], model[0].qweight.clone()
    prepared = prepare(model)
    if method == "gptq":
        assert original.qweight.data_ptr() == model[0].qweight.data_ptr()
    else:
        assert original.qweight.numel() == 0
    prepared.undo()
    assert model[0] is original
    assert original.qweight.is_contiguous()
    assert torch.equal(original.qweight, stored)


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_has_codes_of_its_own(method, linear_of):
    model = linear_of(method)
    original, before = model[0], model[0].qweight
    prepared = prepare(model, copy=True)
    assert model[0] is original
    assert original.qweight is before
    assert before.is_contiguous()
    assert prepared.model[0].scales.data_ptr() == original.scales.data_ptr()
    prepared.undo()
    assert prepared.model[0].qweight is before


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("method", METHODS)
def test_a_state_of_the_library_s_is_loaded(method, rows, linear_of):
    """A state dict of the library can be loaded. With 256 rows and columns, words of both orders
    have the same shape."""
    model, other = linear_of(method, rows=rows), linear_of(method, rows=rows)
    gptq_modules.fill(other[0], seed=5)
    x = inputs((5, 256), torch.float16)
    prepared = prepare(model)
    layout = getattr(model[0], CODES[method]).stride()
    model.load_state_dict(other.state_dict())
    assert getattr(model[0], CODES[method]).stride() == layout
    torch.testing.assert_close(model(x), other(x), rtol=0.01, atol=0.01)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = copy.deepcopy(model)
    copied.load_state_dict(state)
    assert torch.equal(copied(x), model(x))
    # The loaded codes are put back.
    prepared.undo()
    assert torch.equal(model[0].qweight, other[0].qweight)
    assert torch.equal(model(x), other(x))


def test_awq_on_the_meta_device():
    model = one_packed("stand-in", "awq").to("meta")
    prepared = prepare(model)
    assert model[0].words.shape == (64, 32)
    prepared.undo()
    assert model[0].qweight.shape == (256, 8)


# --- whole models ---------------------------------------------------------------------------------


def llama(source, method, folder):
    if source == "stand-in":
        made = {"gptq": gptq_modules.TorchLinear, "awq": gptq_modules.AwqTorchLinear}
        return gptq_modules.pack(dense("llama"), made[method])
    if not SHIPPED[method].is_installed:
        pytest.skip(f"{method} needs gptqmodel, which `make matrix ROWS=quantised` installs")
    return SHIPPED[method].load("llama", folder)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("source", ["gptqmodel", "stand-in"])
def test_linears_of_a_prepared_model_are_dot_products(source, method, tmp_path):
    """With one token on an H100, these linears are dot products. AWQ's words as loaded are read by
    another kernel."""
    model = llama(source, method, tmp_path)
    theirs = model(**step_of(model)).logits
    prepared = prepare(model)
    assert len(prepared.replaced) == 14
    assert prepared.left == []
    lowered = lower(model, (), step_of(model), target="sm90")
    assert not lowered.misses
    assert len(matches_of(lowered, "qkv_cache")) == 2
    for pattern, count in (("linear_activation", 2), ("linear_residual", 4)):
        found = matches_of(lowered, pattern)
        assert len(found) == count
        assert {kernel.spec.kernel for match in found for kernel in match.kernels} == {
            "dotted_linear"
        }
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    fused = compiled(**step_of(model)).logits
    torch.testing.assert_close(fused, theirs, rtol=0.05, atol=0.05)


def test_awq_is_read_as_it_lies_without_prepare(tmp_path):
    model = llama("stand-in", "awq", tmp_path)
    lowered = lower(model, (), step_of(model), target="sm90")
    found = matches_of(lowered, "linear_residual")
    assert len(found) == 4
    kernels = {kernel.spec.kernel for match in found for kernel in match.kernels}
    assert kernels == {"streamed_linear"}
