"""Tests graphs that only look like a projection of heads. They have a named miss, and stay as they
were.

A step takes (layer, x, k_cache, v_cache, slots).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.found import misses_of, patterns_in
from tests.patterns.qkv.projecting import (
    HKV,
    HQ,
    PACKED,
    ROWS,
    D,
    K,
    Layer,
    T,
    compare,
    heads,
    make_args,
    rotate,
    write,
)
from tilewright.patterns.language import Stage

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- what only looks like it ----------------------------------------------------------------------


@dataclass(frozen=True)
class NearMiss:
    code: str
    stage: Stage
    culprit: str
    step: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: ROWS)
    args: Callable[[], tuple[Any, ...]] = make_args


def of_keys(change, **options):
    """Makes three linears, and applies `change` to the keys [T, Hkv, D]."""

    def step(m, x, k_cache, v_cache, slots):
        k = change(heads(F.linear(x, m.k)), m)
        write(k_cache, v_cache, slots, k, heads(F.linear(x, m.v)))
        return F.linear(x, m.q) * 2

    return step


def of_rows(change):
    """Makes three linears, and applies `change` to the keys [T, N]."""
    return of_keys(lambda k, m: heads(change(k.flatten(1), m)))


def square(**options):
    return lambda: make_args(heads=D, head_dim=D, **options)


SQUARE = {"q": (D * D, K), "k": (D * D, K), "v": (D * D, K)}


def keys_turned_over(m, x, k_cache, v_cache, slots):
    """Exchanges the last two dimensions of the keys. There are as many heads as each head has
    columns, so [T, D, H] has the shape of [T, H, D]."""
    k = F.linear(x, m.k).view(T, D, D).transpose(1, 2)
    write(k_cache, v_cache, slots, k, F.linear(x, m.v).view(T, D, D))
    return F.linear(x, m.q) * 2


def values_turned_over(m, x, k_cache, v_cache, slots):
    k, v = (F.linear(x, w).view(T, D, D) for w in (m.k, m.v))
    write(k_cache, v_cache, slots, k, v.mT)
    return F.linear(x, m.q) * 2


def query_rotated_across_heads(m, x, k_cache, v_cache, slots):
    q, k, v = (F.linear(x, w).view(T, D, D) for w in (m.q, m.k, m.v))
    write(k_cache, v_cache, slots, rotate(k), v)
    return rotate(q.transpose(1, 2)) * 2


def keys_tiled(m, x, k_cache, v_cache, slots):
    """Repeats heads in the order k0 k1 k0 k1. The copies of each head should be next to each
    other."""
    k, v = (heads(F.linear(x, w)).repeat(1, 2, 1) for w in (m.k, m.v))
    write(k_cache, v_cache, slots, k, v)
    return F.linear(x, m.q) * 2


def features_repeated(m, x, k_cache, v_cache, slots):
    """Has one number for each head, which is copied to all elements of the head."""
    k, v = (F.linear(x, w[:HKV])[..., None].expand(T, HKV, D) for w in (m.k, m.v))
    write(k_cache, v_cache, slots, k, v)
    return F.linear(x, m.q) * 2


def keys_repeated_values_not(m, x, k_cache, v_cache, slots):
    k = heads(F.linear(x, m.k)).repeat_interleave(2, 1)
    write(k_cache, v_cache, slots, k, heads(F.linear(x, m.q)))
    return F.linear(x, m.v) * 2


def tokens_repeated(m, x, k_cache, v_cache, slots):
    """Uses the keys of the first token for all tokens."""
    k = heads(F.linear(x, m.k))[:1].expand(T, HKV, D)
    write(k_cache, v_cache, slots, k, heads(F.linear(x, m.v)))
    return F.linear(x, m.q) * 2


def tokens_turned_around(m, x, k_cache, v_cache, slots):
    """Exchanges sequences and positions between the product and the cache."""
    k, v = (F.linear(x.view(2, 3, K), w).view(2, 3, HKV, D) for w in (m.k, m.v))
    k, v = (part.transpose(0, 1).reshape(T, HKV, D) for part in (k, v))
    write(k_cache, v_cache, slots, k, v)
    return F.linear(x, m.q) * 2


def query_over_keys(m, x, k_cache, v_cache, slots):
    """Rotates a query that contains a head of the keys' rows."""
    out = F.linear(x, m.w)
    k, v = heads(out[:, HQ * D : (HQ + HKV) * D]), heads(out[:, (HQ + HKV) * D :])
    write(k_cache, v_cache, slots, rotate(k), v)
    return rotate(heads(out[:, D : (HQ + 1) * D])) * 2


