"""Small faithful models of "project q, k and v, write the cache, attend to it", by name.

    module, args = build("page_offset")                       # one of IDIOMS
    module, args = build("index_copy", rope="interleaved")    # any Axes field changed

The arguments hold the caches, and calling the module writes them. The same name and axes give the
same numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import cache_writes, fp8_writes
from tests.models.attention import Axes, Decoder, Rope
from tests.models.cache_writes import BATCHED, Step, old_tokens
from tests.models.norms import AFTER, BEFORE, HeadNorms
from tests.models.projections import FORMS

PAGED = cache_writes.PAGED | fp8_writes.PAGED


class PagedAttention(nn.Module):
    """Processes ragged tokens x [T, K]. Every token attends to its own sequence through the block
    table."""

    def __init__(self, axes: Axes, form, layer: int) -> None:
        super().__init__()
        self.axes, self.write, self.gather, self.layer = axes, form.write, form.gather, layer
        self.projection = FORMS[axes.projection](axes)
        self.norm, self.norm_after = (head_norms(axes, after) for after in (False, True))
        self.rope = Rope(axes)
        self.o_proj = nn.Linear(axes.num_heads * axes.head_dim, axes.hidden, bias=False)

    def forward(self, x, positions, seq, block_table, slots, *caches):
        step = Step(positions, seq, block_table, slots, self.axes.page_size)
        q, k, v = self.projection(x)
        q, k = self.rope(*self.norm(q, k), positions)
        q, k = self.norm_after(q, k)
        q = scaled(q, self.axes)
        changed = self.write(caches, self.layer, k, v, step)
        caches = caches if changed is None else changed
        keys, values = self.gather(caches, self.layer, step)
        seen = torch.arange(keys.shape[1], device=x.device) <= positions[:, None]
        out = F.scaled_dot_product_attention(
            q.unsqueeze(2),
            keys.transpose(1, 2).to(q.dtype),
            values.transpose(1, 2).to(q.dtype),
            attn_mask=seen[:, None, None, :],
            enable_gqa=True,
        )
        return self.o_proj(out.squeeze(2).flatten(1))


class BatchedAttention(nn.Module):
    """Processes a batch x [B, S, K] with one cache row for each sequence, as Hugging Face models
    do."""

    def __init__(self, axes: Axes, write, layer: int) -> None:
        super().__init__()
        self.axes, self.write, self.layer = axes, write, layer
        self.projection = FORMS[axes.projection](axes)
        self.norm, self.norm_after = (head_norms(axes, after) for after in (False, True))
        self.rope = Rope(axes, heads_first=True)
        self.o_proj = nn.Linear(axes.num_heads * axes.head_dim, axes.hidden, bias=False)

    def forward(self, x, positions, start, *caches):
        q, k, v = self.projection(x)
        q, k = (heads.transpose(1, 2) for heads in self.norm(q, k))
        q, k = self.norm_after(*self.rope(q, k, positions.unsqueeze(0)))
        q = scaled(q, self.axes)
        place = positions if start is None else start
        caches = caches[2 * self.layer : 2 * self.layer + 2]
        keys, values = self.write(*caches, k, v.transpose(1, 2), place)
        seen = torch.arange(keys.shape[2], device=x.device) <= positions[:, None]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def scaled(q, axes):
    return q if axes.query_scale == 1.0 else q * axes.query_scale


def head_norms(axes, after):
    kv_heads = axes.projected_kv_heads or axes.num_kv_heads
    return HeadNorms(axes.norm, (axes.num_heads, kv_heads), axes.head_dim, after)


def finish(module, axes):
    """Gives a module seeded weights in the dtype of the axes, without gradients. Rope tables stay
    as they were made."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            base = 1.0 + 0.1 * spread if parameter.dim() == 1 else spread * axes.hidden**-0.5
            parameter.data = base.to(axes.dtype)
            parameter.requires_grad_(False)
    return module.eval()


