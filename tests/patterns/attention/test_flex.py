"""Tests the pattern `cache_attention` on `flex_attention`.

If the pattern can read a score_mod, the call is fused, and its result is no less accurate than
eager's. If it cannot, the call is a miss with a reason, and stays in the graph.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    flex_attention,
)

from tests.agreement import assert_no_worse, cloned, upcast
from tests.found import matches_of, misses_of
from tilewright.compiler import lower, reports

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

# Without this setting, Dynamo would trace the call even in eager mode. With it, the same arithmetic
# runs unfused.
EAGER = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 2, 4, 2, 3, 12, 16


def inputs(kv_heads=KV_HEADS):
    """Returns q, k, v, positions [S], documents [K], padding [B, K], lengths [B] and slopes [H]."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    padding = torch.ones(BATCH, KEYS, dtype=torch.bool)
    padding[1, 2:5] = False
    return [
        normal(BATCH, HEADS, QUERIES, WIDTH),
        *(normal(BATCH, kv_heads, KEYS, WIDTH) for _ in range(2)),
        torch.tensor([6, 7, 8]),
        torch.arange(KEYS) // 4,
        padding,
        torch.tensor([9, 12]),
        torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    ]


def blocks_of(mask_mod):
    return create_block_mask(mask_mod, BATCH, None, QUERIES, KEYS, device="cpu")


def causal(b, h, i, j, *_):
    return i >= j


CAUSAL = blocks_of(causal)
INF = float("inf")


def attention(seen=causal, score_mod=None, **options):
    """Makes a function of q, k, v and the other tensors of `inputs`. `seen` and `score_mod` get
    (.., b, h, i, j, these other tensors)."""

    def make(*tensors):
        def score(s, *at):
            changed = s if score_mod is None else score_mod(s, *at, *tensors)
            return changed if seen is None else torch.where(seen(*at, *tensors), changed, -INF)

        given = {"score_mod": score, "enable_gqa": True, **options}
        return lambda q, k, v: flex_attention(q, k, v, **given)

    return make


def run(make, args):
    wide = [upcast(a) for a in args]
    attend = make(*args[3:])
    with torch.no_grad():
        with mock.patch(EAGER, True, create=True):
            expected, exact = attend(*args[:3]), make(*wide[3:])(*wide[:3])
        compiled = torch.compile(attend, backend="tilewright", options={"inner": "eager"})
        actual = compiled(*cloned(args[:3]))
    assert_no_worse(actual, expected, exact, "flex_attention")
    return reports()[-1]


#: For each name: (the visible keys, the change of the score, the mask that the pattern reads).
FORMS = {
    "places": (causal, None, "causal"),
    "positions": (lambda b, h, i, j, p, *_: p[i] >= j, None, "causal by position"),
    "moved": (lambda b, h, i, j, p, *_: i + p[0] >= j, None, "causal by position"),
    "window": (
        lambda b, h, i, j, p, *_: (p[i] >= j) & (p[i] - j < 4),
        None,
        "sliding_window(4) by position",
    ),
    "chunks": (
        lambda b, h, i, j, p, *_: (p[i] >= j) & (p[i] // 4 == j // 4),
        None,
        "chunked(4) by position",
    ),
    "padding": (
        lambda b, h, i, j, p, docs, seen, *_: (p[i] >= j) & seen[b, j],
        None,
        "causal by position and tensor",
    ),
    "row_of_padding": (
        lambda b, h, i, j, p, docs, seen, *_: (p[i] >= j) & seen[b][j],
        None,
        "causal by position and tensor",
    ),
    "lengths": (
        lambda b, h, i, j, p, docs, seen, lengths, *_: j < lengths[b],
        None,
        "causal by position",
    ),
    "documents": (
        lambda b, h, i, j, p, docs, *_: (p[i] >= j) & (docs[p[i]] == docs[j]),
        None,
        "tensor",
    ),
    "prefix": (lambda b, h, i, j, p, *_: (p[i] >= j) | (j < 2), None, "tensor"),
    "by_head": (lambda b, h, i, j, p, *_: p[i] - h >= j, None, "tensor"),
    "capped": (causal, lambda s, *_: 2 * torch.tanh(s / 2), "causal"),
    "slopes": (
        causal,
        lambda s, b, h, i, j, p, docs, seen, lengths, slopes: s + slopes[h] * (j - i),
        "causal and tensor",
    ),
    "halved": (causal, lambda s, *_: s * 0.5, "causal"),
}


@pytest.mark.parametrize("name", FORMS)
def test_functions(name):
    mask_mod, score_mod, understood = FORMS[name]
    report = run(attention(mask_mod, score_mod), inputs())
    (site,) = matches_of(report, "attention")
    assert misses_of(report, "attention") == []
    assert site.shapes["heads"] == f"{HEADS}/{KV_HEADS}x{WIDTH}"
    assert site.shapes["mask"] == understood
    assert site.shapes.get("softcap", 0) == (2.0 if name == "capped" else 0)


def test_nothing_is_hidden():
    (site,) = matches_of(run(attention(None), inputs()), "attention")
    assert site.shapes["mask"] == "none"


def squared(score, *_):
    return score * score


def with_sines(b, h, i, j, p, *_):
    return torch.sin(i + j) > 0


def whole_row(b, h, i, j, p, docs, seen, *_):
    return seen[b].any() & (i >= j)


def sums_used(*_):
    def attend(q, k, v):
        out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out * aux.lse.unsqueeze(-1).to(out.dtype)

    return attend


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (attention(score_mod=squared), "no pattern can read what its score_mod computes"),
        (attention(with_sines), "its function calls sin"),
        (attention(whole_row), "its function calls any"),
        (sums_used, "its log-sum-exp, or its largest score, is used"),
        (
            attention(block_mask=CAUSAL),
            "the lists of its block mask may hide more keys than mask_mod does",
        ),
    ],
    ids=["squared", "sines", "whole_row", "sums_used", "block_mask"],
)
def test_what_cannot_be_read_stays(make, reason):
    lowered = lowered_with(make, inputs())
    (graph,) = lowered.graphs
    assert matches_of(lowered, "attention") == []
    (miss,) = misses_of(lowered, "attention")
    assert (miss.code, miss.is_lost) == ("FLEX_FUNCTION", False)
    assert miss.message == f"flex_attention: {reason}"
    assert called(graph.after) == called(graph.before)


def test_what_gains_nothing_is_not_mentioned():
    lowered = lowered_with(attention(None), inputs(kv_heads=HEADS))
    (graph,) = lowered.graphs
    assert matches_of(lowered, "attention") == misses_of(lowered, "attention") == []
    assert called(graph.after) == called(graph.before)


def test_a_fused_call_is_gone():
    (graph,) = lowered_with(attention(), inputs()).graphs
    assert "flex_attention" in called(graph.before)
    assert not {"flex_attention", "score_mod_0"} & set(called(graph.after))


def lowered_with(make, args):
    return lower(make(*args[3:]), args[:3])


def called(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
