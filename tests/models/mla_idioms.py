"""Small faithful models of multi-head latent attention, as serving engines write it.

    module, args = build("sdpa")                       # one of IDIOMS
    module, args = build("sdpa", concat="new_empty")     # any MlaAxes field changed

There is one sequence. `context` tokens lie in the paged latent cache, and `num_tokens` tokens
follow. The arguments are (x, positions [T], slots [T], every token's slot [C + T], block table [1,
W], caches...); calling the module writes the caches. The same name and axes give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import mla_attention, mla_weights, ropes
from tests.models.cache_writes import old_tokens
from tests.models.mla_attention import ATTENTIONS, absorbed, chunked

ROPES = {
    "half": ropes.half,
    "interleaved": ropes.interleaved,
    "complex": ropes.complex_numbers,
    "to_halves": ropes.to_halves,
    "none": lambda x, cos, sin: x,
}


@dataclass(frozen=True)
class MlaAxes:
    """The variants of a model.

    write, gather: keys of WRITES and of GATHERS.
    kv_a: "alone", or "with_q" (one linear for both down-projections).
    kv_b: a key of `mla_weights.FORMS`.
    concat: a key of CONCATS.
    attention: a key of `mla_attention.ATTENTIONS`, "absorbed" or "chunked".
    norm: "eager" or "fused".
    """

    write: str = "joined"
    gather: str = "getitem"
    kv_a: str = "alone"
    kv_b: str = "dense"
    q_lora: bool = True
    rope: str = "half"
    norm: str = "eager"
    concat: str = "cat"
    attention: str = "masked"
    num_tokens: int = 10
    context: int = 6
    hidden: int = 64
    num_heads: int = 4
    q_rank: int = 48
    kv_rank: int = 40
    nope: int = 24
    rotated: int = 16
    v_dim: int = 32
    num_pages: int = 5
    page_size: int = 8
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return (self.nope + self.rotated) ** -0.5


# --- writes ---------------------------------------------------------------------------------------


def joined(caches, latent, rope_key, slots, page_size):
    """Writes latents and rope keys at once into one tensor."""
    (cache,) = caches
    cache.view(-1, cache.shape[-1])[slots] = torch.cat((latent, rope_key), dim=-1)


def joined_page_offset(caches, latent, rope_key, slots, page_size):
    (cache,) = caches
    cache[slots // page_size, slots % page_size] = torch.cat((latent, rope_key), dim=-1)


def joined_index_copy(caches, latent, rope_key, slots, page_size):
    (cache,) = caches
    flat = cache.view(-1, cache.shape[-1])
    flat.index_copy_(0, slots, torch.cat((latent, rope_key), dim=-1))


def two_slices(caches, latent, rope_key, slots, page_size):
    (cache,) = caches
    flat = cache.view(-1, cache.shape[-1])
    flat[slots, : latent.shape[-1]] = latent
    flat[slots, latent.shape[-1] :] = rope_key


def two_slices_rope_first(caches, latent, rope_key, slots, page_size):
    (cache,) = caches
    flat = cache.view(-1, cache.shape[-1])
    flat[slots, latent.shape[-1] :] = rope_key
    flat[slots, : latent.shape[-1]] = latent


def two_caches(caches, latent, rope_key, slots, page_size):
    """Writes latents and rope keys into separate tensors."""
    for cache, rows in zip(caches, (latent, rope_key), strict=True):
        cache.view(-1, cache.shape[-1])[slots] = rows


def with_head(caches, latent, rope_key, slots, page_size):
    """Writes into a cache that has a dimension for its single head."""
    (cache,) = caches
    rows = torch.cat((latent, rope_key), dim=-1)
    cache.view(-1, 1, cache.shape[-1])[slots] = rows.unsqueeze(1)


WRITES = {
    f.__name__: f
    for f in (
        joined,
        joined_page_offset,
        joined_index_copy,
        two_slices,
        two_slices_rope_first,
        two_caches,
        with_head,
    )
}


def caches_of(axes: MlaAxes) -> list[torch.Tensor]:
    pages = (axes.num_pages, axes.page_size)
    if axes.write == "two_caches":
        widths: tuple[tuple[int, ...], ...] = ((axes.kv_rank,), (axes.rotated,))
    elif axes.write == "with_head":
        widths = ((1, axes.kv_rank + axes.rotated),)
    else:
        widths = ((axes.kv_rank + axes.rotated,),)
    return [old_tokens(*pages, *width, dtype=axes.dtype) for width in widths]


# --- reads ----------------------------------------------------------------------------------------


def rows_of(caches, take):
    """Returns (latents, rope keys) of the rows that `take` selects from each cache."""
    rows = [take(cache) for cache in caches]
    return torch.cat(rows, dim=-1) if len(rows) == 2 else rows[0]


def getitem(caches, all_slots, block_table):
    return rows_of(caches, lambda c: c.view(-1, c.shape[-1])[all_slots])


def index_select(caches, all_slots, block_table):
    return rows_of(caches, lambda c: c.view(-1, c.shape[-1]).index_select(0, all_slots))


def blocks(caches, all_slots, block_table):
    """Gathers whole pages by the block table, and masks the rest of the last page."""
    return rows_of(caches, lambda c: c[block_table[0]].flatten(0, 1).flatten(1))


GATHERS = {f.__name__: f for f in (getitem, index_select, blocks)}


# --- keys -----------------------------------------------------------------------------------------


def cat(k_nope, rope_key):
    k_pe = rope_key.unsqueeze(1).expand(-1, k_nope.shape[1], -1)
    return torch.cat((k_nope, k_pe), dim=-1)


def new_empty(k_nope, rope_key):
    width = k_nope.shape[-1]
    keys = k_nope.new_empty(*k_nope.shape[:2], width + rope_key.shape[-1])
    keys[..., :width] = k_nope
    keys[..., width:] = rope_key.unsqueeze(1)
    return keys


def repeated(k_nope, rope_key):
    k_pe = rope_key.unsqueeze(1).repeat(1, k_nope.shape[1], 1)
    return torch.concat([k_nope, k_pe], -1)


def left_apart(k_nope, rope_key):
    return k_nope, rope_key


CONCATS = {f.__name__: f for f in (cat, new_empty, repeated)}


class RmsNorm(nn.Module):
    def __init__(self, width: int, form: str) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if self.form == "fused":
            return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)
        wide = x.float() if x.dtype.itemsize < 4 else x
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


class Mla(nn.Module):
    """The model. Each of its steps is an attribute, so that a test can replace it."""

    def __init__(self, axes: MlaAxes) -> None:
        super().__init__()
        self.axes = axes
        heads, qk_dim = axes.num_heads, axes.nope + axes.rotated
        down = axes.kv_rank + axes.rotated
        self.kv_a = nn.Linear(axes.hidden, down + axes.q_rank * (axes.kv_a == "with_q"), bias=False)
        self.q_a = nn.Linear(axes.hidden, axes.q_rank, bias=False)
        self.q_norm = RmsNorm(axes.q_rank, axes.norm)
        self.kv_norm = RmsNorm(axes.kv_rank, axes.norm)
        self.q_b = nn.Linear(
            axes.q_rank if axes.q_lora else axes.hidden, heads * qk_dim, bias=False
        )
        self.kv_b = mla_weights.FORMS[axes.kv_b](axes)
        self.o_proj = nn.Linear(heads * axes.v_dim, axes.hidden, bias=False)
        self.rope: Callable[..., Any] = ROPES[axes.rope]
        self.key_rope: Callable[..., Any] = ROPES[axes.rope]
        self.write: Callable[..., Any] = WRITES[axes.write]
        self.gather: Callable[..., Any] = GATHERS[axes.gather]
        apart = axes.attention.startswith("apart")
        self.concat: Callable[..., Any] = left_apart if apart else CONCATS[axes.concat]
        self.attend: Callable[..., Any] = ATTENTIONS.get(axes.attention, mla_attention.masked)
        self.slots_of: Callable[..., Any] = lambda slots: slots
        self.latents_of: Callable[..., Any] = lambda latents: latents
        self.rope_keys_of: Callable[..., Any] = lambda rope_keys: rope_keys
        self.split_of: Callable[..., Any] = lambda kv: kv.split([axes.nope, axes.v_dim], dim=-1)
        self.values_of: Callable[..., Any] = lambda values, x: values
        self.keys_of: Callable[..., Any] = lambda keys: keys
        self.scale = axes.scale

    def projected(self, x):
        """Returns (q [T, H, n + r], latent [T, L], rope key [T, r]), without norm and rotation."""
        axes = self.axes
        widths = [axes.kv_rank, axes.rotated]
        if axes.kv_a == "with_q":
            q, latent, rope_key = self.kv_a(x).split([axes.q_rank, *widths], dim=-1)
            q = self.q_b(self.q_norm(q)) if axes.q_lora else self.q_b(x)
        else:
            latent, rope_key = self.kv_a(x).split(widths, dim=-1)
            q = self.q_b(self.q_norm(self.q_a(x))) if axes.q_lora else self.q_b(x)
        return q.view(-1, axes.num_heads, axes.nope + axes.rotated), latent, rope_key

    def forward(self, x, positions, slots, all_slots, block_table, *caches):
        axes = self.axes
        q, latent, rope_key = self.projected(x)
        latent = self.kv_norm(latent)
        cos, sin = tables(positions, axes)
        q_nope, q_pe = q.split([axes.nope, axes.rotated], dim=-1)
        q_pe = self.rope(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        rope_key = self.key_rope(rope_key, cos, sin)
        self.write(caches, latent, rope_key, self.slots_of(slots), axes.page_size)
        if axes.attention == "absorbed":
            rows = self.gather(caches, all_slots, block_table)
            out = absorbed(q_nope, q_pe, rows, self.kv_b.weight, positions, axes)
            return self.o_proj(out.flatten(1))
        q = torch.cat((q_nope, q_pe), dim=-1)
        if axes.attention == "chunked":
            out = chunked(self, q, caches, all_slots, block_table, positions)
            return self.o_proj(out.flatten(1))
        keys, values = self.up_projected(self.gather(caches, all_slots, block_table))
        out = self.attend(q, keys, self.values_of(values, x), positions, self.scale)
        return self.o_proj(out.flatten(1))

    def up_projected(self, rows):
        """Returns keys [K, H, n + r] and values [K, H, v]."""
        axes = self.axes
        latents, rope_keys = rows.split([axes.kv_rank, axes.rotated], dim=-1)
        kv = self.kv_b(self.latents_of(latents)).view(-1, axes.num_heads, axes.nope + axes.v_dim)
        k_nope, values = self.split_of(kv)
        return self.keys_of(self.concat(k_nope, self.rope_keys_of(rope_keys))), values


def tables(positions, axes: MlaAxes):
    steps = torch.arange(0, axes.rotated, 2, device=positions.device) / axes.rotated
    angles = positions[:, None].float() * 10000.0**-steps
    return angles.cos().to(axes.dtype), angles.sin().to(axes.dtype)


#: For each name, the fields of MlaAxes that differ.
IDIOMS: dict[str, dict[str, Any]] = {"plain": {}}
IDIOMS |= {f"write_{name}": {"write": name} for name in WRITES}
IDIOMS |= {f"gather_{name}": {"gather": name} for name in GATHERS}
IDIOMS |= {f"rope_{name}": {"rope": name} for name in ROPES}
IDIOMS |= {f"concat_{name}": {"concat": name} for name in CONCATS}
IDIOMS |= {f"attention_{name}": {"attention": name} for name in ATTENTIONS}
IDIOMS |= {f"kv_b_{name}": {"kv_b": name} for name in mla_weights.FORMS}
IDIOMS |= {
    "kv_a_with_q": {"kv_a": "with_q"},
    "no_q_lora": {"q_lora": False},
    "norm_fused": {"norm": "fused"},
    "one_token": {"num_tokens": 1},
    "no_context": {"context": 0, "attention": "causal"},
    "two_caches_blocks": {"write": "two_caches", "gather": "blocks", "concat": "new_empty"},
    "absorbed": {"attention": "absorbed"},
    "absorbed_blocks": {"attention": "absorbed", "gather": "blocks"},
    "absorbed_two_caches": {"attention": "absorbed", "write": "two_caches", "gather": "blocks"},
    "absorbed_with_head": {"attention": "absorbed", "write": "with_head", "gather": "index_select"},
    "chunked": {"attention": "chunked"},
}
#: One name for each distinct module. Several idioms are the same module as "plain".
MODULES = list({MlaAxes(**axes): name for name, axes in reversed(IDIOMS.items())}.values())


def build(name: str, **changes: Any):
    """Returns (module, args) of an idiom, with any fields of MlaAxes changed."""
    axes = replace(MlaAxes(), **{**IDIOMS[name], **changes})
    module = Mla(axes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            base = 1.0 + 0.1 * spread if parameter.dim() == 1 else spread * axes.hidden**-0.5
            if parameter.dtype.itemsize > 1:
                parameter.data = base.to(axes.dtype)
            parameter.requires_grad_(False)
    total = axes.context + axes.num_tokens
    x = torch.randn(axes.num_tokens, axes.hidden, generator=generator).to(axes.dtype)
    pages = -(-total // axes.page_size)
    # The pages of the sequence are scattered and in no order.
    block_table = ((torch.arange(pages) * 3 + 1) % axes.num_pages)[None]
    where = torch.arange(total)
    slots = block_table[0][where // axes.page_size] * axes.page_size + where % axes.page_size
    new = where[axes.context :]
    return module.eval(), (x, new, slots[axes.context :], slots, block_table, *caches_of(axes))