def paged(form_name, axes):
    form = PAGED[form_name]
    module = Decoder(axes, lambda layer: PagedAttention(axes, form, layer))
    # The three sequences already have tokens, in pages that are not adjacent.
    tokens = torch.arange(axes.num_tokens)
    seq = torch.minimum(tokens // 4, torch.tensor(2))
    positions = tokens - 4 * seq + torch.tensor([3, 6, 0])[seq]
    width = axes.num_pages // 3
    block_table = torch.arange(axes.num_pages).view(width, 3).T.contiguous().flip(0)
    pages = block_table[seq, positions // axes.page_size]
    slots = pages * axes.page_size + positions % axes.page_size
    if form_name in ("masked", "where"):
        slots[-1] = -1
    return finish(module, axes), (
        activations(axes.num_tokens, axes),
        positions,
        seq,
        block_table,
        slots,
        *form.caches(axes),
    )


def batched(form_name, axes):
    module = Decoder(axes, lambda layer: BatchedAttention(axes, BATCHED[form_name], layer))
    batch, length, max_length, start = 2, axes.num_tokens // 2, 32, 4
    shape = (batch, axes.num_kv_heads, max_length, axes.head_dim)
    if form_name == "llama_reference":
        shape = (batch + 1, max_length, axes.num_kv_heads, axes.head_dim)
    caches = [old_tokens(*shape, dtype=axes.dtype) for _ in range(2 * axes.num_layers)]
    positions = torch.arange(start, start + length)
    by_int = form_name in ("llama_reference", "narrow_copy")
    x = activations(batch * length, axes).view(batch, length, axes.hidden)
    return finish(module, axes), (x, positions, start if by_int else None, *caches)


def activations(count, axes):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, axes.hidden, generator=generator).to(axes.dtype)


EQUAL_HEADS = {"num_kv_heads": 4}
ONE_HEAD = {"num_kv_heads": 1}
REPEATED = {"num_kv_heads": 4, "projected_kv_heads": 2}
NO_ROPE = {"rope": "none"}
VARIANTS = {
    "packed_split": {"projection": "packed_split"},
    "packed_slice": {"projection": "packed_slice"},
    "packed_chunk": {"projection": "packed_chunk", **EQUAL_HEADS},
    "per_head": {"projection": "per_head", "bias": True, "rope": "partial", **EQUAL_HEADS},
    "bias": {"bias": True},
    **{f"norm_{form}": {"norm": form} for form in (*BEFORE[1:], *AFTER)},
    "rope_none": {"rope": "none"},
    "rope_half_chunk": {"rope": "half_chunk", "table": "gathered"},
    "rope_interleaved": {"rope": "interleaved"},
    "rope_partial": {"rope": "partial"},
    "rope_complex": {"rope": "complex"},
    "rope_to_halves": {"rope": "to_halves"},
    "table_gathered": {"table": "gathered"},
    "two_layers": {"num_layers": 2},
}

#: Forms of the projection: with a rotation, and forms whose query is recognised without one.
PROJECTIONS = {
    "clamped": {},
    "scaled_query": NO_ROPE,
    "packed_clamped": {"bias": True},
    "packed_unbind": EQUAL_HEADS,
    "packed_head_split": {},
    "list_index": ONE_HEAD,
    "grouped": {"bias": True},
    "grouped_broadcast": REPEATED,
    "repeated_heads": REPEATED,
    "conv1d": {},
    "unsqueezed": ONE_HEAD,
    "q_and_kv": {},
    "einsum": {},
    "einsum_hidden_first": {},
    "einsum_packed": {},
    "from_the_right": {},
    "matmul_by_head": {},
    "bmm_of_one": {},
    "joined_weights": {},
    "bias_apart": {},
    "bias_by_head": {},
    "bias_of_parts": {},
}
WITH_ROPE_ONLY = {"clamped", "scaled_query", "einsum_hidden_first", "from_the_right", "bmm_of_one"}
TOLD_APART = [form for form in PROJECTIONS if form not in WITH_ROPE_ONLY]
VARIANTS |= {f"p_{form}": {"projection": form, **more} for form, more in PROJECTIONS.items()}
VARIANTS |= {f"{v}_no_rope": VARIANTS[v] | NO_ROPE for v in (f"p_{form}" for form in TOLD_APART)}
VARIANTS |= {
    "per_head_no_rope": VARIANTS["per_head"] | NO_ROPE,
    "packed_no_rope": {"projection": "packed_split", **NO_ROPE, "num_layers": 2},
    "scaled_after_rope": {"query_scale": 0.25},
    "parallel_mlp": {"parallel_mlp": True, "num_layers": 2},
    "parallel_mlp_no_rope": {"parallel_mlp": True, "num_layers": 2, **NO_ROPE},
    "packed_parallel_mlp_no_rope": {"projection": "packed_split", "parallel_mlp": True, **NO_ROPE},
}

#: For each name: (write form, changes of Axes). Every write form occurs, and then the other axes on
#: two of these forms.
IDIOMS = {name: (name, {}) for name in (*PAGED, *BATCHED)}
IDIOMS |= {f"{axis}_paged": ("page_offset", changes) for axis, changes in VARIANTS.items()}
IDIOMS |= {f"{axis}_static": ("static_cache", changes) for axis, changes in VARIANTS.items()}


def axes_of(name, **changes):
    """Returns the Axes of an idiom. `changes` are fields of Axes."""
    return replace(Axes(), **{**IDIOMS[name][1], **changes})


def build(name, **changes):
    """Returns (module, args) of an idiom. `changes` are fields of Axes."""
    form_name = IDIOMS[name][0]
    return (paged if form_name in PAGED else batched)(form_name, axes_of(name, **changes))
