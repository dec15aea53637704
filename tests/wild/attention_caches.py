"""Styles of writing a cache, and of other operations next to an attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.wild.attention_pieces import (
    BATCH,
    KV_HEADS,
    LENGTH,
    SEQ,
    WIDTH,
    Style,
    attend,
    cos_sin,
    project,
    rotate,
    rotate_half,
    store,
    usual,
)

# --- writes ---------------------------------------------------------------------------------------


def rows_unrolled(m, x, keys, values, positions):
    """Writes each sequence by a separate call, as LitGPT does with positions [B, S]."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions[:, None]), rotate(k, positions[:, None])
    for cache, new in ((keys, k), (values, v)):
        for i in range(BATCH):
            cache[i].index_copy_(1, positions[i], new[i])
    return attend(q, keys, values, positions)


def rows_crossed(m, x, keys, values, positions):
    """Near miss: the tokens of sequence 0 go to the slots of sequence 1."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions[:, None]), rotate(k, positions[:, None])
    for cache, new in ((keys, k), (values, v)):
        for i in range(BATCH):
            cache[i].index_copy_(1, positions[i], new[1 - i])
    return attend(q, keys, values, positions)


def scattered_rows(m, x, keys, values, positions):
    """Writes by scatter_ with [B, 1, T, 1] expanded over heads and columns, as Moshi does.
    Positions are modulo L."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions[:, None]), rotate(k, positions[:, None])
    at = (positions % LENGTH).view(BATCH, 1, SEQ, 1)
    at = at.expand(-1, KV_HEADS, SEQ, WIDTH)
    keys.scatter_(2, at, k)
    values.scatter_(2, at, v)
    return attend(q, keys, values, positions)


def scattered_heads(m, x, keys, values, positions):
    """Near miss: the slot also depends on the head."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    at = positions.view(BATCH, 1, SEQ, 1) + torch.arange(KV_HEADS).view(1, KV_HEADS, 1, 1)
    at = (at % LENGTH).expand(-1, -1, SEQ, WIDTH)
    keys.scatter_(2, at, k)
    values.scatter_(2, at, v)
    return attend(q, keys, values, positions)


def put_rows(m, x, keys, values, positions):
    """Writes by index_put_ with sequence and position, into caches ordered by token [B, L, Hkv,
    D]."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions[:, None]).transpose(1, 2) for t in (q, k))
    rows = torch.arange(BATCH)[:, None]
    keys.index_put_((rows, positions), k)
    values.index_put_((rows, positions), v)
    return attend(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), positions)


def put_rows_heads_first(m, x, keys, values, positions):
    """Writes in the same way as `put_rows`, but into caches [B, Hkv, L, D], with the heads between
    the indices."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions[:, None]).transpose(1, 2) for t in (q, k))
    rows = torch.arange(BATCH)[:, None]
    keys[rows, :, positions] = k
    values[rows, :, positions] = v
    return attend(q.transpose(1, 2), keys, values, positions)


def rolled(m, x, keys, values, positions):
    """Shifts a full window as transformers does: removes the oldest token and appends the
    newest."""
    q, k, v = (t.transpose(1, 2)[:, :, :1] for t in project(m, x))
    seen = []
    for cache, new in ((keys, k), (values, v)):
        whole = torch.cat((cache[:, :, 1:], new), dim=-2)
        cache.copy_(whole)
        seen.append(whole)
    return F.scaled_dot_product_attention(q, *seen, enable_gqa=True).transpose(1, 2).flatten(2)


# --- what stands beside ---------------------------------------------------------------------------


def sum_after(m, x, keys, values, positions):
    """Adds a value to the query that the graph computes only later."""
    q, k, v = project(m, x)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    keys, values = store(keys, values, positions, k, v)
    q = q + x.sum() * 0
    return attend(q, keys, values, positions)


def query_capped(m, x, keys, values, positions):
    """Applies an operation that the op lacks to the finished queries, before the caches are
    written."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions), rotate(k, positions)
    q = torch.where(positions[:, None] > 4, 5.0 * torch.tanh(q / 5.0), q)
    return attend(q, *store(keys, values, positions, k, v), positions)


