"""Tests the pattern `cache_attention`.

Caches are read in place. Attention that gains nothing is not reported. Attention that the op does
not support is advice, or lost if it reads a cache.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.found import matches_of, misses_of
from tests.patterns.attention.plain_attention import (
    BATCH,
    GROUP,
    HEADS,
    HIDDEN,
    KEYS,
    KV_HEADS,
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
from tests.tables import in_turn
from tilewright.compiler import lower
from tilewright.tools.matrix.releases import release

# --- caches ---------------------------------------------------------------------------------------


def test_a_written_cache_is_read_where_it_lies():
    """There is one key head for each query head, and no mask, so that only the cache makes a
    gain."""

    def attend(q, k, v, mask, positions, *_):
        k.index_copy_(2, positions, q)
        v.index_copy_(2, positions, q)
        return F.scaled_dot_product_attention(q, k, v)

    report = run(attend, inputs(kv_heads=HEADS))
    assert site_of(report).shapes["mask"] == "none"


def paged(heads_first=False):
    """Returns q, pools of k and v [9, 4, Hkv, D] (heads first: [9, Hkv, 4, D]), a mask, and a table
    [B, 3]."""
    q, _, _, mask, *_ = inputs()
    generator = torch.Generator().manual_seed(1)
    shape = (9, KV_HEADS, 4, WIDTH) if heads_first else (9, 4, KV_HEADS, WIDTH)
    pools = [torch.randn(shape, generator=generator).to(q.dtype) for _ in range(2)]
    return [q, *pools, mask, torch.tensor([[4, 7, -9], [1, -1, 3]])]


def gathered(q, k, v, mask, table):
    k, v = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (k, v))
    return sdpa(q, k, v, attn_mask=mask)


def gathered_flat(q, k, v, mask, table):
    k, v = (
        pool.index_select(0, (table % 9).flatten()).view(BATCH, KEYS, -1, WIDTH) for pool in (k, v)
    )
    return sdpa(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)


def gathered_by_head(q, k, v, mask, table):
    k, v = (pool[table].transpose(1, 2).flatten(2, 3) for pool in (k, v))
    return sdpa(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("attend", [gathered, gathered_flat, gathered_by_head])
def test_pages_are_read_where_they_lie(attend):
    report = run(attend, paged(attend is gathered_by_head))
    assert site_of(report).shapes["page"] == 4


def test_pages_of_another_table_are_gathered():
    def attend(q, k, v, mask, table):
        k, v = k[table].flatten(1, 2), v[table.flip(1)].flatten(1, 2)
        return sdpa(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)

    assert "page" not in site_of(run(attend, paged())).shapes


def test_pages_in_another_order_are_gathered():
    def attend(q, k, v, mask, table):
        k, v = (pool[table].transpose(1, 2).flatten(1, 2) for pool in (k, v))
        return sdpa(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)

    assert "page" not in site_of(run(attend, paged())).shapes


# --- what is left alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_what_gains_nothing_is_not_mentioned(options):
    def attend(q, k, v, *_):
        return F.scaled_dot_product_attention(q, k, v, **options)

    def repeated(q, k, v, *_):
        return sdpa(q, k, v, **options)

    lowered = lower(attend, inputs(kv_heads=HEADS))
    assert matches_of(lowered, "attention") == misses_of(lowered, "attention") == []
    assert matches_of(lower(repeated, inputs()), "attention") != []


def repeated_in_turn(q, k, v, mask, *_):
    k, v = (x.repeat(1, GROUP, 1, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def keys_by_column(q, k, v, mask, *_):
    k = (k * 2).transpose(2, 3).contiguous() @ torch.eye(KEYS, dtype=k.dtype)
    return sdpa(q, k.transpose(2, 3), v, attn_mask=mask)


def large_number(q, k, v, mask, *_):
    return weighted(logits_of(q, k).masked_fill(~mask, -1e4), v)


def weights_are_read(q, k, v, mask, *_):
    weights = logits_of(q, k).masked_fill(~mask, HIDDEN).softmax(-1)
    return weights @ repeat_kv(v) + weights.sum()


def moved_queries(q, k, v, mask, *_):
    logits = logits_of(q.float() + 1.0, k.float()).masked_fill(~mask, HIDDEN)
    return logits.softmax(-1).to(v.dtype) @ repeat_kv(v)


def result_in_single_precision(q, k, v, mask, *_):
    logits = logits_of(q, k).masked_fill(~mask, HIDDEN)
    return logits.float().softmax(-1) @ repeat_kv(v).float()


def sum_of_another_share(q, k, v, mask, *_):
    numbers = torch.where(mask, 0.0, HIDDEN).to(q.dtype).expand(-1, q.shape[1], -1, -1)
    sums = torch.baddbmm(merged(numbers), merged(q), merged(repeat_kv(k)).mT, beta=0.5)
    return weighted(sums.view(numbers.shape), v)


def multiplied(q, k, v, mask, *_):
    """Hides keys as older GPT-2 code does: a hidden score becomes zero, and then a large number."""
    mask = mask.to(q.dtype)
    return weighted(logits_of(q, k) * mask - 1e4 * (1 - mask), v)


def taken_from_the_mask(q, k, v, mask, *_):
    return weighted(mask.to(q.dtype) - logits_of(q, k), v)


def taken_twice(q, k, v, mask, *_):
    return weighted(torch.sub(logits_of(q, k), mask.to(q.dtype), alpha=2), v)


@pytest.mark.parametrize(
    ("attend", "code"),
    [
        (multiplied, "ATTENTION_FORM"),
        (taken_from_the_mask, "ATTENTION_FORM"),
        (taken_twice, "ATTENTION_FORM"),
        (repeated_in_turn, "ATTENTION_FORM"),
        (keys_by_column, "ATTENTION_FORM"),
        (large_number, "ATTENTION_FORM"),
        (weights_are_read, "ATTENTION_FORM"),
        (moved_queries, "DTYPE"),
        (result_in_single_precision, "DTYPE"),
    ],
)
def test_misses_are_advice(attend, code):
    report = run(attend, inputs())
    assert matches_of(report, "attention") == []
    (miss,) = misses_of(report, "attention")
    assert (miss.code, miss.is_lost) == (code, False)
    assert ("multiplied by a tensor" in miss.message) == (attend is multiplied)


def behind_a_write(q, k):
    """Attends to a cache from outside of the graph, into which the graph writes."""
    k[:, :, 3:4] = q[:, :KV_HEADS, :1] * 2
    return q, k


def behind_a_projection(q, k):
    """Attends to keys that are given as an input, with queries that the graph computes. Such keys
    belong to earlier tokens."""
    return F.linear(q, torch.ones(WIDTH, WIDTH, dtype=q.dtype)), k


def of_its_own(q, k):
    return F.linear(q, torch.ones(WIDTH, WIDTH, dtype=q.dtype)), k.sin()


@pytest.mark.parametrize(
    ("attend", "keys"),
    [
        *in_turn(
            [large_number, repeated_in_turn, moved_queries],
            [behind_a_write, behind_a_projection, of_its_own],
        ),
        (large_number, of_its_own),
        (moved_queries, behind_a_write),
    ],
)
def test_a_cache_that_unfused_attention_reads_whole_is_lost(attend, keys):
    lowered = lower(lambda q, k, *others: attend(*keys(q, k), *others), inputs())
    (miss,) = misses_of(lowered, "attention")
    assert miss.is_lost == (keys is not of_its_own)


@pytest.mark.parametrize("given", [True, False])
def test_pages_that_unfused_attention_reads_whole_are_lost(given):
    def attend(q, pool, table, v, mask):
        pool = pool if given else pool.sin()
        return large_number(q, pool[table].flatten(1, 2).transpose(1, 2), v, mask)

    q, k, v, mask, *_ = inputs()
    pool = k.transpose(1, 2).reshape(-1, 2, KV_HEADS, WIDTH)
    table = torch.arange(len(pool)).view(BATCH, -1)
    (miss,) = misses_of(lower(attend, (q, pool, table, v, mask)), "attention")
    assert miss.is_lost == given


def dropped(q, k, v, mask, *_):
    return sdpa(q, k, v, attn_mask=mask, dropout_p=0.5)


def written_in_part(q, k, v, mask, *_):
    """The scores are also returned, so they cannot vanish."""
    logits = logits_of(q, k)
    logits += torch.where(mask, 0.0, HIDDEN).to(q.dtype)
    return weighted(logits, v), logits


@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (weights_are_read, "do not return the attention weights"),
        (dropped, "dropout_p=0.0"),
        (written_in_part, "read the input or the result of the layer instead"),
    ],
)
def test_a_hint_says_what_to_change(attend, words):
    (miss,) = misses_of(lower(attend, inputs()), "attention")
    assert words in miss.hint


def test_a_mask_beside_is_causal_is_to_say_all():
    def attend(q, k, v, mask, *_):
        k, v, mask = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], mask[..., : q.shape[2]]
        return sdpa(q, k, v, attn_mask=mask, is_causal=True)

    try:
        attend(*inputs())
    except RuntimeError as refused:
        if release(torch.__version__) < (2, 14):
            raise
        pytest.skip(f"torch takes no such call since 2.14: {refused}")
    (miss,) = misses_of(lower(attend, inputs()), "attention")
    assert "leave out is_causal" in miss.hint


def capped_from_below(q, k, v):
    """Raises hidden logits to a number a second time, which makes a form of logits that is not
    known."""
    logits = torch.max(q @ k.mT, torch.tensor(-1e4, dtype=q.dtype))
    return logits.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def masked_and_capped(q, k, v, mask, *_):
    """Has a mask and capped logits, with one key head for each query head, as models with ALiBi
    such as Baichuan."""
    logits = torch.max(q @ k.mT + torch.where(mask, 0.0, HIDDEN), torch.tensor(HIDDEN))
    return logits.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def cached_and_capped(q, k, v, *_):
    k[:, :, 3:4] = q[:, :, :1] * 2
    return capped_from_below(q, k, v)


def shared_and_capped(q, k, v, *_):
    return capped_from_below(q, *(x[:, :KV_HEADS].repeat_interleave(GROUP, 1) for x in (k, v)))


@pytest.mark.parametrize("attend", [cached_and_capped, shared_and_capped, masked_and_capped])
def test_a_softmax_of_such_keys_that_cannot_be_read_is_mentioned(attend):
    (miss,) = misses_of(lower(attend, inputs(kv_heads=HEADS)), "attention")
    assert (miss.code, miss.is_lost) == ("ATTENTION_FORM", attend is cached_and_capped)
    assert "attn_mask" in miss.hint
    given = lower(lambda q, k, v, *_: capped_from_below(q, k, v), inputs(kv_heads=HEADS))
    assert misses_of(given, "attention") == []


def test_a_view_that_needs_the_graphs_own_strides():
    """Applies `view` to the result, which requires the graph's own memory order [B, H, S, D]. The
    op's result is ordered by tokens."""

    def attend(q, k, v, mask, *_):
        return sdpa(q, k, v, attn_mask=mask).view(q.shape[0], -1)

    assert site_of(run(attend, inputs())).pattern == "cache_attention"


def test_a_cache_that_is_changed_by_the_name_of_its_write():
    """Changes a cache through the result of a write. Another match absorbs this write, whose result
    is the memory that attention reads."""

    def attend(q, k, v, positions, new, *_):
        k.index_copy_(2, positions, new)
        written = v.index_copy_(2, positions, new * 2)
        written.masked_fill_(written > 0, 0)
        mask = counted(k) <= positions[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    q, k, v, _, positions, *_ = inputs()
    report = run(attend, (q, k, v, positions, q[:, :KV_HEADS].contiguous()))
    found = {site.pattern for site in report.matches}
    assert found == {"cache_store", "cache_attention"}
