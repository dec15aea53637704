"""Tests gpt-oss's mixtures in MXFP4: `prepare` converts the hub's objects to modules that patterns
can read."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers.integrations.mxfp4", reason="the modules are from there")
from transformers.integrations import mxfp4

from tests.agreement import assert_no_worse
from tests.found import assert_accounted, misses_of, patterns_in
from tests.models import gpt_oss_hub, hf, moe_dequant
from tests.models.gpt_oss_hub import HopperMXValueLayout, StridedLayout, UnknownLayout, WrongLayout
from tilewright.compiler import lower, prepare, reports
from tilewright.compiler.quantised.gpt_oss import Mxfp4Experts, RoutedExperts

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LAYOUTS = [StridedLayout, HopperMXValueLayout]
FIELDS = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64}


@pytest.fixture
def load(monkeypatch):
    """Returns a function of (layout, fields of the config). It builds a case of `hf` with the
    modules that transformers uses with the hub's kernels."""
    monkeypatch.setattr(mxfp4, "triton_kernels_hub", None, raising=False)

    def case(layout, **changes):
        put = lambda model: gpt_oss_hub.load(model, layout)  # noqa: E731
        return hf.build_hf("gpt_oss", prepare=put, **FIELDS | changes)

    return case


def mixtures(model):
    return [module for name, module in model.named_modules() if name.endswith(".mlp")]


def tokens(dtype=torch.bfloat16, rows=5):
    x = torch.randn(2, rows, FIELDS["hidden_size"], generator=torch.Generator().manual_seed(1))
    return (3 * x).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixture_computes_what_the_hub_does(layout, load, monkeypatch):
    model = load(layout).model
    theirs = copy.deepcopy(mixtures(model)[1])
    prepared = prepare(model)
    assert prepared.left == []
    assert [type(one.module) for one in prepared.replaced] == [RoutedExperts, Mxfp4Experts] * 2
    assert "RoutedExperts()" in str(prepared)
    (out, logits), x = mixtures(model)[1](tokens()), tokens()
    expected, their_logits = theirs(x)
    assert torch.equal(logits, their_logits)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    monkeypatch.setattr(mxfp4, "triton_kernels_hub", gpt_oss_hub.hub(layout, torch.float64))
    exact, _ = theirs(x)
    assert exact.dtype == torch.float64
    ours, error = ((y.double() - exact).norm() for y in (out, expected))
    assert ours <= 1.01 * error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_fused(layout, load):
    case = load(layout)
    step, past = case.args[0], case.kwargs["past_key_values"]
    theirs = case.model(step, past_key_values=copy.deepcopy(past)).logits
    prepare(case.model)
    compiled = torch.compile(case.model, backend="tilewright", options={"inner": "eager"})
    fused = compiled(step, past_key_values=copy.deepcopy(past)).logits
    (report,) = reports()
    assert sorted(patterns_in(report, "moe")) == ["moe"] * 2 + ["moe_router"] * 2
    assert {m.shapes["weights"] for m in report.matches if m.pattern == "moe"} == {"mxfp4"}
    assert_accounted(report.points)
    torch.testing.assert_close(fused, theirs, rtol=0.05, atol=0.05)


