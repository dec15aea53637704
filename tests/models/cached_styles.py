"""Attention over a static cache in the styles of public reference code, a function for each style.

    module, args = build("table_mask", phase="decode")      # one of STYLES

A style gets q [B, S, Hq, D], k and v [B, S, Hkv, D] (new tokens), its caches and the positions of
the tokens; it writes the caches and returns [B, S, Hq, D]. The styles are those of gpt-fast,
LitGPT, torchtune, the Llama 3 and 4 reference code, and of models that keep a window as a ring.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BATCH, HEADS, KV_HEADS, WIDTH, HIDDEN, LENGTH = 2, 4, 2, 16, 32, 12
GROUP = HEADS // KV_HEADS
CHUNK = 4
#: The position of the first new token.
START = 5


def merged(out):
    """Returns heads [B, H, S, D] as [B, S, H, D]."""
    return out.transpose(1, 2)


def heads_first(*tensors):
    return (x.transpose(1, 2) for x in tensors)


# --- keys by head [B, Hkv, L, D]: gpt-fast --------------------------------------------------------


def put(cache, positions, new):
    """Writes a cache through another view of its memory, as a cache module's `update` does."""
    out = cache
    out[:, :, positions] = new
    return out


def table_mask(q, k, v, keys, values, positions):
    """Masks with rows of a triangular matrix that the model computed once."""
    mask = triangle(keys.shape[2])[None, None, positions]
    q, k, v = heads_first(q, k, v)
    k, v = put(keys, positions, k), put(values, positions, v)
    k, v = (x.repeat_interleave(GROUP, dim=1) for x in (k, v))
    return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0))


def triangle(length):
    return torch.tril(torch.ones(length, length, dtype=torch.bool))


def table_mask_grouped(q, k, v, keys, values, positions):
    mask = triangle(keys.shape[2])[None, None, positions]
    q, k, v = heads_first(q, k, v)
    k, v = put(keys, positions, k), put(values, positions, v)
    return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True))


# --- index_copy_, expand, softcapping: LitGPT -----------------------------------------------------


def lit_mask(length):
    return torch.ones((length, length), dtype=torch.bool).tril().view(1, 1, length, length)


def lit_update(cache, positions, new):
    return cache.index_copy_(2, positions, new)


def expanded(x):
    b, h, length, width = x.shape
    x = x.unsqueeze(2).expand(b, h, GROUP, length, width)
    return x.reshape(b, h * GROUP, length, width)


def selected_mask(q, k, v, keys, values, positions):
    mask = lit_mask(keys.shape[2]).index_select(2, positions)
    q, k, v = heads_first(q, k, v)
    k, v = lit_update(keys, positions, k), lit_update(values, positions, v)
    k, v = expanded(k), expanded(v)
    scale = WIDTH**-0.5
    return merged(
        F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=0.0, scale=scale, is_causal=False
        )
    )


def selected_mask_capped(q, k, v, keys, values, positions):
    """Converts a boolean mask to numbers, minus infinity for a hidden key."""
    mask = lit_mask(keys.shape[2]).index_select(2, positions)
    q, k, v = heads_first(q, k, v)
    k, v = lit_update(keys, positions, k), lit_update(values, positions, v)
    k, v = expanded(k), expanded(v)
    scores = q @ k.mT * WIDTH**-0.5
    scores = torch.tanh(scores / 50.0) * 50.0
    numbers = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    scores = scores + numbers
    scores = F.softmax(scores, dim=-1, dtype=torch.float).to(dtype=q.dtype)
    return merged(scores @ v)


def window_of_table(q, k, v, keys, values, positions):
    """Makes the mask of a sliding window as the difference of two triangular matrices."""
    ones = torch.ones(keys.shape[2], keys.shape[2], dtype=torch.bool)
    band = ones.tril() & ones.triu(diagonal=-CHUNK + 1)
    q, k, v = heads_first(q, k, v)
    k, v = lit_update(keys, positions, k), lit_update(values, positions, v)
    k, v = expanded(k), expanded(v)
    return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=band[None, None, positions]))


# --- expand and flatten, and a mask for each sequence: torchtune
# --------------------------------------


def per_sequence_mask(q, k, v, keys, values, positions):
    mask = triangle(keys.shape[2])[positions.expand(q.shape[0], -1)]
    q, k, v = heads_first(q, k, v)
    k, v = put(keys, positions, k), put(values, positions, v)
    shape = (-1, KV_HEADS, GROUP, -1, -1)
    k, v = (x.unsqueeze(2).expand(*shape).flatten(1, 2) for x in (k, v))
    return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, :, :]))


# --- keys by token [B, L, Hkv, D]: Llama 3 and 4 --------------------------------------------------


def repeat_tokens(x):
    b, length, h, width = x.shape
    return x[:, :, :, None, :].expand(b, length, h, GROUP, width).reshape(b, length, -1, width)


def reference_update(keys, values, k, v, start):
    b, s = k.shape[:2]
    keys[:b, start : start + s] = k
    values[:b, start : start + s] = v
    return keys[:b, : start + s], values[:b, : start + s]


def reference_mask(q, start):
    """Returns an additive mask [S, start + S]; None for one token."""
    s = q.shape[1]
    if s == 1:
        return None
    mask = torch.full((s, s), float("-inf"))
    mask = torch.triu(mask, diagonal=1)
    return torch.hstack([torch.zeros((s, start)), mask]).type_as(q)


