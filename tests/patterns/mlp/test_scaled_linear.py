"""Tests linears whose activation and weight are float8 codes in the graph.

They become scaled_linear for any number of tokens. The result is no further from float64 of the
same codes than eager's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse
from tests.found import codes_of, matches_of, patterns_in
from tests.scaled_products import ROW_SCALES
from tilewright.compiler import lower, prepare, reports
from tilewright.ops.mlp.gains import MOST_TOKENS, slower

K, N, MANY = 256, 384, 200
E4M3 = torch.float8_e4m3fn
#: Patterns of products. `round_rows` may match next to each of them.
LINEARS = ("linear_activation", "linear_residual", "scaled_linear")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def by_token(x):
    scale = x.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    return (x / scale).clamp(-448, 448).to(E4M3), scale


def by_tensor(x):
    scale = torch.tensor([0.02], dtype=x.dtype)
    return (x / scale).clamp(-448, 448).to(E4M3), scale


def by_block(x, size=128):
    blocks = x.unflatten(-1, (-1, size))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    return (blocks / scale).clamp(-448, 448).to(E4M3), scale


def by_power_of_two(x):
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).log2().ceil().exp2()
    scale = scale.to(torch.float8_e8m0fnu)
    return (x.float() / scale.float()).to(E4M3), scale.to(x.dtype)


def unscaled(x):
    return x.clamp(-448, 448).to(E4M3), torch.ones((), dtype=x.dtype)


class Linear(nn.Module):
    """Has a weight of codes with a scale for each block. `rounds` is a function that rounds x."""

    def __init__(self, rounds, block=(1, K), shape=(N, K), bias=False, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        (rows, columns), (bn, bk) = shape, block
        codes = torch.randn(shape, generator=generator).mul(40).to(E4M3)
        self.weight = nn.Parameter(codes, requires_grad=False)
        scale = torch.rand(-(-rows // bn), -(-columns // bk), generator=generator) * 1e-3 + 1e-3
        self.scale = nn.Parameter(scale.bfloat16(), requires_grad=False)
        made = torch.randn(rows, generator=generator).bfloat16() if bias else None
        self.bias = nn.Parameter(made, requires_grad=False) if bias else None
        self.rounds, self.block = rounds, block

    def decoded(self, dtype):
        bn, bk = self.block
        spread = self.scale.to(dtype).repeat_interleave(bn, 0).repeat_interleave(bk, 1)
        rows, columns = self.weight.shape
        return self.weight.to(dtype) * spread[:rows, :columns]

    def forward(self, x):
        codes, scale = self.rounds(x)
        rows = (codes.to(scale.dtype) * scale).reshape(x.shape).to(x.dtype)
        return F.linear(rows, self.decoded(x.dtype), self.bias)

    def exact(self, x):
        """Computes the result in float64 from the same codes."""
        codes, scale = self.rounds(x)
        bias = None if self.bias is None else self.bias.double()
        rows = (codes.double() * scale.double()).reshape(x.shape)
        return F.linear(rows, self.decoded(torch.float64), bias)


class Gated(nn.Module):
    """Has a gate and its up projection, which each round x."""

    def __init__(self, rounds, **options):
        super().__init__()
        self.gate, self.up = (Linear(rounds, seed=seed, **options) for seed in (1, 2))

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


def tokens(count=MANY, columns=K):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, count, columns, generator=generator).bfloat16()


def compiled(module, x):
    """Returns the report of a module, after a check that its result is no less accurate than
    eager's."""
    with torch.no_grad():
        options = {"inner": "eager", "target": "sm90"}
        run = torch.compile(module, backend="tilewright", options=options)
        assert_no_worse(run(x), module(x), module.exact(x), "out")
    return reports()[-1]


@pytest.mark.parametrize(
    ("rounds", "options"),
    [
        (by_token, {}),
        (by_token, {"bias": True, "shape": (N, 192), "block": (1, 192)}),
        (by_token, {"block": (N, K)}),
        (by_tensor, {}),
        (by_tensor, {"block": (N, K), "bias": True}),
        (by_block, {"block": (128, 128)}),
        (by_power_of_two, {}),
        (unscaled, {}),
    ],
    ids=["tokens", "bias", "one weight scale", "one x scale", "tensors", "blocks", "e8m0", "ones"],
)
@pytest.mark.parametrize("count", [5, MANY])
def test_codes_of_x_and_of_the_weight_are_multiplied(rounds, options, count):
    columns = options.get("shape", (N, K))[1]
    report = compiled(Linear(rounds, **options), tokens(count, columns))
    (site,) = matches_of(report, *LINEARS)
    assert site.pattern == "scaled_linear"
    assert site.shapes["x"] == f"float8_e4m3fn[{count},{columns}]"
    assert site.shapes["bias"] == ("yes" if options.get("bias") else "no")


