"""Pattern `cache_attention`: attention in any spelling becomes one op that reads each key once, no
worse than eager; what gains nothing is not mentioned, what cannot be taken is advice, and lost
where it reads a cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import assert_no_worse, cloned, upcast
from tests.found import matches_of, misses_of
from tests.tables import in_turn
from tilewright.compiler import lower, reports

BATCH, QUERIES, KEYS, HEADS, KV_HEADS, WIDTH = 2, 3, 12, 4, 2, 16
GROUP = HEADS // KV_HEADS
HIDDEN = float("-inf")


def inputs(kv_heads=KV_HEADS, dtype=torch.bfloat16):
    """q [B, Hq, S, D], k and v [B, Hkv, K, D], mask [B, 1, S, K], positions [S], padding [B, K],
    sinks [Hq]."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    q = normal(BATCH, HEADS, QUERIES, WIDTH)
    k, v = (normal(BATCH, kv_heads, KEYS, WIDTH) for _ in range(2))
    positions = torch.tensor([6, 7, 8])
    padding = torch.ones(BATCH, KEYS, dtype=torch.bool)
    padding[1, 2:5] = False
    mask = (counted(k) <= positions[:, None]) & padding[:, None, None]
    return [q, k, v, mask, positions, padding, normal(HEADS)]


def counted(k):
    return torch.arange(k.shape[2])


def repeat_kv(x):
    b, h, length, width = x.shape
    return x[:, :, None].expand(b, h, GROUP, length, width).reshape(b, h * GROUP, length, width)


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), **options)


def logits_of(q, k):
    return q @ repeat_kv(k).transpose(2, 3) * 0.3


def weighted(logits, v):
    return logits.softmax(-1, dtype=torch.float32).to(v.dtype) @ repeat_kv(v)


def run(attend, args, symbols=()):
    """The report of a compiled function that was no worse than eager. symbols: (argument,
    dimension) of sizes that are dynamic."""
    torch._dynamo.reset()
    ours = cloned(args)
    for argument, dim in symbols:
        torch._dynamo.mark_dynamic(ours[argument], dim)
    with torch.no_grad():
        expected = attend(*cloned(args))
        exact = attend(*(upcast(a) for a in args))
        actual = torch.compile(attend, backend="tilewright", options={"inner": "eager"})(*ours)
    assert_no_worse(actual, expected, exact, attend.__name__)
    return reports()[-1]


def site_of(report):
    (site,) = matches_of(report, "attention")
    assert misses_of(report, "attention") == []
    return site


# --- spellings ------------------------------------------------------------------------------------


def by_hand(q, k, v, mask, *_):
    return sdpa(q, k, v, attn_mask=mask)