def added_triangle(q, k, v, keys, values, start):
    mask = reference_mask(q, start)
    k, v = reference_update(keys, values, k, v, start)
    k, v = repeat_tokens(k), repeat_tokens(v)
    q, k, v = heads_first(q, k, v)
    scores = torch.matmul(q, k.transpose(2, 3)) / WIDTH**0.5
    if mask is not None:
        scores = scores + mask
    scores = F.softmax(scores.float(), dim=-1).type_as(q)
    return merged(torch.matmul(scores, v))


def local_chunks(q, k, v, keys, values, start):
    """Uses an additive mask that is causal within chunks of positions."""
    s = q.shape[1]
    at, of = torch.arange(start, start + s), torch.arange(start + s)
    chunked = (at[:, None] // CHUNK == of[None] // CHUNK) & (of[None] <= at[:, None])
    mask = torch.where(chunked, 0.0, float("-inf")).to(q.dtype)
    k, v = reference_update(keys, values, k, v, start)
    q, k, v = heads_first(q, repeat_tokens(k), repeat_tokens(v))
    return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0))


# --- a window kept as a ring [B, Hkv, W, D] -------------------------------------------------------


def rolled_ring(q, k, v, keys, values, positions):
    """Shifts a full window: removes the oldest key and appends the newest. This style is for one
    token."""
    q, k, v = heads_first(q, k, v)
    new = []
    for cache, token in ((keys, k), (values, v)):
        full = torch.cat((cache[:, :, 1:], token), dim=2)
        cache.copy_(full)
        new.append(expanded(full))
    mask = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool)
    return merged(F.scaled_dot_product_attention(q, *new, attn_mask=mask))


def roll_and_copy(q, k, v, keys, values, positions):
    q, k, v = heads_first(q, k, v)
    new = []
    for cache, token in ((keys, k), (values, v)):
        moved = cache.roll(-1, dims=2)
        moved[:, :, -1:] = token
        cache.copy_(moved)
        new.append(expanded(moved))
    return merged(F.scaled_dot_product_attention(q, *new))


def modulo_ring(q, k, v, keys, values, positions):
    """Writes a token at its position modulo the window, and hides slots without a token."""
    window = keys.shape[2]
    at = positions % window
    q, k, v = heads_first(q, k, v)
    k, v = put(keys, at, k), put(values, at, v)
    slots = torch.arange(window)
    last = positions[-1]
    held = last - (last - slots) % window
    mask = (held >= 0) & (held[None] <= positions[:, None])
    k, v = expanded(k), expanded(v)
    return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def scattered_ring(q, k, v, keys, values, positions):
    """Writes by scatter_ along the window, with positions of each sequence."""
    window = keys.shape[2]
    at = (positions % window).view(1, 1, -1, 1).expand(BATCH, KV_HEADS, -1, WIDTH)
    q, k, v = heads_first(q, k, v)
    k, v = keys.scatter_(2, at, k), values.scatter_(2, at, v)
    seen = torch.arange(window) <= positions[:, None]
    return merged(F.scaled_dot_product_attention(q, expanded(k), expanded(v), attn_mask=seen))


#: For each style: (the dimensions of the cache, the way in which new tokens are placed, its
#: phases).
BY_HEAD, BY_TOKEN = (BATCH, KV_HEADS, LENGTH, WIDTH), (BATCH + 1, LENGTH, KV_HEADS, WIDTH)
BOTH, DECODE = ("prefill", "decode"), ("decode",)
STYLES = {
    table_mask: (BY_HEAD, "tensor", BOTH),
    table_mask_grouped: (BY_HEAD, "tensor", BOTH),
    selected_mask: (BY_HEAD, "tensor", BOTH),
    selected_mask_capped: (BY_HEAD, "tensor", BOTH),
    window_of_table: (BY_HEAD, "tensor", BOTH),
    per_sequence_mask: (BY_HEAD, "tensor", BOTH),
    added_triangle: (BY_TOKEN, "int", BOTH),
    local_chunks: (BY_TOKEN, "int", BOTH),
    rolled_ring: (BY_HEAD, "tensor", DECODE),
    roll_and_copy: (BY_HEAD, "tensor", DECODE),
    modulo_ring: (BY_HEAD, "tensor", DECODE),
    scattered_ring: (BY_HEAD, "tensor", DECODE),
}  # fmt: skip


class Layer(nn.Module):
    """Computes a projection, a style and a projection for x [B, S, K]."""

    def __init__(self, style) -> None:
        super().__init__()
        self.style = style
        self.wq = nn.Linear(HIDDEN, HEADS * WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * WIDTH, bias=False) for _ in range(2))
        self.wo = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(self, x, keys, values, place):
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH)) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.style(q, k, v, keys, values, place).flatten(2))


def build(style, phase="decode", dtype=torch.bfloat16):
    """Returns (layer, arguments). The numbers are seeded, so that equal calls return equal
    numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    shape, placed, _ = STYLES[style]
    layer = Layer(style).requires_grad_(False).to(dtype)
    for weight in layer.parameters():
        weight.data = normal(*weight.shape) * HIDDEN**-0.5
    count = 1 if phase == "decode" else 4
    positions = torch.arange(START, START + count)
    place = START if placed == "int" else positions
    return layer, [normal(BATCH, count, HIDDEN), normal(*shape), normal(*shape), place]
