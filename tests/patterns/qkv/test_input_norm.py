"""Tests the norm in front of the projections.

The norm is a part of `qkv_cache` if there are few tokens and no other node reads its result.
Otherwise it stays in the graph, and the site is fused without the norm.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import assert_no_worse, cloned, upcast
from tests.found import matches_of, misses_of
from tests.patterns.qkv.projecting import HKV, HQ, PACKED, D, K, Layer, N, heads, make_args, write
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPES = {**PACKED, "n": (K,), "b": (K,)}
FEW = 6


@pytest.fixture(autouse=True)
def six_tokens_are_few(monkeypatch):
    """Treats six tokens as few. The kernels exist only for a single token, but six tokens have more
    numbers that can differ."""
    monkeypatch.setattr("tilewright.codegen.qkv.plan.MOST_NORMED_TOKENS", FEW)


WIDTHS = [HQ * D, HKV * D, HKV * D]


def hf_norm(m, x):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return m.n * wide.to(x.dtype)


def gemma_norm(m, x):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (wide * (1.0 + m.n.float())).to(x.dtype)


def own_norm(m, x):
    return F.rms_norm(x, (K,), m.n, 1e-5)


def weightless_norm(m, x):
    return F.rms_norm(x, (K,), eps=1e-5)


def layer_norm(m, x):
    return F.layer_norm(x, (K,), m.n, m.b)


def layer_norm_by_hand(m, x):
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (m.n.float() * ((wide - mean) * torch.rsqrt(variance + 1e-5))).to(x.dtype)


def bare_layer_norm(m, x):
    return F.layer_norm(x.float(), (K,), eps=1e-5).to(x.dtype)


def layer_norm_in_two_parts(m, x):
    """Normalises in two parts, each with half of the columns."""
    return F.layer_norm(x.unflatten(-1, (2, K // 2)), (2, K // 2)).flatten(-2)


def norm_in_place(m, x):
    wide = x.float()
    wide *= torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return m.n * wide.to(x.dtype)


def step_of(norm, weight=lambda m: m.w, head_norm=lambda h: h, also=lambda m, x, normed: 0):
    """Makes a step that consists of a norm, one product and a write. `also` comes between the norm
    and the write."""

    def step(m, x, k_cache, v_cache, slots):
        normed = norm(m, x)
        q, k, v = map(heads, F.linear(normed, weight(m)).split(WIDTHS, -1))
        q, k = head_norm(q), head_norm(k)
        more = also(m, x, normed)
        write(k_cache, v_cache, slots, k, v)
        return q.flatten(1) * 2 + more

    return step


def case_of(step, dtype=torch.bfloat16, tokens=6, **shapes):
    layer = Layer(step, **SHAPES, **shapes)
    layer.codes = torch.randint(-127, 128, (N, K), dtype=torch.int8)
    args = [a.to(dtype) if a.is_floating_point() else a for a in make_args(tokens=6)]
    if tokens != 6:
        args[0] = args[0].new_ones(tokens, K).cumsum(0)
        args[-1] = torch.arange(tokens)
    return layer.to(dtype), args


def site_of(step, dtype=torch.bfloat16, dynamic=False, **options):
    """Returns the report of a site, after a check that its result is no less accurate than
    eager's."""
    layer, args = case_of(step, dtype, **options)
    eager, ours, exact = cloned(args), cloned(args), [upcast(a) for a in args]
    expected, reference = layer(*eager), upcast(layer)(*exact)
    if dynamic:
        for tensor in (ours[0], ours[-1]):
            torch._dynamo.mark_dynamic(tensor, 0)
    compiled = torch.compile(layer, backend="tilewright", options={"inner": "eager"})
    assert_no_worse(compiled(*ours), expected, reference, "output")
    for one, other, third in zip(ours, eager, exact, strict=True):
        if one.is_floating_point():
            assert_no_worse(one, other, third, "argument")
    (site,) = matches_of(reports()[-1], "qkv")
    assert site.pattern == "qkv_cache"
    assert misses_of(reports()[-1], "qkv") == []
    return site.shapes


@pytest.mark.parametrize("norm", [hf_norm, gemma_norm, own_norm, weightless_norm, norm_in_place])
def test_a_norm_that_nobody_else_reads_is_part_of_it(norm):
    assert site_of(step_of(norm))["input_norm"] == "rms"


