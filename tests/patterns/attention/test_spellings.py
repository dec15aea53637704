"""Tests the pattern `cache_attention`: attention in any spelling becomes one op that reads each key
once, and is no less accurate than eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.found import codes_of, matches_of, misses_of
from tests.patterns.attention.plain_attention import (
    BATCH,
    GROUP,
    HEADS,
    HIDDEN,
    KV_HEADS,
    QUERIES,
    WIDTH,
    counted,
    inputs,
    logits_of,
    merged,
    repeat_kv,
    run,
    sdpa,
    site_of,
    weighted,
)


def by_hand(q, k, v, mask, *_):
    return sdpa(q, k, v, attn_mask=mask)


def shared(q, k, v, mask, *_):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def interleaved(q, k, v, mask, *_):
    k, v = (x.repeat_interleave(GROUP, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def keys_of_pairs(q, k, v, mask, *_):
    """Has the numbers of a key along two axes, as after a rotation of adjacent pairs."""
    even, odd = k.unflatten(-1, (-1, 2)).unbind(-1)
    k = torch.stack([even - odd, even + odd], -1).flatten(-2)
    return sdpa(q, k, v, attn_mask=mask)


def numbers_added(q, k, v, mask, *_):
    return weighted(logits_of(q, k) + torch.where(mask, 0.0, -3e38).to(q.dtype), v)


def masked_fill(q, k, v, mask, *_):
    return weighted(logits_of(q, k).masked_fill(~mask, HIDDEN), v)


def hidden_filled(q, k, v, mask, *_):
    hidden = mask.logical_not().clone()
    return weighted(logits_of(q, k).masked_fill(hidden | (hidden & mask), HIDDEN), v)


def biased_and_hidden(q, k, v, mask, *_):
    bias = torch.arange(k.shape[2], dtype=q.dtype) * 0.1
    return weighted((logits_of(q, k) + bias).masked_fill(~mask, HIDDEN), v)


def einsum(q, k, v, mask, *_):
    logits = torch.einsum("bhsd,bhkd->bhsk", q, repeat_kv(k)) * 0.3
    weights = logits.masked_fill(~mask, HIDDEN).softmax(-1)
    return torch.einsum("bhsk,bhkd->bshd", weights, repeat_kv(v))


def one_sequence(q, k, v, mask, *_):
    return F.scaled_dot_product_attention(q[0], repeat_kv(k)[0], repeat_kv(v)[0], attn_mask=mask[0])


def capped(q, k, v, mask, *_):
    logits = torch.tanh(logits_of(q, k) / 2.0) * 2.0
    return weighted(logits.masked_fill(~mask, HIDDEN), v)


def capped_by_products(q, k, v, mask, *_):
    logits = 2.0 * torch.tanh(logits_of(q, k) * 0.5)
    return weighted(logits.masked_fill(~mask, HIDDEN), v)


def with_sinks(q, k, v, mask, _, __, sinks):
    logits = logits_of(q, k) + torch.where(mask, 0.0, HIDDEN).to(q.dtype)
    extra = sinks.reshape(1, -1, 1, 1).expand(BATCH, -1, q.shape[2], -1)
    joined = torch.cat([logits, extra], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return joined.softmax(-1)[..., :-1] @ repeat_kv(v)


def with_sinks_of_groups(q, k, v, mask, _, __, sinks):
    """Has query heads in two dimensions: the key head, and the heads that share it. There is no
    dimension for sequences (gpt-oss)."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    q = q.unflatten(1, (-1, GROUP))
    k, v = (x[:, :, None].expand(-1, -1, GROUP, -1) for x in (k, v))
    extra = sinks.reshape(KV_HEADS, GROUP, 1, 1).expand(-1, -1, q.shape[0], -1)
    logits = torch.einsum("qhmd,khmd->hmqk", q, k)
    logits *= 0.3
    logits += torch.where(mask, 0.0, HIDDEN).to(q.dtype)[0]
    weights = torch.softmax(torch.cat([logits, extra], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("hmqk,khmd->qhmd", weights, v).reshape(q.shape[0], -1)


def with_sinks_of_one_sequence(q, k, v, mask, _, __, sinks):
    logits = (q[0] @ repeat_kv(k)[0].mT * 0.3).masked_fill(~mask[0], HIDDEN)
    extra = sinks[:, None, None].expand(-1, q.shape[2], -1)
    return torch.cat([logits, extra], -1).softmax(-1)[..., :-1] @ repeat_kv(v)[0]


# The attentions below do not scale their logits.


def weights_of(logits, mask, v):
    return logits.masked_fill(~mask, HIDDEN).softmax(-1, dtype=torch.float32).to(v.dtype)


def divided(q, k, v, mask, *_):
    root = torch.full([], WIDTH**0.5, dtype=q.dtype)
    return weights_of(q @ repeat_kv(k).mT / root, mask, v) @ repeat_kv(v)


def scaled_before(q, k, v, mask, *_):
    logits = (q * 0.5) @ (repeat_kv(k) * 0.5).mT
    return weights_of(logits, mask, v) @ repeat_kv(v)


def single_precision(q, k, v, mask, *_):
    logits = logits_of(q.float(), k.float()).masked_fill(~mask, HIDDEN)
    return (logits.softmax(-1) @ repeat_kv(v).float()).transpose(1, 2).to(q.dtype)


def in_place(q, k, v, mask, *_):
    logits = q @ repeat_kv(k).mT
    logits *= 0.3
    logits += torch.where(mask, 0.0, HIDDEN).to(q.dtype)
    return weighted(logits, v)


def in_place_by_item(q, k, v, mask, *_):
    """Adds to the logits with `logits[...] += x`, which ends in a write of the logits to
    themselves."""
    logits = logits_of(q, k)
    logits[:, :, :, -k.shape[2] :] += torch.where(mask, 0.0, -3e38).to(q.dtype)
    return weighted(logits, v)


def where(q, k, v, mask, *_):
    hidden = torch.tensor(HIDDEN, dtype=q.dtype)
    return weighted(torch.where(mask, logits_of(q, k), hidden), v)


def where_hidden(q, k, v, mask, *_):
    return weighted(torch.where(~mask, HIDDEN, logits_of(q, k)), v)


def baddbmm(q, k, v, mask, *_):
    numbers = torch.where(mask, 0.0, HIDDEN).to(q.dtype).expand(-1, q.shape[1], -1, -1)
    sums = torch.baddbmm(merged(numbers), merged(q), merged(repeat_kv(k)).mT, alpha=0.3)
    weights = sums.view(numbers.shape).softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(merged(weights), merged(repeat_kv(v))).view(q.shape)


def baddbmm_of_nothing(q, k, v, mask, *_):
    nothing = torch.empty(1, dtype=q.dtype)
    sums = torch.baddbmm(nothing, merged(q), merged(repeat_kv(k)).mT, beta=0.0, alpha=0.3)
    return weighted(sums.view(*q.shape[:3], -1).masked_fill(~mask, HIDDEN), v)


def baddbmm_to_zeros(q, k, v, mask, *_):
    """Computes as GPT-NeoX-Japanese does: beta is 1, and the added tensor is zero."""
    zeros = torch.zeros(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], dtype=q.dtype)
    sums = torch.baddbmm(zeros, merged(q), merged(repeat_kv(k)).mT, beta=1.0, alpha=0.3)
    return weighted(sums.view(*q.shape[:3], -1).masked_fill(~mask, HIDDEN), v)


def einsum_by_token(q, k, v, mask, *_):
    q, k, v = (x.transpose(1, 2) for x in (q, repeat_kv(k), repeat_kv(v)))
    weights = weights_of(torch.einsum("bqhd,bkhd->bhqk", q, k), mask, v)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def einsum_by_group(q, k, v, mask, *_):
    logits = torch.einsum("bkgqd,bksd->bkgqs", q.unflatten(1, (-1, GROUP)), k)
    return torch.einsum("bkgqs,bksd->bkgqd", weights_of(logits, mask[:, :, None], v), v)


def matmul_by_group(q, k, v, mask, *_):
    logits = q.unflatten(1, (-1, GROUP)) @ k.unsqueeze(2).mT
    return (weights_of(logits, mask[:, :, None], v) @ v.unsqueeze(2)).flatten(1, 2)


def groups_beside_queries(q, k, v, mask, *_):
    together = q.reshape(BATCH, KV_HEADS, GROUP * q.shape[2], WIDTH)
    logits = (together @ k.mT).view(BATCH, KV_HEADS, GROUP, q.shape[2], -1)
    weights = weights_of(logits, mask[:, :, None], v)
    return (weights.view(BATCH, KV_HEADS, GROUP * q.shape[2], -1) @ v).view(q.shape)


def bools_added(q, k, v, mask, *_):
    """Adds a bool tensor. True counts as 1 in a sum, so it hides nothing."""
    return weighted(logits_of(q, k) + mask, v)


def bool_triangle_added_in_place(q, k, v, *_):
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return weighted(logits_of(q, k).add_(seen), v)


def whole_numbers_added(q, k, v, mask, positions, *_):
    return weighted(logits_of(q, k) + (counted(k) - positions[:, None]).to(torch.int8), v)


def hidden_where_zero(q, k, v, mask, *_):
    return weighted(logits_of(q, k).masked_fill(mask.to(q.dtype).logical_not(), HIDDEN), v)


def subtracted(q, k, v, mask, *_):
    return weighted(logits_of(q, k) - 1e9 * (1.0 - mask.to(q.dtype)), v)


def bools_of_integers_subtracted(q, k, v, mask, *_):
    logits = logits_of(q, k)
    logits -= 10000 * (1 - mask.int())
    return weighted(logits, v)


SPELLINGS = (
    by_hand, shared, interleaved, keys_of_pairs, numbers_added, masked_fill, hidden_filled,
    biased_and_hidden, einsum, one_sequence, capped, capped_by_products, with_sinks,
    with_sinks_of_groups, with_sinks_of_one_sequence, divided, scaled_before, single_precision,
    in_place, in_place_by_item, where, where_hidden, baddbmm, baddbmm_of_nothing, baddbmm_to_zeros,
    einsum_by_token, einsum_by_group, matmul_by_group, groups_beside_queries, bools_added,
    bool_triangle_added_in_place, whole_numbers_added, hidden_where_zero, subtracted,
    bools_of_integers_subtracted,
)  # fmt: skip


@pytest.mark.parametrize("attend", SPELLINGS)
def test_spellings(attend):
    site = site_of(run(attend, inputs()))
    assert site.shapes["heads"] == f"{HEADS}/{KV_HEADS}x{WIDTH}"
    assert site.shapes["mask"] == "tensor"
    assert site.shapes.get("softcap", 0) == (2.0 if "capped" in attend.__name__ else 0)
    assert ("sinks" in site.shapes) == attend.__name__.startswith("with_sinks")


def test_one_head_of_keys_serves_all():
    def attend(q, k, v, mask, *_):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    site = site_of(run(attend, inputs(kv_heads=1)))
    assert site.shapes["heads"] == f"{HEADS}/1x{WIDTH}"


def seen_logits(q, k, v, mask, *_):
    logits = logits_of(q, k)
    logits[...] += torch.where(mask, 0.0, -3e38).to(q.dtype)
    return weighted(logits, v) + logits.amax(-1, keepdim=True)


def last_keys_hidden(q, k, v, *_):
    logits = logits_of(q, k)
    logits[..., -QUERIES:] += torch.full((QUERIES, QUERIES), HIDDEN).triu(1).to(q.dtype)
    return weighted(logits, v)


@pytest.mark.parametrize(
    ("attend", "code", "words"),
    [
        (seen_logits, "ESCAPES", "that other nodes use"),
        (
            last_keys_hidden,
            "ATTENTION_FORM",
            "a part of its products",
        ),
    ],
)
def test_logits_changed_by_item_that_stay(attend, code, words):
    (miss,) = misses_of(run(attend, inputs()), "attention")
    assert miss.code == code
    assert words in miss.message


def test_a_sum_over_two_dimensions_is_not_read():
    """The near miss of `einsum`: the width of a head is in two dimensions."""

    def attend(q, k, v, mask, *_):
        q, k = (x.unflatten(-1, (2, -1)) for x in (q, repeat_kv(k)))
        logits = torch.einsum("bhqde,bhkde->bhqk", q, k) * 0.3
        return weighted(logits.masked_fill(~mask, HIDDEN), v)

    (miss,) = misses_of(run(attend, inputs()), "attention")
    assert miss.code == "ATTENTION_FORM"


VALUES = {
    "a width in two dimensions": ("bhqk,bhkde->bhqde", lambda v: v.unflatten(-1, (2, -1))),
    "no width": ("bhqk,bhk->bhq", lambda v: v[..., 0]),
    "summed over heads": ("bhqk,bhkd->bqd", lambda v: v),
    "of each query": ("bhqk,bhkqd->bhqd", lambda v: v[:, :, :, None] + v[:, :, None, :QUERIES]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_in_other_dimensions_are_not_read(name):
    """The near misses of `einsum`: its letters have other roles in the second product."""
    letters, of = VALUES[name]

    def attend(q, k, v, mask, *_):
        weights = logits_of(q, k).masked_fill(~mask, HIDDEN).softmax(-1)
        return torch.einsum(letters, weights, of(repeat_kv(v)))

    report = run(attend, inputs())
    assert matches_of(report, "attention") == []
    assert codes_of(report, "attention") == {"ATTENTION_FORM"}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("sequences", [BATCH, None])
def test_logits_of_another_form_are_reported_if_they_are_masked(sequences, masked):
    """Without a mask, a softmax between two products may be no attention. A single sequence may
    have no dimension."""

    def attend(q, k, v, mask, *_):
        if sequences is None:
            q, k, v, mask = q[0], k[0], v[0], mask[0]
        logits = torch.sin(q @ k.mT)
        logits = logits + torch.where(mask, 0.0, -3e38).to(q.dtype) if masked else logits
        return logits.softmax(-1) @ v

    report = run(attend, inputs(kv_heads=HEADS))
    assert matches_of(report, "attention") == []
    assert codes_of(report, "attention") == ({"ATTENTION_FORM"} if masked else set())


def test_heads_across_which_a_view_cuts_are_not_read():
    """A view that does not keep heads apart is not read: it shows the scaled products as three
    blocks of four rows, while they are four heads of three queries."""

    def attend(q, k, v, mask, *_):
        rows = (q @ repeat_kv(k).mT).flatten(1, 2) * 0.3
        blocks = rows.view(BATCH, QUERIES, HEADS, -1).softmax(-1)
        return blocks.view(BATCH, HEADS, QUERIES, -1) @ repeat_kv(v)

    report = run(attend, inputs())
    assert matches_of(report, "attention") == []
    assert codes_of(report, "attention") == {"ATTENTION_FORM"}


def test_keys_whose_numbers_lie_apart_are_not_read():
    """The control of `keys_of_pairs`: here the numbers of a key are a row of tokens apart."""

    def attend(q, turned, v, mask, *_):
        return sdpa(q, turned.mT, v, attn_mask=mask)

    q, k, *others = inputs()
    (miss,) = misses_of(run(attend, (q, k.mT.contiguous(), *others)), "attention")
    assert miss.code == "ATTENTION_FORM"
    assert "are not contiguous in memory" in miss.message
    assert "contiguous()" in miss.hint


@pytest.mark.parametrize("attend", [by_hand, masked_fill, capped, with_sinks])
def test_counts_that_are_symbols(attend):
    report = run(attend, inputs(), symbols=[(0, 2), (1, 2), (2, 2), (3, 2), (3, 3)])
    shapes = site_of(report).shapes
    assert (shapes["queries"], shapes["keys"]) == ("T", "T")


def test_groups_of_symbolic_size_are_no_error():
    report = run(matmul_by_group, inputs(), symbols=[(0, 1), (1, 1), (2, 1)])
    assert not [m for m in report.misses if m.code == "INTERNAL"]


def test_sinks_of_each_query_are_none_of_the_ops():
    def attend(q, k, v, mask, _, __, sinks):
        logits = logits_of(q, k).masked_fill(~mask, HIDDEN)
        extra = sinks.reshape(1, -1, 1, 1) * torch.arange(q.shape[2]).view(-1, 1)
        joined = torch.cat([logits, extra.to(q.dtype).expand(BATCH, -1, -1, -1)], dim=-1)
        return joined.softmax(-1)[..., :-1] @ repeat_kv(v)

    assert matches_of(run(attend, inputs()), "attention") == []
