"""Tests norms of heads: every spelling gives the same norm. A graph that is no such norm is refused
or not reported."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.found import codes_of, matches_of, misses_of, patterns_in
from tests.models import ropes
from tests.tables import all_pairs
from tilewright.compiler import lower, reports

T, K, H, D = 5, 16, 2, 8


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Attention(nn.Module):
    """Projects, applies `norm(self, heads, is_key)` to q and k, writes K and V, and returns q."""

    def __init__(self, norm):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"q": (H * D, K), "k": (H * D, K), "v": (H * D, K)}
        shapes |= {
            "weight": (D,),
            "other": (D,),
            "by_head": (H, D),
            "row": (H * D,),
            "by": (T, 1, D),
        }
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * 0.5 + 0.1
            setattr(self, name, nn.Parameter(values, requires_grad=False))
        self.norm = norm

    def forward(self, x, slots, k_cache, v_cache):
        q, k, v = (F.linear(x, w).view(-1, H, D) for w in (self.q, self.k, self.v))
        q, k = self.norm(self, q, False), self.norm(self, k, True)
        k_cache.view(-1, H, D)[slots] = k
        v_cache.view(-1, H, D)[slots] = v
        return q * 2


def arguments(dtype=torch.float32, tokens=T):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, K, generator=generator).to(dtype)
    caches = [torch.randn(4, 4, H, D, generator=generator).to(dtype) for _ in range(2)]
    return x, torch.randperm(16, generator=generator)[:tokens], *caches


def run(norm, dtype=torch.float32, tokens=T):
    """Returns (compiled results, eager results) of the same step."""
    model = Attention(norm).to(dtype)
    eager, ours = arguments(dtype, tokens), arguments(dtype, tokens)
    expected = model(*eager)
    actual = torch.compile(model, backend="tilewright", options={"inner": "eager"})(*ours)
    return (actual, *ours), (expected, *eager)


def assert_matched(norm, fact, **how):
    actual, expected = run(norm, **how)
    found = reports()[-1]
    assert patterns_in(found, "qkv") == ["qkv_cache"], [str(m) for m in misses_of(found, "qkv")]
    assert matches_of(found, "qkv")[0].shapes["norm"] == fact
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def mean_square(x):
    return x.pow(2).mean(-1, keepdim=True)


def gemma(m, x, is_key):
    return x * torch.rsqrt(mean_square(x) + 1e-6) * (1.0 + m.weight)


SPELLINGS = {
    "by_rsqrt": (lambda m, x, _: x * torch.rsqrt(mean_square(x) + 1e-6) * m.weight, "rms"),
    "by_root": (lambda m, x, _: x / torch.sqrt(mean_square(x) + 1e-6) * m.weight, "rms"),
    "by_power": (lambda m, x, _: m.weight * (x * (mean_square(x) + 1e-6) ** -0.5), "rms"),
    "by_reciprocal": (
        lambda m, x, _: x * (1 / (x.square().mean(-1, True) + 1e-6).sqrt()) * m.weight,
        "rms",
    ),
    "by_sum": (
        lambda m, x, _: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / D + 1e-6) * m.weight,
        "rms",
    ),
    "fused": (lambda m, x, _: F.rms_norm(x, (D,), m.weight, 1e-6), "rms"),
    "bias": (lambda m, x, _: F.layer_norm(x, (D,), m.weight, m.other), "layer, bias"),
    "bias_apart": (lambda m, x, _: m.other + F.rms_norm(x, (D,), m.weight, 1e-6), "rms, bias"),
    "bias_by_head": (lambda m, x, _: F.layer_norm(x, (D,), m.weight) + m.by_head, "layer, bias"),
    "bias_by_row": (
        lambda m, x, _: F.layer_norm(x.flatten(1), (H * D,), m.row, m.row).view(-1, H, D),
        "layer, row, bias",
    ),
    "fused_offset": (lambda m, x, _: F.rms_norm(x, (D,), 1 + m.weight, 1e-6), "rms"),
    "fused_then_weight": (lambda m, x, _: F.rms_norm(x, (D,), None, 1e-6) * m.weight, "rms"),
    "weightless": (lambda m, x, _: F.rms_norm(x, (D,), eps=1e-6), "rms, weightless"),
    "gemma": (gemma, "rms"),
    "offset_of_one_half": (lambda m, x, _: F.rms_norm(x, (D,), eps=1e-6) * (m.weight + 0.5), "rms"),
    "by_head": (lambda m, x, _: F.rms_norm(x, (D,), eps=1e-6) * m.by_head, "rms"),
    "row": (
        lambda m, x, _: F.rms_norm(x.flatten(1), (H * D,), m.row, 1e-6).view(-1, H, D),
        "rms, row",
    ),
    "weight_by_row": (
        lambda m, x, _: (F.rms_norm(x, (D,), eps=1e-6).flatten(1) * m.row).view(-1, H, D),
        "rms",
    ),
    "heads_of_a_row": (
        lambda m, x, _: (
            m.row * (x * torch.rsqrt(mean_square(x) + 1e-6)).flatten(1) + m.by_head.view(-1)
        ).view(-1, H, D),
        "rms, bias",
    ),
    "layer": (lambda m, x, _: F.layer_norm(x, (D,), m.weight), "layer"),
    "layer_weightless": (lambda m, x, _: F.layer_norm(x, (D,)), "layer, weightless"),
    "layer_by_variance": (
        lambda m, x, _: (
            (x - x.mean(-1, keepdim=True))
            * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
            * m.by_head
        ),
        "layer",
    ),
    "layer_by_division": (
        lambda m, x, _: (
            (x - x.mean(-1, True)) / (mean_square(x - x.mean(-1, True)) + 1e-5).sqrt() * m.weight
        ),
        "layer",
    ),
    "layer_row": (
        lambda m, x, _: F.layer_norm(x.flatten(1), (H * D,), m.row).view(-1, H, D),
        "layer, row",
    ),
    "weight_of_q_counts_from_one": (
        lambda m, x, is_key: F.rms_norm(x, (D,), m.weight if is_key else 1 + m.other, 1e-6),
        "rms",
    ),
    "weight_of_k_alone": (
        lambda m, x, is_key: F.rms_norm(x, (D,), m.weight if is_key else None, 1e-6),
        "rms",
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_matched(name):
    assert_matched(*SPELLINGS[name])


def angles(width=D // 2):
    return torch.rand(T, 1, width, generator=torch.Generator().manual_seed(2)) * 6


@pytest.mark.parametrize(
    ("form", "weighted", "after"),
    all_pairs([ropes.half, ropes.interleaved, ropes.complex_numbers], [False, True], [False, True]),
)
def test_before_and_after_the_rotation(form, weighted, after):
    table = angles()
    cos, sin = table.cos(), table.sin()

    def norm(m, x, _):
        x = form(x, cos, sin) if after else x
        x = F.rms_norm(x, (D,), m.weight if weighted else None, 1e-6)
        return x if after else form(x, cos, sin)

    fact = ["rms", *(["after rope"] if after else []), *([] if weighted else ["weightless"])]
    assert_matched(norm, ", ".join(fact))


def test_a_weightless_norm_of_one_rotated_token():
    """Tests a weightless norm of one token that is rotated afterwards: `cos` has the shape of a
    norm's weight, but is not one."""
    table = angles()[:1]

    def norm(m, x, _):
        return ropes.half(F.rms_norm(x, (D,), eps=1e-6), table.cos(), table.sin())

    assert_matched(norm, "rms, weightless", tokens=1)


