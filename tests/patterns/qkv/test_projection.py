"""Tests projections as real code writes them: every projection is matched, and gives eager's
results.

A step takes (layer, x, k_cache, v_cache, slots). All steps run in float32, so that a wrong row
shows.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import flat
from tests.found import misses_of, patterns_in
from tests.patterns.qkv.projecting import (
    BY_HEAD,
    HKV,
    HQ,
    PACKED,
    ROWS,
    D,
    K,
    Layer,
    T,
    clipped,
    compare,
    heads,
    make_args,
    nodes_after,
    rotate,
    site_arguments,
    write,
)
from tilewright.compiler import reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- what matches -------------------------------------------------------------------------------


def packed(order):
    """Makes one packed product without rotation. `order` gives the order of q, k and v in it."""
    widths = {"q": HQ * D, "k": HKV * D, "v": HKV * D}

    def step(m, x, k_cache, v_cache, slots):
        parts = F.linear(x, m.w).split([widths[name] for name in order], -1)
        q, k, v = (heads(parts[order.index(name)]) for name in "qkv")
        write(k_cache, v_cache, slots, k, v)
        return q * 2

    return step


def interleaved(order, rotary=False):
    """Makes [heads, (q, k, v), D] in some order. `q` may be two heads wide."""

    def step(m, x, k_cache, v_cache, slots):
        by_head = F.linear(x, m.w).view(T, HKV, len(order), D)
        q = by_head[:, :, [i for i, name in enumerate(order) if name == "q"]].flatten(1, 2)
        k, v = by_head[:, :, order.index("k")], by_head[:, :, order.index("v")]
        if rotary:
            q, k = rotate(q), rotate(k)
        write(k_cache, v_cache, slots, k, v)
        return q * 2

    return step


def two_keys_around_a_query(m, x, k_cache, v_cache, slots):
    """Has the order [k0 q0 q1 k1]. Here, blocks of three heads would reach past the end of the
    weight."""
    part = F.linear(x, m.w).view(T, 4, D)
    v = heads(F.linear(x, m.v))
    write(k_cache, v_cache, slots, rotate(part[:, ::3]), v)
    return rotate(part[:, [1, 2]]) * 2


def pairs_behind_an_odd_query(m, x, k_cache, v_cache, slots):
    """Has the order [q q q (k v) (k v)]: three query heads, and then keys and values that
    alternate."""
    all_heads = F.linear(x, m.w).view(T, 7, D)
    q, kv = all_heads[:, :2], all_heads[:, 3:].unflatten(1, (2, 2))
    k, v = rotate(kv[:, :, 0]), kv[:, :, 1]
    write(k_cache, v_cache, slots, k, v)
    return rotate(q) * 2


def einsum_that_turns_the_weight(m, x, k_cache, v_cache, slots):
    """Reads the weight [D, H, K] in transposed order. There are as many heads as each head has
    columns."""
    q, k, v = (torch.einsum("th,dnh->tnd", x, w) for w in (m.q, m.k, m.v))
    write(k_cache, v_cache, slots, k, v)
    return q * 2


def weight_on_the_left(m, x, k_cache, v_cache, slots):
    q, k, v = (heads((w @ x.t()).t()) for w in (m.q, m.k, m.v))
    write(k_cache, v_cache, slots, k, v)
    return q * 2


def heads_first_einsum(m, x, k_cache, v_cache, slots):
    q, k, v = (torch.einsum("th,ndh->ntd", x, w) for w in (m.q, m.k, m.v))
    write(k_cache, v_cache, slots, k.transpose(0, 1), v.transpose(0, 1))
    return q * 2


def einsum_of_a_sequence(m, x, k_cache, v_cache, slots):
    batch = x.view(2, T // 2, K)
    q, k, v = (torch.einsum("bsh,ndh->bnsd", batch, w) for w in (m.q, m.k, m.v))
    k, v = (part.transpose(1, 2).reshape(T, HKV, D) for part in (k, v))
    write(k_cache, v_cache, slots, k, v)
    return q * 2


def einsum_without_an_arrow(m, x, k_cache, v_cache, slots):
    """Calls einsum without an arrow. It then sums over a, and orders the other letters by name: n,
    x, y."""
    parts = [torch.einsum("na,axy", x, w.permute(2, 0, 1)) for w in (m.q, m.k, m.v)]
    write(k_cache, v_cache, slots, *parts[1:])
    return parts[0] * 2


def einsum_over_two(m, x, k_cache, v_cache, slots):
    apart = x.view(T, 4, K // 4)
    parts = [
        torch.einsum("tab,ndab->tnd", apart, w.unflatten(-1, (4, K // 4))) for w in (m.q, m.k, m.v)
    ]
    write(k_cache, v_cache, slots, *parts[1:])
    return parts[0] * 2


def bias_for_every_head(m, x, k_cache, v_cache, slots):
    """Has one bias [D] for all heads, and a further number for each head."""
    q, k, v = (torch.einsum("th,ndh->tnd", x, w) for w in (m.q, m.k, m.v))
    write(k_cache, v_cache, slots, k + m.b, m.b[:HKV, None] + v)
    return (q + m.b) * 2


def query_in_pieces(m, x, k_cache, v_cache, slots):
    """Has a packed product whose query is read by different nodes in several ways."""
    out = F.linear(x, m.w)
    q, k, v = out.split([HQ * D, HKV * D, HKV * D], -1)
    write(k_cache, v_cache, slots, heads(k), heads(v))
    first, rest = heads(q).split([3, D - 3], -1)
    return first.sum((1, 2)), rest.transpose(0, 1), q[1:3], out[-1, : HQ * D], heads(q)[:, ::2]


def query_kept_for_the_next_layer(m, x, k_cache, v_cache, slots):
    """Uses the rest of a packed product as the activation of the next layer."""
    q = packed("qkv")(m, x, k_cache, v_cache, slots)
    return packed("qkv")(m, (q / 2).flatten(1), k_cache, v_cache, slots + 1)


def next_layer_reads_the_query_itself(m, x, k_cache, v_cache, slots):
    q, k, v = F.linear(x, m.w).split([HQ * D, HKV * D, HKV * D], -1)
    write(k_cache, v_cache, slots, heads(k), heads(v))
    q, k, v = F.linear(q, m.w).split([HQ * D, HKV * D, HKV * D], -1)
    write(k_cache, v_cache, slots + 1, heads(k), heads(v))
    return q * 2


def gated(m, x, k_cache, v_cache, slots):
    """Has a gate of the same activation that is as wide as the query. Only the query attends to the
    cache."""
    write(k_cache, v_cache, slots, heads(F.linear(x, m.k)), heads(F.linear(x, m.v)))
    gate, q = F.linear(x, m.gate), heads(F.linear(x, m.q))
    keys, values = (c.view(-1, HKV, D).repeat_interleave(2, 1) for c in (k_cache, v_cache))
    scores = torch.einsum("thd,shd->hts", q, keys).softmax(-1)
    return torch.einsum("hts,shd->thd", scores, values).flatten(1) * gate.sigmoid()


def query_scaled_before_the_write(m, x, k_cache, v_cache, slots):
    q = (heads(F.linear(x, m.q)) * 0.5).float()
    write(k_cache, v_cache, slots, heads(F.linear(x, m.k)), heads(F.linear(x, m.v)))
    return q.sum()


MATCHED = {
    "q k v": (packed("qkv"), PACKED),
    "k v q": (packed("kvq"), PACKED),
    "v q k": (packed("vqk"), PACKED),
    "k q v of each head": (interleaved("kqv"), {"w": (HKV * 3 * D, K)}),
    "v q q k of each head": (interleaved("vqqk"), {"w": (HKV * 4 * D, K)}),
    "q q k v of each head, rotated": (interleaved("qqkv", True), {"w": (HKV * 4 * D, K)}),
    "k v q q of each head, rotated": (interleaved("kvqq", True), {"w": (HKV * 4 * D, K)}),
    "k0 q0 q1 k1": (two_keys_around_a_query, {"w": (4 * D, K), "v": (HKV * D, K)}),
    "q q _ (k v) (k v)": (pairs_behind_an_odd_query, {"w": (7 * D, K)}),
    "weight on the left": (weight_on_the_left, ROWS),
    "heads first": (heads_first_einsum, BY_HEAD),
    "sequences": (einsum_of_a_sequence, BY_HEAD),
    "no arrow": (einsum_without_an_arrow, BY_HEAD),
    "two summed": (einsum_over_two, BY_HEAD),
    "bias for every head": (bias_for_every_head, BY_HEAD | {"b": (D,)}),
    "query in pieces": (query_in_pieces, PACKED),
    "gated": (gated, ROWS | {"gate": (HQ * D, K)}),
    "scaled before the write": (query_scaled_before_the_write, ROWS),
    "clip": (clipped(lambda x: torch.clip(x, -0.5, 0.5)), ROWS),
    "clip by keyword": (clipped(lambda x: torch.clip(x, min=-0.5, max=0.5)), ROWS),
    "clamp in place": (clipped(lambda x: x.clamp_(-0.5, 0.5)), ROWS),
    "hardtanh": (clipped(lambda x: F.hardtanh(x, -0.5, 0.5)), ROWS),
}


@pytest.mark.parametrize("name", MATCHED)
def test_matched_and_right(name):
    step, shapes = MATCHED[name]
    report = compare(Layer(step, **shapes), make_args(), exactly=False)
    assert patterns_in(report, "qkv") == ["qkv_cache"], [str(m) for m in misses_of(report, "qkv")]
    assert misses_of(report, "qkv") == []


def test_a_weight_of_another_order_is_not_taken_for_the_usual_one():
    """A weight in another order must not be taken for one in the usual order. It is square, so its
    shape does not show the order."""
    shapes = dict.fromkeys("qkv", (D, D, K))
    args = make_args(heads=D, head_dim=D)
    report = compare(Layer(einsum_that_turns_the_weight, **shapes), args, exactly=False)
    assert patterns_in(report, "qkv") == ["qkv_cache"]


@pytest.mark.parametrize("step", [query_kept_for_the_next_layer, next_layer_reads_the_query_itself])
def test_one_site_reads_what_another_left(step):
    report = compare(Layer(step, **PACKED), make_args(), exactly=False)
    assert patterns_in(report, "qkv") == ["qkv_cache"] * 2, misses_of(report, "qkv")


def test_a_packed_product_disappears():
    nodes = nodes_after(Layer(packed("qkv"), **PACKED), make_args())
    assert not [n for n in nodes if "linear" in str(n.target) or "split" in str(n.target)]


def test_joined_weights_are_handed_over_apart():
    """If the graph joins three weights, the op gets them separately, and the rewritten graph no
    longer joins them in every call."""

    def step(m, x, k_cache, v_cache, slots):
        weight, bias = torch.cat((m.q, m.k, m.v)), torch.cat((m.qb, m.kb, m.vb))
        q, k, v = F.linear(x, weight, bias).split([HQ * D, HKV * D, HKV * D], -1)
        write(k_cache, v_cache, slots, heads(k), heads(v))
        return q * 2

    biases = {"qb": (HQ * D,), "kb": (HKV * D,), "vb": (HKV * D,)}
    layer = Layer(step, **ROWS, **biases)
    assert patterns_in(compare(layer, make_args(), False), "qkv") == ["qkv_cache"]
    torch._dynamo.reset()
    assert not [n for n in nodes_after(layer, make_args()) if "cat" in str(n.target)]


def test_grouped_heads_and_repeated_ones_are_said_to_the_op():
    def step(m, x, k_cache, v_cache, slots):
        fused = F.linear(x, m.w).view(T, HKV, 4, D)
        q, k, v = fused[:, :, :-2], fused[:, :, [-2]], fused[:, :, [-1]]
        k, v = (torch.broadcast_to(part, q.shape) for part in (k, v))
        q, k, v = (part.flatten(1, 2) for part in (q, k, v))
        write(k_cache, v_cache, slots, k, v)
        return q * 2

    layer, args = Layer(step, w=(HKV * 4 * D, K)), make_args(heads=2 * HKV)
    assert patterns_in(compare(layer, args, False), "qkv") == ["qkv_cache"]
    torch._dynamo.reset()
    given = site_arguments(layer, args)
    assert given["kv_repeat"] == 2
    assert given["q_weight"].shape == (HKV, 2, D, K)
    assert given["k_weight"].shape == (HKV, D, K)


def test_a_clamp_is_said_to_the_op():
    layer = Layer(clipped(lambda x: x.clamp(-0.5, 0.5)), **ROWS)
    assert site_arguments(layer, make_args())["clip"] == 0.5


def test_a_token_count_that_changes():
    layer = Layer(query_in_pieces, **PACKED)
    compiled = torch.compile(layer, backend="tilewright", options={"inner": "eager"}, dynamic=True)
    for tokens in (T, 4):
        args = make_args(tokens=tokens)
        ours = [a.clone() for a in args]
        expected, actual = layer(*args), compiled(*ours)
        for a, b in zip(flat([actual, ours]), flat([expected, args]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"]