@pytest.mark.parametrize("norm", [layer_norm, layer_norm_by_hand, bare_layer_norm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer_norm_is_part_of_it_too(norm, dtype):
    """A layer norm is a part of the site, too. In float16, too, its result is rounded before the
    product."""
    assert site_of(step_of(norm), dtype)["input_norm"] == "layer"


def test_a_layer_norm_of_rows_longer_than_registers_hold_stays(monkeypatch):
    monkeypatch.setattr("tilewright.codegen.row_norm.MOST_LAYER_COLUMNS", K - 1)
    assert "input_norm" not in site_of(step_of(layer_norm))
    assert site_of(step_of(own_norm))["input_norm"] == "rms"


def test_as_many_tokens_as_one_tile_has():
    layer, args = case_of(step_of(hf_norm), tokens=FEW)
    (site,) = matches_of(lower(layer, args), "qkv")
    assert site.shapes["input_norm"] == "rms"


def three_products(m, x, k_cache, v_cache, slots):
    normed = hf_norm(m, x)
    q, k, v = (heads(F.linear(normed, w)) for w in m.w.split(WIDTHS))
    write(k_cache, v_cache, slots, F.rms_norm(k, (D,)), v)
    return F.rms_norm(q, (D,)) * 2


def the_cast_is_read(m, x, k_cache, v_cache, slots):
    """Reads the cast of the norm, too, so this part of the norm stays in the graph."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    q, k, v = map(heads, F.linear(m.n * normed.to(x.dtype), m.w).split(WIDTHS, -1))
    write(k_cache, v_cache, slots, k, v)
    return q * 2 + wide.sum().to(x.dtype)


def by_batch(m, x, k_cache, v_cache, slots):
    """Has dense rows in another order."""
    normed = hf_norm(m, x.view(2, 3, K).transpose(0, 1))
    q, k, v = (h.flatten(0, 1) for h in map(heads, F.linear(normed, m.w).split(WIDTHS, -1)))
    write(k_cache, v_cache, slots, k, v)
    return q * 2


@pytest.mark.parametrize(
    "step", [three_products, the_cast_is_read, by_batch], ids=lambda s: s.__name__
)
def test_what_else_there_is_about_it(step):
    assert site_of(step)["input_norm"] == "rms"


def by_column(m, x):
    """Has rows that are not dense, so no kernel loads them."""
    return own_norm(m, x.view(K, -1).t())


STAYS = {
    "read by another": step_of(hf_norm, also=lambda m, x, normed: F.linear(normed, m.w[: HQ * D])),
    "over two dimensions": step_of(layer_norm_in_two_parts),
    "its bias changes": step_of(layer_norm, also=lambda m, x, normed: m.b.mul_(1).sum()),
    "a layer norm read by another": step_of(
        layer_norm, also=lambda m, x, normed: F.linear(normed, m.w[: HQ * D])
    ),
    "layer norm before codes": step_of(
        layer_norm, weight=lambda m: m.codes.to(m.n.dtype) * m.scale
    ),
    "by column": step_of(by_column),
    "x changes": step_of(hf_norm, also=lambda m, x, normed: x.mul_(2).sum()),
    "its weight changes": step_of(hf_norm, also=lambda m, x, normed: m.n.mul_(1).sum()),
    "codes": step_of(hf_norm, weight=lambda m: m.codes.to(m.n.dtype) * m.scale),
    "norm of rows": step_of(
        hf_norm, head_norm=lambda h: F.rms_norm(h.flatten(1), (h.shape[1] * D,)).view(h.shape)
    ),
    "no norm": step_of(lambda m, x: x),
}


@pytest.mark.parametrize("name", STAYS)
def test_another_norm_stays_in_the_graph(name):
    assert "input_norm" not in site_of(STAYS[name], scale=(N, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_numbers_that_are_not_normed_yet_want_bfloat16_s_range(dtype):
    assert "input_norm" not in site_of(step_of(hf_norm), dtype)


def test_for_many_tokens_a_norm_stays_by_itself():
    assert "input_norm" not in site_of(step_of(hf_norm), dynamic=True)
    torch._dynamo.reset()
    layer, args = case_of(step_of(hf_norm), tokens=FEW + 1)
    (site,) = matches_of(lower(layer, args), "qkv")
    assert "input_norm" not in site.shapes


def test_the_write_alone_leaves_the_norm_where_it_is():
    """If only the write is fused, the norm stays in its place. Here another node reads the
    normalised keys, so the projection stays in the graph."""

    def step(m, x, k_cache, v_cache, slots):
        q, k, v = map(heads, F.linear(hf_norm(m, x), m.w).split(WIDTHS, -1))
        write(k_cache, v_cache, slots, k, v)
        return q * 2, k + v

    layer, args = case_of(step)
    (site,) = matches_of(lower(layer, args), "qkv")
    assert site.pattern == "cache_store"