def test_norms_of_single_heads_are_one_norm_with_a_weight_by_head():
    table = angles()
    cos, sin = table.cos(), table.sin()

    def norm(m, x, _):
        pairs = zip(x.split(1, 1), m.by_head, strict=True)
        heads = [F.rms_norm(head, (D,), weight, 1e-6) for head, weight in pairs]
        return ropes.half(torch.cat(heads, 1), cos, sin)

    assert_matched(norm, "rms")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_default_epsilon_is_pytorch_s(dtype):
    """The heads are small, so that the epsilon decides the result."""

    class Small(Attention):
        def __init__(self):
            super().__init__(lambda m, x, _: F.rms_norm(x, (D,), m.weight))
            for weight in (self.q, self.k):
                weight.mul_(1e-3)

    model = Small().to(dtype)
    eager, ours = arguments(dtype), arguments(dtype)
    expected = model(*eager)
    actual = torch.compile(model, backend="tilewright", options={"inner": "eager"})(*ours)
    assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"]
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- what is no such norm -------------------------------------------------------------------------


def whole(x, by):
    return torch.div(x, by, rounding_mode="floor")


NEAR_MISSES = {
    "bias_by_token": (lambda m, x, _: F.rms_norm(x, (D,), m.weight, 1e-6) + m.by, "UNSUPPORTED"),
    "two_biases": (
        lambda m, x, _: F.layer_norm(x, (D,), m.weight, m.other) + m.by_head,
        "K_PATH",
    ),
    "over_heads": (
        lambda m, x, _: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6),
        "K_PATH",
    ),
    "over_tokens": (
        lambda m, x, _: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6),
        "K_PATH",
    ),
    "half_a_head": (
        lambda m, x, _: F.rms_norm(x.view(-1, 2 * H, D // 2), (D // 2,), eps=1e-6).view(-1, H, D),
        "NORM_WIDTH",
    ),
    "weight_by_row_and_token": (
        lambda m, x, _: (
            F.rms_norm(x, (D,), eps=1e-6).flatten(1) * m.by.repeat(1, 1, H)[:, 0]
        ).view(-1, H, D),
        "UNSUPPORTED",
    ),
    "half_a_head_of_a_row": (
        lambda m, x, _: (
            F.rms_norm(x.view(-1, 2 * H, D // 2), (D // 2,), eps=1e-6).flatten(1) * m.row
        ).view(-1, H, D),
        "NORM_WIDTH",
    ),
    "weight_by_token": (lambda m, x, _: F.rms_norm(x, (D,), eps=1e-6) * m.by, "UNSUPPORTED"),
    "corrected_variance": (
        lambda m, x, _: (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5),
        "K_PATH",
    ),
    "rounded_mean": (
        lambda m, x, _: x * torch.rsqrt(whole(x.pow(2).sum(-1, keepdim=True), D) + 1e-6),
        "K_PATH",
    ),
    "rounded_sum": (
        lambda m, x, _: x * torch.rsqrt(x.pow(2).sum(-1, True, dtype=torch.int64) / D + 1e-6),
        "K_PATH",
    ),
    "rounded_quotient": (lambda m, x, _: whole(x, (mean_square(x) + 1e-6).sqrt()), "K_PATH"),
    "rounded_reciprocal": (
        lambda m, x, _: x * whole(1, (mean_square(x) + 1e-6).sqrt()) * m.weight,
        "K_PATH",
    ),
    "another_s_variance": (
        lambda m, x, _: x * torch.rsqrt(mean_square(x * 2) + 1e-6) * m.weight,
        "K_PATH",
    ),
    "not_centred": (
        lambda m, x, _: x * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
        "K_PATH",
    ),
    "twice": (
        lambda m, x, _: F.rms_norm(F.rms_norm(x, (D,), eps=1e-6), (D,), eps=1e-6),
        "NORM_AFTER_ROPE",
    ),
    "another_kind_for_k": (
        lambda m, x, is_key: (F.layer_norm if is_key else F.rms_norm)(x, (D,), m.weight, eps=1e-5),
        "UNSUPPORTED",
    ),
    "k_alone_weightless": (
        lambda m, x, is_key: F.rms_norm(x, (D,), eps=1e-6) if is_key else x,
        "UNSUPPORTED",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_missed_by_name_and_still_right(name):
    norm, code = NEAR_MISSES[name]
    actual, expected = run(norm)
    found = reports()[-1]
    assert "qkv_cache" not in set(patterns_in(found, "qkv"))
    assert code in codes_of(found, "qkv"), [str(m) for m in misses_of(found, "qkv")]
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_a_weight_that_counts_from_one_needs_no_kernel_of_its_own():
    graph = lower(Attention(gemma), arguments()).graphs[0].after.graph
    (fused,) = [n for n in graph.nodes if "fused_qkv_paged" in str(n.target)]
    assert fused.kwargs["norm_offset"] == 1.0
    assert fused.kwargs["q_norm_weight"].op == "placeholder"
