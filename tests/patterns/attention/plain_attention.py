"""Attention of few heads over few keys in plain PyTorch, and a comparison with eager."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.agreement import assert_no_worse, cloned, upcast
from tests.found import matches_of, misses_of
from tilewright.compiler import reports

BATCH, QUERIES, KEYS, HEADS, KV_HEADS, WIDTH = 2, 3, 12, 4, 2, 16
GROUP = HEADS // KV_HEADS
HIDDEN = float("-inf")


def inputs(kv_heads=KV_HEADS, dtype=torch.bfloat16):
    """Returns q [B, Hq, S, D], k and v [B, Hkv, K, D], mask [B, 1, S, K], positions [S], padding
    [B, K] and sinks [Hq]."""
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
    """Asserts that a compiled function is no less accurate than eager, and returns its report.
    `symbols` has (argument, dimension) of dynamic sizes."""
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


def merged(x):
    return x.reshape(-1, *x.shape[2:])
