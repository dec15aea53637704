"""Steps that must not fuse because of their order: a read, write, alias or user comes at the wrong
time.

For each step there is a similar step that fuses; where none is given, it is `plain`.
"""

from __future__ import annotations

import torch

from tests.compiler.steps import (
    D,
    cos_sin,
    plain,
    rms_norm,
    rotate,
    store,
)


def read_between(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    seen = k_cache.sum()
    store(v_cache, slots, v)
    return q * 2, seen


def copied_between(copy):
    def step(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        store(k_cache, slots, k)
        seen = copy(k_cache)
        store(v_cache, slots, v)
        return q * 2, seen

    return step


@torch.library.custom_op("tilewright_tests::attend", mutates_args=("out",))
def attend(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q.sum() + cache.sum())


@attend.register_fake
def _(q, cache, out):
    return None


def read_by_an_op_that_returns_nothing(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    out = torch.zeros(3)
    store(k_cache, slots, k)
    attend(x, cache=k_cache, out=out)
    store(v_cache, slots, v)
    return q * 2, out


def zeroed_between(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    k_cache[0] = 0
    store(v_cache, slots, v)
    return q * 2


def zeroed_before_and_after(m, x, k_cache, v_cache, slots):
    k_cache[0] = 0
    out = plain(m, x, k_cache, v_cache, slots)
    v_cache[0, 0] = 0
    return out


def scale_in_the_cache(m, x, k_cache, v_cache, slots):
    """The weight of the norm is a piece of the cache."""
    return _scaled(m, x, k_cache, v_cache, slots, weight=k_cache[0, 0, 0])


def scale_outside_the_cache(m, x, k_cache, v_cache, slots):
    return _scaled(m, x, k_cache, v_cache, slots, weight=x[0, :D])


def _scaled(m, x, k_cache, v_cache, slots, weight):
    q, k, v = m.qkv(x)
    normed_k, normed_q = rms_norm(k, weight), rms_norm(q, weight)
    store(k_cache, slots, normed_k)
    store(v_cache, slots, v)
    return normed_q * 2


def slots_moved_between(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    at = slots + 0
    first = at[:1]  # another name of the memory that is changed
    store(k_cache, at, k)
    keep = at.clone()
    at.add_(1)
    store(v_cache, keep, v)
    return q * 2 * (first >= 0)


def slots_moved_before(m, x, k_cache, v_cache, slots):
    at = slots + 0
    at.add_(1)
    return plain(m, x, k_cache, v_cache, at)


def activation_changed(change, seen=True):
    """Makes a step that changes an activation in place. `seen`: whether another view of the memory
    reads the change, so that it must stay in place."""

    def step(m, x, k_cache, v_cache, slots):
        h = x + 0
        name = h.view(-1)
        q, k, v = m.qkv(h)
        store(k_cache, slots, k)
        change(h)
        store(v_cache, slots, v)
        return q * 2 + name[0] if seen else q * 2

    return step


def key_returned(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2, k


def key_used(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2, k.sum()


def key_used_by_an_op_that_returns_nothing(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    out = torch.zeros(3)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    attend(k, cache=x, out=out)
    return q * 2, out


def query_used_first(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    early = q.sum()
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2, early


def query_norm_after(m, x, k_cache, v_cache, slots):
    """Computes the weight of the query's norm only after the write."""
    q, k, v = m.qkv(x)
    table = cos_sin()
    store(k_cache, slots, rotate(rms_norm(k, m.norm), *table))
    store(v_cache, slots, v)
    return rotate(rms_norm(q, m.norm.exp()), *table) * 2


def query_norm_before(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    table, weight = cos_sin(), m.norm.exp()
    store(k_cache, slots, rotate(rms_norm(k, m.norm), *table))
    store(v_cache, slots, v)
    return rotate(rms_norm(q, weight), *table) * 2
