"""Tests linears whose weight is a tensor subclass of a quantisation library, compiled as they are
loaded.

A stand-in for torchao's Int8Tensor is used here. `test_prepare.py` tests real ones.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

from tests.agreement import assert_no_worse, cloned
from tests.found import matches_of, misses_of, patterns_in
from tilewright.compiler import lower, prepare, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HIDDEN, HEAD_DIM = 256, 64
CLOSE = {"rtol": 0.02, "atol": 0.02}
FUSED = ["qkv_cache", "linear_activation", "linear_residual"]


class Int8Tensor(torch.Tensor):
    """Stands in for torchao's class, with only the weights quantised. Its fields have the same
    names."""

    reads_zero = False
    names = ("qdata", "scale", "zero_point", "act_pre_scale")

    @staticmethod
    def __new__(cls, qdata, scale, dtype, **others):
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype)

    def __init__(
        self, qdata, scale, dtype, zero_point=None, act_pre_scale=None, act_quant_kwargs=None
    ):
        self.qdata, self.scale, self.zero_point = qdata, scale, zero_point
        self.act_pre_scale, self.act_quant_kwargs = act_pre_scale, act_quant_kwargs
        self.block_size = [1, qdata.shape[1]]

    def __repr__(self):
        return f"Int8Tensor({list(self.shape)})"

    def __tensor_flatten__(self):
        kept = [name for name in self.names if getattr(self, name) is not None]
        return kept, {"dtype": self.dtype, "act_quant_kwargs": self.act_quant_kwargs}

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(**tensors, **context)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            return cls.linear(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def linear(cls, x, weight, bias=None):
        if weight.act_quant_kwargs is not None:
            x = x.round()
        if weight.act_pre_scale is not None:
            x = x * weight.act_pre_scale
        codes = weight.qdata.to(x.dtype)
        if cls.reads_zero:
            codes = codes - weight.zero_point.to(x.dtype)
        y = F.linear(x, codes) * weight.scale.to(x.dtype).flatten()
        return y if bias is None else y + bias

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (weight,) = args
            names, context = weight.__tensor_flatten__()
            inner = {name: function(getattr(weight, name)) for name in names}
            return cls(**inner, **context)
        if function is torch.ops.aten.slice.Tensor:
            weight, _, start, end = args
            return cls(weight.qdata[start:end], weight.scale[start:end], weight.dtype)
        raise NotImplementedError(f"{function}")


Int8Tensor.__module__ = "torchao.quantization"


class ReadsZero(Int8Tensor):
    reads_zero = True


ReadsZero.__module__, ReadsZero.__name__ = "torchao.quantization", "Int8Tensor"


class Unheard(Int8Tensor):
    """A class of weights that no table of tilewright has."""


Unheard.__module__ = "torchao.prototype.new"


def weight(rows, columns, seed, kind=Int8Tensor, **others):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    scale = torch.rand(rows, 1, generator=generator) * 2e-3 / columns**0.5 + 1e-4
    return nn.Parameter(kind(codes, scale, torch.bfloat16, **others), requires_grad=False)


def linear(rows, columns, seed, **options):
    made = nn.Linear(columns, rows, bias=False, device="meta", dtype=torch.bfloat16)
    made.weight = weight(rows, columns, seed, **options)
    return made


class Layer(nn.Module):
    """A layer with projections, cache writes, and an MLP."""

    def __init__(self, **options):
        super().__init__()
        shapes = {"q": 256, "k": 128, "v": 128, "gate": 512, "up": 512}
        for seed, (name, rows) in enumerate(shapes.items()):
            setattr(self, name, linear(rows, HIDDEN, seed, **options))
        self.down = linear(HIDDEN, 512, 9, **options)

    def forward(self, x, slots, k_cache, v_cache):
        q, k, v = (getattr(self, n)(x).unflatten(-1, (-1, HEAD_DIM)) for n in "qkv")
        k_cache.view(-1, 2, HEAD_DIM)[slots] = k
        v_cache.view(-1, 2, HEAD_DIM)[slots] = v
        x = x + q.flatten(-2)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def arguments(tokens=3):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    caches = [torch.zeros(4, 16, 2, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
    return [x, torch.arange(tokens) * 5 + 1, *caches]


def exact(layer, args):
    """Computes the layer in float64, with dense weights that equal the decoded codes."""
    plain = Layer()
    for name, module in plain.named_children():
        own = getattr(layer, name).weight
        module.weight = nn.Parameter(own.qdata.double() * own.scale.double(), False)
    wide = [a.double() if a.is_floating_point() else a for a in args]
    return plain(*wide), wide


def check_fused(layer, args=None, **options):
    args = args or arguments()
    ours, eager = cloned(args), cloned(args)
    expected = layer(*eager)
    options = {"inner": "eager", **options}
    made = torch.compile(layer, backend="tilewright", options=options)(*ours)
    assert patterns_in(reports()[-1], "qkv", "mlp") == FUSED
    assert misses_of(reports()[-1], "qkv", "mlp") == []
    reference, wide = exact(layer, args)
    results = zip((made, *ours[2:]), (expected, *eager[2:]), (reference, *wide[2:]), strict=True)
    for name, numbers in zip(("result", "k", "v"), results, strict=True):
        assert_no_worse(*numbers, name)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_model_is_fused_as_it_is_loaded(inner):
    check_fused(Layer(), inner=inner)


def test_codes_are_read_where_they_lie():
    """Inductor passes the tensors inside the weights directly to the op, and makes no other tensor
    of their size."""
    layer, args = Layer(), arguments()
    compiled = torch.compile(layer, backend="tilewright")
    _, (code, *_) = run_and_get_code(compiled, *args)
    assert patterns_in(reports()[-1], "qkv", "mlp") == FUSED
    assert code.count("tilewright.fused_qkv_paged") >= 1
    sizes = [line for line in code.splitlines() if "empty_strided" in line and "int8" in line]
    assert sizes == []


def test_the_graph_has_the_arguments_that_it_has_of_a_prepared_model():
    args = arguments()
    loaded = matches_of(lower(Layer(), args), "qkv", "mlp")
    prepared = Layer()
    assert len(prepare(prepared).replaced) == 6
    torch._dynamo.reset()
    known = matches_of(lower(prepared, args), "qkv", "mlp")
    assert [(m.pattern, m.op, m.shapes) for m in loaded] == [
        (m.pattern, m.op, m.shapes) for m in known
    ]


def test_zero_points_that_the_library_does_not_read_are_not_looked_at():
    check_fused(Layer(zero_point=torch.zeros(1, dtype=torch.int8)))


def test_a_library_that_reads_more_of_the_weight_is_told():
    """A release of the library that reads another field of the weight is reported. It could, for
    example, subtract zero points."""
    layer, args = Layer(kind=ReadsZero, zero_point=torch.ones(1, dtype=torch.int8)), arguments()
    lowered = lower(layer, args)
    assert not {"qkv_cache", "linear_activation"} & {m.pattern for m in lowered.matches}
    told = [m for m in lowered.misses if m.pattern == "declare"]
    assert {m.code for m in told} == {"SUBCLASS"}
    assert "read from x, qdata, scale; the library's linear reads" in told[0].message
    assert "zero_point" in told[0].message


REFUSED = {
    "activations": ({"act_quant_kwargs": "per row"}, "its activations are int8"),
    "scaled before": (
        {"act_pre_scale": torch.ones(1).bfloat16()},
        "its activations are scaled before",
    ),
    "unknown": (
        {"kind": Unheard},
        "does not read weights of the class torchao.prototype.new.Unheard",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_told_by_name_with_what_to_do(case):
    options, why = REFUSED[case]
    layer, args = Layer(), arguments()
    for seed, module in enumerate(layer.children()):
        kind = options.get("kind", Int8Tensor)
        others = {name: value for name, value in options.items() if name != "kind"}
        module.weight = weight(*module.weight.shape, seed, kind, **others)
    lowered = lower(layer, args)
    told = [m for m in lowered.misses if m.code == "SUBCLASS"]
    assert {m.pattern for m in told} == {"qkv_cache", "linear_activation", "linear_residual"}
    assert all(why in m.message for m in told)
    assert all("module.weight.dequantize()" in m.hint for m in told)
    assert why in prepare(layer).left[0].reason


def test_a_part_of_a_weight_is_not_read():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = linear(512, HIDDEN, 0), linear(HIDDEN, 512, 1)

        def forward(self, x):
            part = torch.ops.aten.slice.Tensor(self.up.weight, 0, 0, 512)
            return x + self.down(F.silu(F.linear(x, part)))

    found = lower(Sliced(), arguments()[:1])
    assert [m.op for m in found.matches] == ["linear_residual"]
    assert "SUBCLASS" in {m.code for m in found.misses}


def test_under_autocast_the_library_decides():
    layer, args = Layer(), arguments()
    with torch.autocast("cpu", torch.float16):
        lowered = lower(layer, args)
    assert "linear_activation" not in {m.pattern for m in lowered.matches}


def test_a_linear_that_no_pattern_takes_runs_as_it_was():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = linear(512, HIDDEN, 0)

        def forward(self, x):
            return self.head(x).sin()

    model, (x, *_) = Alone(), arguments()
    others = {"patterns": ["-coded_linear"]}
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager", **others})
    assert torch.equal(compiled(x), model(x))
    assert not reports()[-1].matches
    torch._dynamo.reset()
    (found,) = lower(model, (x,), **others).graphs
    targets = [node.target for node in found.after.graph.nodes if node.op == "call_function"]
    assert F.linear in targets
    assert getattr not in targets


def test_what_a_weight_holds_may_change_and_another_kind_compiles_anew():
    layer, args = Layer(), arguments()
    compiled = torch.compile(layer, backend="tilewright", options={"inner": "eager"})
    compiled(*cloned(args))
    count = len(reports())
    layer.q.weight.scale.mul_(2)
    torch.testing.assert_close(compiled(*cloned(args)), layer(*cloned(args)), **CLOSE)
    assert len(reports()) == count
    layer.q.weight = weight(256, HIDDEN, 0, act_quant_kwargs="per row")
    torch.testing.assert_close(compiled(*cloned(args)), layer(*cloned(args)), **CLOSE)
    assert len(reports()) > count
    assert "qkv_cache" not in patterns_in(reports()[-1], "qkv")


@pytest.mark.parametrize("held", ["buffer", "attribute"])
def test_weights_that_are_no_parameters(held):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            for seed, name in enumerate(("up", "down")):
                shape = (512, HIDDEN) if name == "up" else (HIDDEN, 512)
                made = weight(*shape, seed).data
                if held == "buffer":
                    self.register_buffer(name, made)
                else:
                    setattr(self, name, made)

        def forward(self, x):
            return x + F.linear(F.silu(F.linear(x, self.up)), self.down)

    found = lower(Head(), arguments()[:1])
    assert sorted(m.op for m in found.matches) == ["linear_activation", "linear_residual"]


def test_token_counts_may_be_symbols():
    layer = Layer()
    compiled = torch.compile(
        layer, backend="tilewright", dynamic=True, options={"inner": "eager", "verify": True}
    )
    for count in (3, 5):
        args = arguments(count)
        torch.testing.assert_close(compiled(*cloned(args)), layer(*cloned(args)), **CLOSE)
    assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"]
