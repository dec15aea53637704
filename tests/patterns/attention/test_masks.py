"""Tests the pattern `cache_attention`: it recognises which keys a mask hides, however the mask is
written."""

from __future__ import annotations

import pytest
import torch

from tests.patterns.attention.plain_attention import (
    BATCH,
    HIDDEN,
    KEYS,
    QUERIES,
    counted,
    inputs,
    run,
    sdpa,
    site_of,
)


def ones(size):
    return torch.ones(size, size, dtype=torch.bool)


def triangle(size):
    return torch.tril(ones(size))


#: For each name: (mask from (k, positions, padding), the mask that the pattern reads).
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
    "numbers_of_a_triangle": (
        lambda k, p, s: torch.full((QUERIES, KEYS), HIDDEN).triu(KEYS - QUERIES + 1),
        "causal by position",
    ),
    "numbers_of_a_triangle_not_infinite": (
        lambda k, p, s: torch.full((QUERIES, KEYS), -9.0).triu(KEYS - QUERIES + 1),
        "tensor",
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
    # Masks that are not recognised. Each differs in one point from a mask above.
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