def test_a_number_of_tokens_that_is_a_symbol():
    module = Linear(by_token)
    with torch.no_grad():
        run = torch.compile(module, backend="tilewright", options={"inner": "eager"}, dynamic=True)
        for count in (7, MANY, 33):
            x = tokens(count)
            assert_no_worse(run(x), module(x), module.exact(x), str(count))
    assert len(reports()) == 1
    assert patterns_in(reports()[-1], *LINEARS) == ["scaled_linear"]


@pytest.mark.parametrize(
    ("rounds", "options"),
    [(by_token, {}), (by_block, {"block": (128, 128)})],
    ids=["token", "block"],
)
def test_linears_that_round_one_activation_read_the_same_codes(rounds, options):
    with torch.no_grad():
        found = lower(Gated(rounds, **options), (tokens(),), target="sm90")
    graph = found.graphs[0].after.graph
    calls = [n for n in graph.nodes if "scaled_linear" in str(n.target)]
    assert len(calls) == 2
    casts = [n for n in graph.nodes if n.meta.get("example_value") is not None]
    casts = [n for n in casts if n.op == "call_method" and n.target == "to"]
    assert sum(n.meta["example_value"].dtype == E4M3 for n in casts) == 1
    assert sum("amax" in str(n.target) for n in graph.nodes) == 1


def test_the_library_reads_scales_of_blocks_in_place():
    """The library needs a stride of one from row to row, which `round_rows` gives."""
    with torch.no_grad():
        found = lower(
            Gated(by_block, block=(128, 128)), (tokens(100),), target="sm90", dynamic=False
        )
    nodes = found.graphs[0].after.graph.nodes
    scales = [n.kwargs["x_scale"] for n in nodes if "scaled_linear" in str(n.target)]
    made = [scale.meta["example_value"] for scale in scales]
    assert [(one.shape, one.stride()) for one in made] == [((100, K // 128), (1, 100))] * 2


def test_few_tokens_go_to_the_kernels_that_do_more():
    with torch.no_grad():
        *few, more = (
            lower(Gated(by_token), (tokens(n),), dynamic=False)
            for n in (3, MOST_TOKENS, MOST_TOKENS + 1)
        )
    assert [patterns_in(one, *LINEARS) for one in few] == [["linear_activation"]] * 2
    assert patterns_in(more, *LINEARS) == ["scaled_linear", "scaled_linear"]


@pytest.mark.parametrize("weights", [1, 2])
def test_codes_of_x_lower_the_bound_of_codes_of_weights(weights):
    most = {"tokens": MOST_TOKENS, "weights": weights, "coded": True}
    assert slower(**most, rounded=True) is None
    more = most | {"tokens": MOST_TOKENS + 1}
    assert slower(**more) is None
    assert "library's GEMM" in slower(**more, rounded=True)


def test_another_reader_of_the_rounded_rows_still_has_them():
    class Both(Linear):
        def forward(self, x):
            codes, scale = self.rounds(x)
            rows = (codes.to(scale.dtype) * scale).to(x.dtype)
            return F.linear(rows, self.decoded(x.dtype)) + rows[..., :1]

        def exact(self, x):
            codes, scale = self.rounds(x)
            rows = codes.double() * scale.double()
            return F.linear(rows, self.decoded(torch.float64)) + rows[..., :1]

    assert patterns_in(compiled(Both(by_token), tokens()), *LINEARS) == ["scaled_linear"]


def test_blocks_on_hopper_alone():
    module = Linear(by_block, block=(128, 128))
    with torch.no_grad():
        on = {name: lower(module, (tokens(),), target=name) for name in ("sm90", "sm100", "sm89")}
    assert patterns_in(on["sm90"], *LINEARS) == ["scaled_linear"]
    for name in ("sm100", "sm89"):
        assert patterns_in(on[name], *LINEARS) == []
        (miss,) = [m for m in on[name].misses if m.pattern == "scaled_linear"]
        assert (miss.code, miss.weight) == ("NO_KERNELS", "advice")
        assert "only on Hopper" in miss.message


def test_rows_on_every_chip_with_float8():
    with torch.no_grad():
        for name, wanted in (("sm89", 1), ("sm100", 1), ("sm120", 1), ("sm80", 0)):
            found = lower(Linear(by_token), (tokens(),), target=name)
            assert len(patterns_in(found, *LINEARS)) == wanted, name


# --- near misses ----------------------------------------------------------------------------------


def e5m2(x):
    scale = x.abs().amax(-1, keepdim=True) / 57344
    return (x / scale).to(torch.float8_e5m2), scale


def by_64(x):
    return by_block(x, 64)


def by_column(x):
    scale = x.abs().amax(-2, keepdim=True) / 448
    return (x / scale).clamp(-448, 448).to(E4M3), scale


class ScaledTwice(Linear):
    def forward(self, x):
        codes, scale = self.rounds(x)
        rows = codes.to(x.dtype) * scale * x.amax()
        return F.linear(rows, self.decoded(x.dtype))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Linear(e5m2), "codes of float8_e5m2"),
        (Linear(by_64), "a scale for each 1 rows and 64 columns"),
        (Linear(by_column), "a scale for each all rows and 1 columns"),
        (ScaledTwice(by_token), "more than one scale"),
    ],
    ids=["e5m2", "64 columns", "columns", "two scales"],
)
def test_other_roundings_are_told(module, why):
    with torch.no_grad():
        found = lower(module, (tokens(),))
    assert patterns_in(found, *LINEARS) == []
    (miss,) = [m for m in found.misses if m.pattern == "scaled_linear"]
    assert (miss.code, miss.weight) == ("ACTIVATION_FORMAT", "advice")
    assert why in miss.message