def query_by_old_cache(m, x, keys, values, positions):
    """Near miss of `query_capped`: the operation reads the old content of the cache."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions), rotate(k, positions)
    q = torch.maximum(q, keys[:, :1, 4 : 4 + SEQ])
    return attend(q, *store(keys, values, positions, k, v), positions)


def beside_convolution(m, x, keys, values, positions):
    """Has a convolution next to the attention, and keeps its last inputs [B, C, width], as LFM2
    does."""
    m.inputs.copy_(torch.cat((m.inputs, m.wk(x).transpose(1, 2)), -1)[..., -m.inputs.shape[-1] :])
    return usual(*project(m, x), keys, values, positions)


def beside_recurrence(m, x, keys, values, positions):
    """Has a state [B, H, D, D] that decays and takes up new keys and values, as gated linear
    attention does."""
    _, k, v = project(m, x.flip(-1))
    decay = torch.exp(-F.softplus(k.float().mean(dim=(1, 3)))[..., None, None])
    m.state.copy_(m.state * decay + torch.einsum("bshk,bshv->bhkv", k.float(), v.float()))
    return usual(*project(m, x), keys, values, positions)


def beside_recurrence_by_head(m, x, keys, values, positions):
    """Replaces each head's part of a state separately, as Zamba does. Time steps come from two
    products with a matrix for each head, and a bias."""
    _, k, v = project(m, x[:, :1].flip(-1))
    steps = m.up[:, None] @ (m.down[:, None] @ k.permute(2, 0, 3, 1)) + m.step_bias
    for head in range(KV_HEADS):
        decay = torch.exp(-F.softplus(steps[head].float()))
        new = k[:, 0, head, :, None].float() * v[:, 0, head, None].float()
        m.state[:, head].copy_(m.state[:, head] * decay + new)
    return usual(*project(m, x), keys, values, positions)


def replaced_whole(m, x, keys, values, positions):
    """Near miss: the caches are replaced by as many tokens as they have slots, without an index."""
    q, k, v = project(m, x.repeat(1, LENGTH // SEQ, 1))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    keys.copy_(k)
    values.copy_(v)
    return attend(q[:, :, :SEQ], keys, values, positions)


def replaced_by_joined(m, x, keys, values, positions):
    """Replaces the caches as `replaced_whole` does. The last operation on the heads joins their
    parts."""

    def turned(t):
        return torch.cat((t[..., : WIDTH // 2].tanh(), t[..., WIDTH // 2 :]), -1)

    q, k, v = project(m, x.repeat(1, LENGTH // SEQ, 1))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    keys.copy_(turned(k))
    values.copy_(torch.stack(v.unbind(1), 1))
    return attend(turned(q)[:, :, :SEQ], keys, values, positions)


def query_in_float32(m, x, keys, values, positions):
    """Has tables in fp32, as CodeGen does. Keys are rounded for the cache, but queries stay in
    fp32."""
    cos, sin = cos_sin(positions)
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
    keys, values = store(keys, values, positions, k.to(x.dtype), v)
    return attend(q, keys.to(q.dtype), values.to(q.dtype), positions).to(x.dtype)


def cross_once(m, x, keys, values, positions):
    """Writes the keys and values of an encoder's states once. Queries are computed from x."""
    states = m.states
    q = m.wq(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
    k, v = (w(states).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for w in (m.wk, m.wv))
    keys, values = store(keys, values, torch.arange(states.shape[1]), k, v)
    out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


STYLES = (
    Style(query_capped),
    Style(query_by_old_cache),
    Style(rows_unrolled, by_row=True),
    Style(rows_crossed, by_row=True),
    Style(scattered_rows, by_row=True),
    Style(scattered_heads, by_row=True),
    Style(put_rows, by_row=True, by_token=True),
    Style(put_rows_heads_first, by_row=True),
    Style(rolled),
    Style(sum_after),
    Style(beside_convolution, names=("inputs",)),
    Style(beside_recurrence, names=("state",)),
    Style(beside_recurrence_by_head, names=("state", "steps")),
    Style(replaced_whole),
    Style(replaced_by_joined),
    Style(query_in_float32),
    Style(cross_once, names=("states",)),
)