def shared(q, k, v, mask, *_):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def interleaved(q, k, v, mask, *_):
    k, v = (x.repeat_interleave(GROUP, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def keys_of_pairs(q, k, v, mask, *_):
    """A key's numbers lie along two axes, as a rotation of neighbours makes them."""
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
    """Heads in two dimensions, by the head of keys that they share; without sequences (gpt-oss)."""
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


# What follows has logits without a scale of their own.


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
    """`logits[...] += x` ends in a write of the logits to themselves."""
    logits = logits_of(q, k)
    logits[:, :, :, -k.shape[2] :] += torch.where(mask, 0.0, -3e38).to(q.dtype)
    return weighted(logits, v)


def where(q, k, v, mask, *_):
    hidden = torch.tensor(HIDDEN, dtype=q.dtype)
    return weighted(torch.where(mask, logits_of(q, k), hidden), v)


def where_hidden(q, k, v, mask, *_):
    return weighted(torch.where(~mask, HIDDEN, logits_of(q, k)), v)


def merged(x):
    return x.reshape(-1, *x.shape[2:])


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
    """As GPT-NeoX-Japanese: beta is 1, and what is added is nothing."""
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
    """True is 1 in a sum, and hides nothing."""
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
        (seen_logits, "ESCAPES", "also used"),
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


def test_keys_whose_numbers_lie_apart_are_not_read():
    """The control of `keys_of_pairs`: a key's numbers lie a row of tokens apart."""

    def attend(q, turned, v, mask, *_):
        return sdpa(q, turned.mT, v, attn_mask=mask)

    q, k, *others = inputs()
    (miss,) = misses_of(run(attend, (q, k.mT.contiguous(), *others)), "attention")
    assert miss.code == "ATTENTION_FORM"
    assert "do not follow each other in memory" in miss.message
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


# --- masks ----------------------------------------------------------------------------------------


def ones(size):
    return torch.ones(size, size, dtype=torch.bool)


def triangle(size):
    return torch.tril(ones(size))


#: name -> (mask of (k, positions, padding), what it is understood as)
MASKS = {
    "causal": (lambda k, p, s: counted(k) <= p[:, None], "causal by position"),
    "window": (
        lambda k, p, s: (counted(k) <= p[:, None]) & (counted(k) > p[:, None] - 4),
        "sliding_window(4) by position",
    ),
    "window_hidden": (
        lambda k, p, s: ~((counted(k) > p[:, None]) | (counted(k) + 4 <= p[:, None])),
        "sliding_window(4) by position",
    ),
    "moved_window": (
        lambda k, p, s: (counted(k) <= p[:, None] + 1) & (counted(k) >= p[:, None] - 1),
        "sliding_window(3) by position",
    ),
    "window_of_places": (
        lambda k, p, s: (
            (counted(k) <= torch.arange(QUERIES)[:, None])
            & (counted(k) > torch.arange(QUERIES)[:, None] - 2)
        ),
        "sliding_window(2)",
    ),
    "places_from_one": (
        lambda k, p, s: counted(k) <= torch.arange(1, end=QUERIES + 1)[:, None],
        "causal by position",
    ),
    "chunks": (
        lambda k, p, s: (counted(k) <= p[:, None]) & (counted(k) // 4 == p[:, None] // 4),
        "chunked(4) by position",
    ),
    "padded": (
        lambda k, p, s: (counted(k) <= p[:, None]) & s[:, None, None],
        "causal by position and tensor",
    ),
    "padded_triangle": (
        lambda k, p, s: torch.ones(QUERIES, KEYS, dtype=torch.bool).tril() & s[:, None, None],
        "causal and tensor",
    ),
    "padded_window": (
        lambda k, p, s: (
            (counted(k) <= p[:, None]) & (counted(k) > p[:, None] - 8) & s[:, None, None]
        ),
        "sliding_window(8) by position and tensor",
    ),
    "difference": (
        lambda k, p, s: (p[:, None] - counted(k) >= 0) & (p[:, None] - counted(k) < 4),
        "sliding_window(4) by position",
    ),
    "triangle_from_the_end": (
        lambda k, p, s: torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES),
        "causal by position",
    ),
    "hidden_triangle": (
        lambda k, p, s: ~torch.triu(torch.ones(QUERIES, KEYS, dtype=torch.bool), diagonal=1),
        "causal",
    ),
    "part_of_a_triangle": (lambda k, p, s: triangle(KEYS)[4 : 4 + QUERIES], "causal by position"),
    "rows_of_a_triangle": (lambda k, p, s: triangle(KEYS)[None, None, p], "causal by position"),
    "rows_from_the_end": (lambda k, p, s: triangle(KEYS)[p - KEYS], "causal by position"),
    "last_rows_of_a_moved_triangle": (
        lambda k, p, s: ones(KEYS).tril(1)[p + 3],
        "causal by position",
    ),
    "first_rows_of_a_moved_triangle": (
        lambda k, p, s: ones(KEYS).tril(-1)[p - 5],
        "causal by position",
    ),
    "rows_of_tables_of_two_sizes": (
        lambda k, p, s: (
            triangle(KEYS)[p - KEYS]
            & torch.ones(KEYS + 2, KEYS, dtype=torch.bool).triu(-3)[p - KEYS]
        ),
        "tensor",
    ),
    "rows_by_sequence": (
        lambda k, p, s: triangle(KEYS)[p.expand(BATCH, -1)][:, None],
        "causal by position",
    ),
    "rows_of_a_band": (
        lambda k, p, s: (triangle(KEYS) & triangle(KEYS).T.clone().triu(-3)).index_select(0, p),
        "tensor",
    ),
    "rows_of_two_triangles": (
        lambda k, p, s: (triangle(KEYS) & ones(KEYS).triu(-3)).index_select(0, p),
        "sliding_window(4) by position",
    ),
    "numbers": (
        lambda k, p, s: torch.where(counted(k) <= p[:, None], 0.0, HIDDEN),
        "causal by position",
    ),
    "numbers_filled": (
        lambda k, p, s: (
            torch.zeros(QUERIES, KEYS).masked_fill(
                counted(k) > p[:, None], HIDDEN
            )
        ),
        "causal by position",
    ),
    "numbers_after_a_cache": (
        lambda k, p, s: torch.hstack(
            [
                torch.zeros(QUERIES, KEYS - QUERIES),
                torch.full((QUERIES, QUERIES), HIDDEN).triu(1),
            ]
        ),
        "causal by position",
    ),
    "padding_alone": (lambda k, p, s: s[:, None, None].expand(-1, 1, QUERIES, -1), "tensor"),
    "one_row_for_all": (lambda k, p, s: triangle(KEYS)[6:7].expand(QUERIES, -1), "tensor"),
    "row_and_position": (
        lambda k, p, s: triangle(KEYS)[p] & (counted(k) > p[:, None] - 4), "tensor",
    ),
    "rows_of_other_numbers": (
        lambda k, p, s: (ones(KEYS).float() * 2).tril()[p], "tensor",
    ),
    "bits_of_integers": (
        lambda k, p, s: (~ones(KEYS).long().triu(1)[:QUERIES]).logical_not().logical_not(),
        "tensor",
    ),
    "numbers_not_infinite": (
        lambda k, p, s: torch.where(counted(k) <= p[:, None], 0.0, -9.0),
        "tensor",
    ),
    # Not understood: each differs in one thing from one of those above.
    "later_keys_too": (lambda k, p, s: counted(k) > p[:, None] - 4, "tensor"),
    "window_of_other_places": (
        lambda k, p, s: (counted(k) <= p[:, None]) & (counted(k) > p.flip(0)[:, None] - 4),
        "tensor",
    ),
    "moved_chunks": (
        lambda k, p, s: (counted(k) <= p[:, None]) & ((counted(k) + 1) // 4 == p[:, None] // 4),
        "tensor",
    ),
    "unequal_chunks": (
        lambda k, p, s: (counted(k) <= p[:, None]) & (counted(k) // 4 == p[:, None] // 3),
        "tensor",
    ),
    "either": (lambda k, p, s: (counted(k) <= p[:, None]) | (counted(k) == 11), "tensor"),
    "one_more_per_query": (
        lambda k, p, s: (counted(k) <= p[:, None]) & (counted(k) + p[:, None] != 9),
        "tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask, understood = MASKS[name]

    def attend(q, k, v, _, positions, padding, sinks):
        seen = mask(k, positions, padding)
        return sdpa(q, k, v, attn_mask=seen if seen.dtype == torch.bool else seen.to(q.dtype))

    assert site_of(run(attend, inputs())).shapes["mask"] == understood


# --- caches ---------------------------------------------------------------------------------------


def test_a_written_cache_is_read_where_it_lies():
    """One head of keys for each of queries, and no mask: what is gained is the cache's."""

    def attend(q, k, v, mask, positions, *_):
        k.index_copy_(2, positions, q)
        v.index_copy_(2, positions, q)
        return F.scaled_dot_product_attention(q, k, v)

    report = run(attend, inputs(kv_heads=HEADS))
    assert site_of(report).shapes["mask"] == "none"


def paged(heads_first=False):
    """q, pools of k and v [9, 4, Hkv, D] (heads first: [9, Hkv, 4, D]), mask, table [B, 3]."""
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
    """As older GPT-2 code hides keys: what is hidden becomes zero, and then a large number."""
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
    """The keys are a cache from outside, into which the graph writes."""
    k[:, :, 3:4] = q[:, :KV_HEADS, :1] * 2
    return q, k


def behind_a_projection(q, k):
    """The keys are given where the graph makes the queries: they are those of earlier tokens."""
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
    """The scores are also returned: they cannot vanish."""
    logits = logits_of(q, k)
    logits += torch.where(mask, 0.0, HIDDEN).to(q.dtype)
    return weighted(logits, v), logits


@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (weights_are_read, "return no attention weights"),
        (dropped, "dropout_p=0.0"),
        (written_in_part, "read in its place"),
    ],
)
def test_a_hint_says_what_to_change(attend, words):
    (miss,) = misses_of(lower(attend, inputs()), "attention")
    assert words in miss.hint


def test_a_mask_beside_is_causal_is_to_say_all():
    def attend(q, k, v, mask, *_):
        k, v, mask = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], mask[..., : q.shape[2]]
        return sdpa(q, k, v, attn_mask=mask, is_causal=True)

    (miss,) = misses_of(lower(attend, inputs()), "attention")
    assert "leave is_causal out" in miss.hint


def capped_from_below(q, k, v):
    """No known logits: hidden ones are raised to a number once more."""
    logits = torch.max(q @ k.mT, torch.tensor(-1e4, dtype=q.dtype))
    return logits.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def masked_and_capped(q, k, v, mask, *_):
    """ALiBi's models of one head of keys for each of queries, such as Baichuan's."""
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
    """`view` of a result [B, H, S, D] that lies so; the op's lies by tokens."""

    def attend(q, k, v, mask, *_):
        return sdpa(q, k, v, attn_mask=mask).view(q.shape[0], -1)

    assert site_of(run(attend, inputs())).pattern == "cache_attention"


def test_a_cache_that_is_changed_by_the_name_of_its_write():
    """Another match absorbs the write, whose result names the memory that attention reads."""

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