class IntegerWeight(Linear):
    def decoded(self, dtype):
        return self.weight.view(torch.int8).to(dtype) * self.scale.to(dtype)


class ComputedWeight(Linear):
    def decoded(self, dtype):
        return (self.weight.to(dtype) + 1).to(E4M3).to(dtype) * self.scale.to(dtype)


class NotRounded(Linear):
    def forward(self, x):
        return F.linear(x, self.decoded(x.dtype))


@pytest.mark.parametrize("kind", [IntegerWeight, ComputedWeight, NotRounded])
def test_what_is_no_product_of_float8_codes_is_left_alone(kind):
    with torch.no_grad():
        found = lower(kind(by_token), (tokens(),))
    assert patterns_in(found, *LINEARS) == []
    assert "ACTIVATION_FORMAT" not in codes_of(found, *LINEARS)


def test_float32_results_are_told():
    with torch.no_grad():
        found = lower(Linear(by_token), (tokens().float(),))
    assert patterns_in(found, *LINEARS) == []
    assert "DTYPE" in codes_of(found, *LINEARS)


@ROW_SCALES
def test_the_graphs_own_scaled_product_stays():
    class Own(Linear):
        def forward(self, x):
            codes, scale = self.rounds(x[0])
            return torch._scaled_mm(
                codes,
                self.weight.t(),
                scale_a=scale.float(),
                scale_b=self.scale.float().t(),
                out_dtype=x.dtype,
            )

    with torch.no_grad():
        assert patterns_in(lower(Own(by_token), (tokens(),)), *LINEARS) == []


# --- models as libraries load them ----------------------------------------------------------------

FORMATS = ("ct-fp8", "ct-fp8-dynamic", "ct-fp8-block", "finegrained-fp8")


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_of_quantised_models(name):
    """Each layer of a quantised model has four linears besides the fused projection, which reads
    codes of x, too."""
    library = pytest.importorskip("transformers")
    from tests.models.shipped import BY_TRANSFORMERS, SHIPPED

    shipped = {**SHIPPED, **BY_TRANSFORMERS}[name]
    if not shipped.is_installed:
        pytest.skip(f"{shipped.library} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(shipped.load("llama", Path(folder))).model
    cache = library.StaticCache(config=model.config, max_cache_len=2 * MANY)
    heads = model.config.num_key_value_heads
    cache.early_initialization(1, heads, 64, torch.bfloat16, torch.device("cpu"))
    given = {"input_ids": torch.arange(MANY)[None] % 128, "past_key_values": cache}
    with torch.no_grad():
        found = lower(model, (), given | {"use_cache": True}, target="sm90")
    layers = model.config.num_hidden_layers
    assert patterns_in(found, *LINEARS) == ["scaled_linear"] * 4 * layers
    projections = matches_of(found, "qkv")
    assert [site.op for site in projections] == ["fused_qkv_paged"] * layers
    assert all(site.shapes["x"] == f"float8_e4m3fn[{MANY},256]" for site in projections)
