"""Tests latent attention that is changed in one place. Whatever is fused then must give eager's
results.

Weights and data are float32, so that a wrong mask, order or scale shows.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import cloned
from tests.found import codes_of, matches_of
from tests.models import ropes
from tests.models.mla_idioms import build
from tilewright.compiler import reports


def heads_first(x):
    return x.transpose(0, 1)


def sdpa(q, k, v, scale, **options):
    parts = (heads_first(t) for t in (q, k, v))
    return heads_first(F.scaled_dot_product_attention(*parts, scale=scale, **options))


def counted(k):
    return torch.arange(len(k))


#: For each name: (mask from (q, k, positions), the mask that the pattern proves).
MASKS = {
    "before": (lambda q, k, p: counted(k) < p[:, None] + 1, "causal by position"),
    "not_after": (lambda q, k, p: ~(counted(k) > p[:, None]), "causal by position"),
    "two_earlier": (lambda q, k, p: counted(k) + 2 <= p[:, None], "causal by position"),
    "counted_from_three": (
        lambda q, k, p: torch.arange(3, len(k) + 3) <= p[:, None] + 1,
        "causal by position",
    ),
    "by_index": (lambda q, k, p: counted(k) <= torch.arange(len(q))[:, None], "causal"),
    "lower_triangle": (
        lambda q, k, p: torch.ones(len(q), len(k), dtype=torch.bool).tril(),
        "causal",
    ),
    "running_sum": (
        lambda q, k, p: torch.ones(len(k), dtype=torch.int64).cumsum(0) <= p[:, None],
        "causal by position",
    ),
    "one_row_for_all": (lambda q, k, p: (counted(k) <= p[3])[None], "causal by position"),
    "later": (lambda q, k, p: counted(k) >= p[:, None], "tensor"),
    "every_other_counted": (lambda q, k, p: counted(k) * 2 <= p[:, None], "tensor"),
    "keys_backwards": (lambda q, k, p: counted(k).flip(0) <= p[:, None], "tensor"),
    "window": (
        lambda q, k, p: (counted(k) <= p[:, None]) & (counted(k) > p[:, None] - 4),
        "sliding_window(4) by position",
    ),
    "by_head": (
        lambda q, k, p: counted(k) <= p[None, :, None] - torch.arange(4)[:, None, None],
        "tensor",
    ),
    "moved_triangle": (
        lambda q, k, p: torch.ones(len(q), len(k), dtype=torch.bool).tril(3),
        "causal by position",
    ),
}


def run(change, **axes):
    """Returns the report of a changed module, after a check that it gives eager's results. `axes`
    are fields of the module."""
    torch._dynamo.reset()
    module, args = build("plain", dtype=torch.float32, **axes)
    change(module)
    eager, ours = cloned(args), cloned(args)
    with torch.no_grad():
        expected = module(*eager)
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        actual = compiled(*ours)
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(ours[5], eager[5], rtol=1e-4, atol=1e-5)
    assert reports()[-1].notes == ()
    return reports()[-1]


def attending(attend):
    def change(module):
        module.attend = attend

    return change


def prefill(report):
    return next(iter(matches_of(report, "mla_prefill")), None)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask, proven = MASKS[name]
    found = run(attending(lambda q, k, v, p, s: sdpa(q, k, v, s, attn_mask=mask(q, k, p))))
    assert prefill(found).shapes["mask"] == proven


def batched(q, k, v, scale, **options):
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, **options)
    return out.transpose(1, 2).reshape(10, 4, 32)


def two_halves(x, count, interleaved=False):
    """Returns [N, H, D] as a batch of two sequences [2, H, N / 2, D]."""
    order = (count // 2, 2) if interleaved else (2, count // 2)
    apart = heads_first(x).reshape(4, *order, x.shape[-1])
    return apart.permute(2, 0, 1, 3) if interleaved else apart.transpose(0, 1)


def logits_apart(q, k, v, p, scale, weight=1.0, flip=False):
    """Computes the logits as the sum of two products. The second product is changed."""
    q_pe = q[..., 24:].flip(0) if flip else q[..., 24:]
    by_rope = torch.einsum("thr,kr->htk", q_pe, k[1])
    by_rope = by_rope if weight == 1.0 else by_rope * weight
    scores = torch.einsum("thd,khd->htk", q[..., :24], k[0]) + by_rope
    return torch.einsum("htk,khv->thv", (scores * scale).softmax(-1), v)


def apart(**bent):
    def change(module):
        module.concat = lambda k_nope, rope_key: (k_nope, rope_key)
        module.attend = lambda *given: logits_apart(*given, **bent)

    return change


def query_rotated(rotate):
    def change(module):
        module.rope = rotate

    return change


#: For each name: (change, whether the attention is fused).
BENT = {
    "batch_of_two": (
        attending(
            lambda q, k, v, p, s: batched(
                *(two_halves(t, len(t)) for t in (q, k, v)), s, is_causal=True
            )
        ),
        True,
    ),
    "interleaved_keys": (
        attending(
            lambda q, k, v, p, s: batched(
                two_halves(q, 10), *(two_halves(t, 16, True) for t in (k, v)), s, is_causal=True
            )
        ),
        True,
    ),
    "interleaved_queries": (
        attending(
            lambda q, k, v, p, s: batched(
                two_halves(q, 10, True), *(two_halves(t, 16) for t in (k, v)), s
            )
        ),
        True,
    ),
    "positions_by_sequence": (
        attending(
            lambda q, k, v, p, s: batched(
                two_halves(q, 10),
                *(heads_first(t).expand(2, -1, -1, -1) for t in (k, v)),
                s,
                attn_mask=torch.arange(16) <= p.view(2, 1, 5, 1),
            )
        ),
        True,
    ),
    "every_other_key": (
        attending(lambda q, k, v, p, s: sdpa(q, k[::2], v[::2], s)),
        True,
    ),
    "other_values": (attending(lambda q, k, v, p, s: sdpa(q, k[2:], v[:-2], s)), False),
    "heads_in_another_order": (
        attending(lambda q, k, v, p, s: sdpa(q, k, v[:, [0, 2, 1, 3]], s)),
        False,
    ),
    "queries_in_another_order": (
        attending(lambda q, k, v, p, s: sdpa(q.flip(0), k, v, s)),
        True,
    ),
    "values_padded_and_read_whole": (
        attending(lambda q, k, v, p, s: sdpa(q, k, F.pad(v, (0, 8)), s)[..., 4:36]),
        False,
    ),
    "values_padded": (
        attending(lambda q, k, v, p, s: sdpa(q, k, F.pad(v, (0, 8)), s)[..., :32]),
        True,
    ),
    "logits_apart": (apart(), True),
    "one_product_scaled": (apart(weight=2.0), False),
    "rope_part_of_other_queries": (apart(flip=True), True),
    "query_rotated_backwards": (query_rotated(lambda x, c, s: ropes.half(x, c, -s)), True),
    "query_rotated_twice": (
        query_rotated(lambda x, c, s: ropes.half(ropes.half(x, c, s), c, s)),
        True,
    ),
    "query_rotated_by_head": (
        query_rotated(lambda x, c, s: ropes.half(x, c * torch.arange(1, 5)[:, None], s)),
        True,
    ),
    "query_rotated_in_other_heads": (
        query_rotated(lambda x, c, s: ropes.half(x, c, s).flip(1)),
        True,
    ),
    "one_table_row_for_all_queries": (
        query_rotated(lambda x, c, s: ropes.half(x, c[:1], s[:1])),
        True,
    ),
}


@pytest.mark.parametrize("name", BENT)
def test_bent_attention(name):
    change, fused = BENT[name]
    assert (prefill(run(change)) is not None) == fused


@pytest.mark.parametrize(("concat", "fused"), [("cat", True), ("new_empty", False)])
def test_a_query_that_reads_the_memory_of_the_keys(concat, fused):
    """The query reads the memory into which slices of the keys are written. This memory disappears
    with the match, so the query would otherwise read memory that nothing has written."""
    as_keys = attending(lambda q, k, v, p, s: sdpa(k[: len(q)], k, v, s))
    report = run(as_keys, concat=concat)
    assert (prefill(report) is not None) == fused
    assert ("ESCAPES" in codes_of(report, "mla_prefill")) == (not fused)