def plain_query_over_keys(m, x, k_cache, v_cache, slots):
    out = F.linear(x, m.w)
    k, v = heads(out[:, HQ * D : (HQ + HKV) * D]), heads(out[:, (HQ + HKV) * D :])
    write(k_cache, v_cache, slots, k, v)
    return out[:, D : (HQ + 1) * D] * 2


def packed_product_used_whole(m, x, k_cache, v_cache, slots):
    out = F.linear(x, m.w)
    q, k, v = out.split([HQ * D, HKV * D, HKV * D], -1)
    write(k_cache, v_cache, slots, heads(k), heads(v))
    return q * 2, out.norm()


def query_part_scaled_in_place(m, x, k_cache, v_cache, slots):
    q, k, v = F.linear(x, m.w).split([HQ * D, HKV * D, HKV * D], -1)
    write(k_cache, v_cache, slots, heads(k), heads(v))
    return q.mul_(2)


def query_by_a_table_that_changes(m, x, k_cache, v_cache, slots):
    """Scales the query by a table that is overwritten before the cache is written."""
    scale = x.sum(-1, keepdim=True)
    q = F.linear(x, m.q) * scale
    scale.zero_()
    write(k_cache, v_cache, slots, heads(F.linear(x, m.k)), heads(F.linear(x, m.v)))
    return q + scale


def clamps(k_clamp, v_clamp=lambda x: x):
    def step(m, x, k_cache, v_cache, slots):
        k, v = heads(k_clamp(F.linear(x, m.k))), heads(v_clamp(F.linear(x, m.v)))
        write(k_cache, v_cache, slots, k, v)
        return F.linear(x, m.q) * 2

    return step


def clamped_with_another_name(m, x, k_cache, v_cache, slots):
    """Clamps in place, because the tensor is also read by a name from before the clamp."""
    k = F.linear(x, m.k)
    name = k.view(-1)
    k.clamp_(-0.5, 0.5)
    write(k_cache, v_cache, slots, heads(k), heads(F.linear(x, m.v).clamp_(-0.5, 0.5)))
    return F.linear(x, m.q) * 2 + name[0]


