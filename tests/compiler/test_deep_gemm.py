"""Tests DeepGEMM's operators, which write an argument.

Stand-ins have the schemas and the arithmetic of the hub's kernels. The calls are those that
transformers makes on a Hopper GPU and on a Blackwell GPU.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers.integrations.deepgemm")

from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations import finegrained_fp8 as library

from tests.agreement import assert_no_worse
from tests.found import matches_of, misses_of, patterns_in
from tests.library_layers import Attention, Mlp, assert_attention_no_worse, attention_args, run
from tests.models import deep_gemm, finegrained
from tests.models.shipped import dense, step_of
from tests.tables import all_pairs
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "kernel")

HIDDEN = 512
#: Whether the machine is a Blackwell GPU, and how the checkpoint stores scales.
MACHINES = {
    "hopper": (False, "float"),
    "hopper-ue8m0": (False, "ue8m0"),
    "blackwell": (True, "ue8m0"),
}


@pytest.fixture
def kernel(monkeypatch, request):
    """Loads the stand-ins in place of the hub's kernels."""
    monkeypatch.setattr(library, "_FINEGRAINED_FP8", finegrained.KERNEL)
    machine = getattr(request.node, "callspec", None)
    machine = machine.params.get("machine", "hopper") if machine else "hopper"
    deep_gemm.use(monkeypatch, blackwell=MACHINES[machine][0])


def linear(machine, **options):
    """Makes a linear of these sizes from a seed. Its scales have the form of the machine's
    checkpoint."""
    return partial(finegrained.linear, scale_fmt=MACHINES[machine][1], **options)


def activations(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exactly(module, x):
    """Computes a linear as the library does, but without rounding after the codes."""
    blackwell = library.is_sm100()
    codes, sf = deep_gemm.per_token_cast_to_fp8(
        x.reshape(-1, x.shape[-1]), use_ue8m0=blackwell, use_packed_ue8m0=blackwell
    )
    weight = finegrained.decoded(module.weight, module.weight_scale_inv)
    y = (deep_gemm.decoded(codes, sf) @ weight.T).view(*x.shape[:-1], -1)
    return y if module.bias is None else y + module.bias.double()


@pytest.mark.parametrize(
    ("machine", "tokens", "bias"), all_pairs(list(MACHINES), [1, 3], [False, True])
)
def test_projections_are_fused(machine, tokens, bias):
    model = Attention(linear(machine, bias=bias), HIDDEN)
    args = attention_args(activations(tokens, HIDDEN))
    ours, eager = run(model, *args)
    (site,) = matches_of(reports()[-1], "qkv")
    assert (site.pattern, site.shapes["weight"]) == ("qkv_cache", "fp8")
    assert not reports()[-1].misses
    exact = {name: exactly(getattr(model, name), args[0]) for name in "qkv"}
    assert_attention_no_worse(ours, eager, exact)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("machine", MACHINES)
def test_an_mlp_for_few_tokens_is_fused_and_no_worse(machine, tokens):
    model, x = Mlp(linear(machine), HIDDEN, 1024), activations(tokens, HIDDEN)
    (actual, _), (eager, _) = run(model, x)
    assert sorted(patterns_in(reports()[-1], "mlp")) == ["linear_activation", "linear_residual"]
    assert not misses_of(reports()[-1], "mlp")
    h = F.silu(exactly(model.gate, x)) * exactly(model.up, x)
    assert_no_worse(actual, eager, x.double() + exactly(model.down, h.bfloat16()), "mlp")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_models_are_fused(kind):
    model = finegrained.quantised(dense(kind))
    eager = model(**step_of(model)).logits
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    logits = compiled(**step_of(model)).logits
    report = reports()[-1]
    assert Counter(m.pattern for m in report.matches) == {
        "qkv_cache": 2,
        "cache_attention": 2,
        "linear_activation": 2,
        "linear_residual": 4,
    }
    assert report.misses == ()
    torch.testing.assert_close(logits, eager, rtol=0.05, atol=0.05)


def test_rows_in_a_layout_are_told():
    """Tests rows of experts that begin at multiples of 128. The hint names `grouped_mm`, which is
    fused."""
    torch.manual_seed(0)
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config |= {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    made = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config), dtype=torch.bfloat16)
    module = finegrained.quantised(made, "deepgemm").model.layers[0].mlp.experts
    x, ids = activations(6, 256), torch.tensor([[0, 1], [3, 2], [1, 0], [0, 3], [2, 1], [3, 0]])
    args = x, ids, torch.rand(6, 2, generator=torch.Generator().manual_seed(2)).bfloat16()
    made, expected = run(module, *args)
    report = reports()[-1]
    assert not report.matches
    assert {miss.code for miss in report.misses} == {"DECLARED_FORM"}
    assert all('set_experts_implementation("grouped_mm")' in miss.hint for miss in report.misses)
    assert torch.equal(made[0], expected[0])


# --- calls that are written in place --------------------------------------------------------------


class Sums(nn.Module):
    """The tensor that the operator writes is read before the call, is a view, or belongs to the
    caller."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, linear("hopper")(256, HIDDEN, 0)

    def forward(self, x, out):
        codes, sf = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
        made = torch.empty(len(x), 256, dtype=x.dtype)
        room = {"read before": made, "a view": made.view(-1, 256), "the caller's": out}[self.how]
        before = made.shape if self.how != "read before" else made.fill_(3.0).sum()
        own = (self.linear.weight, self.linear.weight_scale_inv)
        deep_gemm.KERNEL.fp8_fp4_matmul((codes, sf), own, room)
        return room * 2, (made * 0 if self.how == "the caller's" else made) + 1, before


@pytest.mark.parametrize("how", ["read before", "a view", "the caller's"])
def test_what_is_written_keeps_its_other_names(how):
    args = activations(3, HIDDEN), torch.ones(3, 256).bfloat16()
    (made, ours), (eager, theirs) = run(Sums(how), *args, patterns=["-coded_linear"])
    for a, b in zip((*made[:1], ours[1]), (*eager[:1], theirs[1]), strict=True):
        assert torch.equal(a, b)
    if how != "the caller's":
        assert torch.equal(made[1], eager[1])


def test_a_sum_is_another_operation():
    """With the argument `c`, the operator adds the product to `c`."""
    module = linear("hopper")(256, HIDDEN, 0)
    op = getattr(torch.ops, deep_gemm.LIBRARY).fp8_fp4_gemm_nt

    def call(x, c):
        codes, sf = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
        d = torch.empty(len(x), 256)
        recipes = (0, 0, 0, False) + (0, 0, False) * 2
        op(codes, sf, module.weight, module.weight_scale_inv, d, c, *recipes, "nk", False)
        return d + 1

    (miss,) = misses_of(lower(call, (activations(3, HIDDEN), torch.ones(3, 256))), "declare")
    assert "here the argument c is given" in miss.message


def test_a_tensor_that_two_calls_write():
    """The first result is read before the second call overwrites it."""
    gate, up = (linear("hopper")(256, HIDDEN, seed) for seed in (3, 4))

    def call(x):
        a = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
        d = torch.empty(len(x), 256, dtype=x.dtype)
        deep_gemm.KERNEL.fp8_fp4_matmul(a, (gate.weight, gate.weight_scale_inv), d)
        gated = F.silu(d)
        deep_gemm.KERNEL.fp8_fp4_matmul(a, (up.weight, up.weight_scale_inv), d)
        return gated * d, d

    (made, _), (eager, _) = run(call, activations(3, HIDDEN), patterns=["-coded_linear"])
    for a, b in zip(made, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-3)