def test_the_tensors_are_those_of_the_file(load):
    """If the hub's objects hold the bytes in the file's order, `prepare` keeps these bytes."""
    model = load(StridedLayout).model
    before = mixtures(model)[0].experts
    prepare(model)
    after = mixtures(model)[0].experts
    for name, (e, n, k) in {"gate_up_proj": (4, 256, 64), "down_proj": (4, 64, 128)}.items():
        codes, scales, _ = moe_dequant.stored("mxfp4", 0, (e, n, k))
        state = after.state_dict()
        assert torch.equal(state[f"{name}_blocks"], codes.view(e, n, k // 32, 16))
        assert torch.equal(state[f"{name}_scales"], scales)
        assert state[f"{name}_blocks"].data_ptr() == getattr(before, name).storage.data.data_ptr()
        assert getattr(after, f"{name}_bias") is getattr(before, f"{name}_bias")


def test_modules_that_hold_the_files_own_tensors(load):
    """Until transformers 4.55 converts such modules for the hub's kernels, they hold the tensors of
    the file."""
    model = load(StridedLayout).model
    x, experts = tokens(), mixtures(model)[0].experts
    for name in gpt_oss_hub.PROJECTIONS:
        scales = getattr(experts, f"{name}_precision_config").weight_scale.storage.data
        codes = getattr(experts, name).storage.data.transpose(1, 2)
        scales = nn.Parameter(scales.transpose(1, 2), requires_grad=False)
        setattr(experts, f"{name}_scales", scales)
        blocks = codes.unflatten(-1, (scales.shape[-1], -1))
        setattr(experts, f"{name}_blocks", nn.Parameter(blocks, requires_grad=False))
        setattr(experts, f"{name}_precision_config", None)
    prepared = prepare(model)
    assert prepared.left == []
    ours, others = mixtures(model)
    others.router = ours.router  # the codes are the same
    others.experts.load_state_dict(ours.experts.state_dict())
    assert torch.equal(ours(x)[0], others(x)[0])


def unloaded(experts):
    experts.down_proj_precision_config = None


def of_ranks(experts):
    experts._is_hooked = True


def unclamped(experts):
    experts.limit = None


def on_meta(experts):
    for name in gpt_oss_hub.PROJECTIONS:
        storage = getattr(experts, name).storage
        storage.data = storage.data.to("meta")


def of_other_sizes(experts):
    storage = experts.down_proj_precision_config.weight_scale.storage
    storage.data = storage.data[:, 1:]


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [
        (UnknownLayout, None, "does not read the layout UnknownLayout"),
        (WrongLayout, None, "HopperMXValueLayout cannot undo its own order"),
        (StridedLayout, unloaded, "down_proj holds no weight yet"),
        (StridedLayout, of_ranks, "spread over ranks"),
        (StridedLayout, unclamped, "not clamped"),
        (StridedLayout, of_other_sizes, r"down_proj has codes [4, 64, 64] and scales [4, 64, 3]"),
        (HopperMXValueLayout, on_meta, "on the meta device"),
    ],
)
def test_what_is_not_read_stays_with_the_reason(layout, change, reason, load):
    model = load(layout if layout is not WrongLayout else HopperMXValueLayout).model
    for module in mixtures(model):
        if layout is WrongLayout:
            storage = module.experts.gate_up_proj.storage
            storage.layout = WrongLayout(storage.layout.shape)
        if change is not None:
            change(module.experts)
    modules = dict(model.named_modules())
    prepared = prepare(model)
    assert prepared.replaced == []
    assert {reason in one.reason for one in prepared.left} == {True}, prepared
    assert dict(model.named_modules()) == modules


def test_a_router_of_another_class_stays(load):
    model = load(StridedLayout).model
    for module in mixtures(model):
        module.router = nn.Linear(64, 4)
    assert [one.name for one in prepare(model).left] == [f"model.layers.{i}.mlp" for i in (0, 1)]


def test_strided_bytes_on_the_meta_device_are_read(load):
    model = load(StridedLayout).model.to("meta")
    for module in mixtures(model):
        on_meta(module.experts)
    assert prepare(model).left == []


def test_it_is_undone(load):
    model = load(StridedLayout).model
    before = dict(model.named_modules())
    prepared = prepare(model)
    assert dict(model.named_modules()) != before
    prepared.undo()
    assert dict(model.named_modules()) == before


# --- a product in fp32 ----------------------------------------------------------------------------


class Mixture(nn.Module):
    """A router with the experts of the prepared module, and with the changes that a test makes."""

    def __init__(self, dtype=torch.bfloat16, **methods):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        weights = {}
        for name, shape in {"gate_up_proj": (4, 256, 64), "down_proj": (4, 64, 128)}.items():
            codes, scales, _ = moe_dequant.stored("mxfp4", 0, shape)
            weights[name] = codes.unflatten(-1, (-1, 16)), scales
        biases = {
            f"{name}_bias": nn.Parameter(torch.randn(*scales.shape[:2], generator=made) / 10)
            for name, (_, scales) in weights.items()
        }
        self.experts = Mxfp4Experts(SimpleNamespace(alpha=1.702, limit=7.0, **biases), weights)
        for name, method in methods.items():
            setattr(self.experts, name, method.__get__(self.experts))
        router = torch.randn(4, 64, generator=made).to(dtype)
        self.router = nn.Parameter(router)
        self.requires_grad_(False)

    def forward(self, x):
        top, index = nn.functional.linear(x, self.router).topk(2, -1)
        return self.experts(x, index, top.softmax(-1))


def times_a_factor(self, name):
    """Multiplies by a factor, which gives numbers that bfloat16 cannot represent."""
    return 1.1 * Mxfp4Experts.weight_of_codes(self, name)


def not_rounded(self, both, dtype):
    return Mxfp4Experts._hidden(self, both, torch.float32)


def of_groups(self, name):
    """Returns scales that are not powers of two."""
    codes, scales = self.get_buffer(f"{name}_blocks"), self.get_buffer(f"{name}_scales")
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int8) - 8
    return (nibbles.float() * scales.float().unsqueeze(-1)).flatten(-2).transpose(1, 2)


@pytest.mark.parametrize(
    ("methods", "dtype", "code"),
    [
        ({}, torch.bfloat16, None),
        ({"weight_of_codes": times_a_factor}, torch.bfloat16, "DTYPE"),
        ({"weight_of_codes": of_groups}, torch.bfloat16, "DTYPE"),
        ({"_hidden": not_rounded}, torch.bfloat16, "DTYPE"),
        ({}, torch.float16, "DTYPE"),
        ({}, torch.float32, "DTYPE"),
    ],
)
def test_a_product_in_fp32_is_fused_where_that_rounds_nothing_else(methods, dtype, code):
    report = lower(Mixture(dtype, **methods), (tokens(dtype)[0],))
    assert patterns_in(report, "fused_moe") == ["moe"] * (code is None)
    assert {miss.code for miss in misses_of(report, "fused_moe")} == ({code} if code else set())


def test_a_fused_product_in_fp32_is_as_good_as_eager():
    module, x = Mixture(), tokens()[0]
    compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
    fused, eager = compiled(x), module(x)
    weights = {
        name: module.experts.weight_of_codes(name).double() for name in gpt_oss_hub.PROJECTIONS
    }
    top, index = nn.functional.linear(x, module.router).topk(2, -1)
    exact = torch.zeros(x.shape, dtype=torch.float64)
    for t, (row, ids, shares) in enumerate(zip(x, index, top.softmax(-1), strict=True)):
        for e, share in zip(ids, shares, strict=True):
            both = row.double() @ weights["gate_up_proj"][e]
            both = both + module.experts.gate_up_proj_bias[e]
            gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            y = hidden @ weights["down_proj"][e] + module.experts.down_proj_bias[e]
            exact[t] += share.double() * y
    assert_no_worse(fused, eager, exact, "gpt-oss")