def attend(q, k_cache, v_cache):
    keys, values = (c.view(-1, HKV, D).repeat_interleave(HQ // HKV, 1) for c in (k_cache, v_cache))
    scores = torch.einsum("thd,shd->hts", q, keys).softmax(-1)
    return torch.einsum("hts,shd->thd", scores, values)


def query_by_experts(rotary):
    """Computes as JetMoE does: queries come from experts, and a router reads the same
    activation."""

    def step(m, x, k_cache, v_cache, slots):
        k, v = heads(F.linear(x, m.k)), heads(F.linear(x, m.v))
        best = F.linear(x, m.router).argmax(-1)
        q = heads(torch.einsum("th,tnh->tn", x, m.experts[best]))
        if rotary:
            q, k = rotate(q), rotate(k)
        write(k_cache, v_cache, slots, k, v)
        return attend(q, k_cache, v_cache)

    return step


EXPERTS = ROWS | {"router": (2 * D, K), "experts": (2 * D, HQ * D, K)}


def two_linears_beside(m, x, k_cache, v_cache, slots):
    """Has two linears next to K and V, but no attention that would show which one is the query."""
    write(k_cache, v_cache, slots, heads(F.linear(x, m.k)), heads(F.linear(x, m.v)))
    return F.linear(x, m.q) * 2, F.linear(x, m.gate).sigmoid()


def weight_by_token(m, x, k_cache, v_cache, slots):
    """Every token has a separate weight."""
    k = torch.einsum("th,tndh->tnd", x, m.each)
    write(k_cache, v_cache, slots, k, heads(F.linear(x, m.v)))
    return F.linear(x, m.q) * 2


def residual_in_addmm(m, x, k_cache, v_cache, slots):
    """Adds a residual with addmm. There are as many tokens as features, so the added matrix has the
    length that a bias would have."""
    k = torch.addmm(m.added, x, m.k.t())
    write(k_cache, v_cache, slots, k[:, None], F.linear(x, m.v)[:, None])
    return F.linear(x, m.q) * 2


AT = torch.tensor([1, 0])  # an input of the graph
KP, VP, QP, G, H = Stage.K_PATH, Stage.V_PATH, Stage.Q_PATH, Stage.GUARDS, Stage.HAZARDS

MISSED = {
    "keys turned over": NearMiss(
        "LAYOUT", KP, "features in order", keys_turned_over, SQUARE, square()
    ),
    "values turned over": NearMiss(
        "LAYOUT", VP, "features in order", values_turned_over, SQUARE, square()
    ),
    "query rotated across heads": NearMiss(
        "Q_PATH", QP, "no query", query_rotated_across_heads, SQUARE, square()
    ),
    "heads in another order": NearMiss("K_PATH", KP, "index", of_keys(lambda k, m: k[:, [1, 0]])),
    "heads gathered": NearMiss(
        "K_PATH", KP, "index", of_keys(lambda k, m: k[:, torch.arange(HKV)])
    ),
    "heads at positions of a tensor": NearMiss(
        "K_PATH",
        KP,
        "at positions that a tensor gives. Hint: if the positions are constant, use a slice",
        of_keys(lambda k, m: k[:, AT]),
    ),
    "heads flipped": NearMiss("K_PATH", KP, "flip", of_keys(lambda k, m: k.flip(1))),
    "features rolled": NearMiss("K_PATH", KP, "roll", of_keys(lambda k, m: k.roll(1, -1))),
    "keys tiled": NearMiss(
        "LAYOUT", KP, "each head 2 times", keys_tiled, args=lambda: make_args(heads=2 * HKV)
    ),
    "features repeated": NearMiss("CACHE_LAYOUT", KP, "2 heads of 8", features_repeated),
    "keys repeated, values not": NearMiss(
        "UNSUPPORTED",
        G,
        "K's heads are written 2 times each, but V's heads 1 times",
        keys_repeated_values_not,
        args=lambda: make_args(heads=HQ),
    ),
    "tokens repeated": NearMiss("SLOT_INDEX", KP, "every token once", tokens_repeated),
    "tokens turned around": NearMiss("SLOT_INDEX", KP, "in order", tokens_turned_around),
    "query over keys": NearMiss("Q_PATH", QP, "no query", query_over_keys, PACKED),
    "plain query over keys": NearMiss(
        "ESCAPES", H, "features of another projection", plain_query_over_keys, PACKED
    ),
    "used whole": NearMiss("ESCAPES", H, "across its parts", packed_product_used_whole, PACKED),
    "query part in place": NearMiss(
        "INPUT_MUTATED",
        H,
        "changes a part of aten.linear[6, 64] in place",
        query_part_scaled_in_place,
        PACKED,
    ),
    "scale that changes": NearMiss("ORDER", H, "aten.mul", query_by_a_table_that_changes),
    "asymmetric clamp": NearMiss(
        "UNSUPPORTED", KP, "-0.5 .. 0.25", clamps(lambda x: x.clamp(-0.5, 0.25))
    ),
    "half a clamp": NearMiss("UNSUPPORTED", KP, "None .. 0.5", clamps(lambda x: x.clamp(max=0.5))),
    "two clamps": NearMiss(
        "UNSUPPORTED",
        KP,
        "use one clamp, from -c to c",
        clamps(lambda x: x.clamp(-1, 1).clamp(-0.5, 0.5)),
    ),
    "keys clamped alone": NearMiss(
        "UNSUPPORTED",
        G,
        "V to nothing. Hint: clamp q, k and v alike",
        clamps(lambda x: x.clamp(-0.5, 0.5)),
    ),
    "clamp by a tensor": NearMiss(
        "UNSUPPORTED",
        KP,
        "clamped to aten.neg[1, 16] .. aten.abs",
        clamps(lambda x: x.clamp(-x[:1].abs(), x[:1].abs())),
    ),
    "clamp from one side": NearMiss(
        "K_PATH",
        KP,
        "aten.clamp_max[6, 16]. Hint: use one clamp",
        clamps(lambda x: x.clamp_max(0.5)),
    ),
    "clamp in place": NearMiss(
        "UNSUPPORTED", KP, "instead of clamp_", clamped_with_another_name, ROWS
    ),
    "bias behind a clamp": NearMiss(
        "K_PATH",
        KP,
        "aten.add",
        of_rows(lambda k, m: k.clamp(-0.5, 0.5) + m.b),
        ROWS | {"b": (HKV * D,)},
    ),
    "bias twice": NearMiss(
        "K_PATH", KP, "aten.add", of_rows(lambda k, m: k + m.b + m.b), ROWS | {"b": (HKV * D,)}
    ),
    "bias by token": NearMiss(
        "K_PATH", KP, "aten.add", of_rows(lambda k, m: k + m.b[:, None]), ROWS | {"b": (T,)}
    ),
    "scaled by a tensor": NearMiss(
        "K_PATH", KP, "aten.mul", of_rows(lambda k, m: k * m.b), ROWS | {"b": (HKV * D,)}
    ),
    "scaled to nothing": NearMiss("K_PATH", KP, "aten.mul", of_keys(lambda k, m: k * 0.0)),
    "scaled to less than fp32 has": NearMiss(
        "UNSUPPORTED", G, "the factor 1e-46", of_keys(lambda k, m: k * 1e-46)
    ),
    "divided by less than fp32 has": NearMiss(
        "UNSUPPORTED", G, "the factor inf", of_keys(lambda k, m: k / 1e-320)
    ),
    "scaled to less than float32 has": NearMiss(
        "UNSUPPORTED", Stage.GUARDS, "1e-60", of_keys(lambda k, m: (k * 1e-30) * 1e-30)
    ),
    "scaled to more than float32 has": NearMiss(
        "UNSUPPORTED", Stage.GUARDS, "1e+60", of_keys(lambda k, m: (k * 1e30) * 1e30)
    ),
    "dropout": NearMiss(
        "K_PATH", KP, "dropout", of_keys(lambda k, m: F.dropout(k, 0.5, training=True))
    ),
    "experts": NearMiss("Q_PATH", QP, "no query", query_by_experts(False), EXPERTS),
    "experts, rotated": NearMiss("Q_PATH", QP, "no query", query_by_experts(True), EXPERTS),
    "two linears beside": NearMiss(
        "Q_PATH", QP, "2 candidates", two_linears_beside, ROWS | {"gate": (HQ * D, K)}
    ),
    "weight by token": NearMiss(
        "K_PATH", KP, "einsum", weight_by_token, ROWS | {"each": (T, HKV, D, K)}
    ),
    "residual in addmm": NearMiss(
        "K_PATH",
        KP,
        "aten.linear",
        residual_in_addmm,
        {"q": (12, K), "k": (6, K), "v": (6, K), "added": (T, 6)},
        lambda: make_args(heads=1, head_dim=6),
    ),
}


@pytest.mark.parametrize("name", MISSED)
def test_near_miss_is_named_and_changes_nothing(name):
    near = MISSED[name]
    report = compare(Layer(near.step, **near.shapes), near.args(), exactly=True)
    assert "qkv_cache" not in patterns_in(report, "qkv")
    found = [m for m in misses_of(report, "qkv") if m.code == near.code]
    assert found, [str(m) for m in misses_of(report, "qkv")]
    assert found[0].stage == near.stage
    assert near.culprit in str(found[0])
    assert set(patterns_in(report, "qkv")) <= {"cache_store"}


def _normed(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("turned", [False, True])
def test_a_norm_weight_goes_by_the_projection_s_heads(turned):
    """The weights of a norm belong to the heads of the projection. If heads are transposed before
    the norm, each head gets the weight of another head."""

    def step(m, x, k_cache, v_cache, slots):
        q, k, v = (heads(F.linear(x, w)) for w in (m.q, m.k, m.v))
        k = k.view(T, 2, 2, D)
        k = _normed(k.transpose(1, 2) if turned else k, m.norm)
        k = (k.transpose(1, 2) if turned else k).reshape(T, 4, D)
        write(k_cache, v_cache, slots, k, v)
        return _normed(q, m.own) + 0

    shapes = {"q": (4 * D, K), "k": (4 * D, K), "v": (4 * D, K), "norm": (2, 2, D), "own": (D,)}
    report = compare(Layer(step, **shapes), make_args(heads=4), exactly=False)
    expected = "cache_store" if turned else "qkv_cache"
    assert patterns_in(report, "qkv") == [expected]


@pytest.mark.parametrize("scale", [0, 1e-46, 1e39])
def test_what_fp32_has_as_zero_or_infinite_is_no_scale(scale):
    def step(m, x, k_cache, v_cache, slots):
        q, k, v = (heads(F.linear(x, w)) for w in (m.q, m.k, m.v))
        write(k_cache, v_cache, slots, (k * scale).to(k_cache.dtype), (v * 0).to(v_cache.dtype))
        return q + 0

    x, *caches, slots = make_args()
    args = (x, *(cache.to(torch.float8_e4m3fn) for cache in caches), slots)
    layer = Layer(step, q=(4 * D, K), k=(2 * D, K), v=(2 * D, K))
    eager, ours = ([a.clone() for a in args] for _ in range(2))
    layer(*eager)
    torch.compile(layer, backend="tilewright", options={"inner": "eager"})(*ours)
    for a, b in zip(eager, ours, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_tokens_that_change_places_on_their_way_are_all_written():
    """Tokens that are written in two pieces are all written. Pieces that are joined along the
    tokens are two writes of one store."""

    def step(m, x, k_cache, v_cache, slots):
        k, v = (heads(F.linear(x, w)) for w in (m.k, m.v))
        k_cache.copy_(torch.cat((k[T // 2 :], k[: T // 2])))
        v_cache.copy_(torch.cat((v[T // 2 :], v[: T // 2])))
        return k + 0

    x, *caches, slots = make_args()
    args = (x, *(cache.flatten(0, 1)[:T] for cache in caches), slots)
    report = compare(Layer(step, **ROWS), args, exactly=True)
    assert patterns_in(report, "qkv") == []
