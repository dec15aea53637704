"""The cache write of multi-head latent attention. The op normalises the latent, rotates the rope
key, and writes both to the token's slot.

    x ─ linear ─┬─ norm ─▶ cache[slots, :L] = latent
                └─ rope ─▶ cache[slots, L:] = rope key          ⇒   mla_latent_store

The graph writes both parts to one tensor, together or one after the other, or to two tensors. The
projection is not a part of the op.

Dimension letters: T tokens, L latent rank, R width of the rope key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright.patterns import effects
from tilewright.patterns.cache.address import Address, address, check_pair
from tilewright.patterns.cache.latent_writes import latent_writes
from tilewright.patterns.cache.writes import CACHE_WRITES, CacheWrite, WritePair
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope
from tilewright.patterns.language import Match, Reject, Sought, Stage, register, reject
from tilewright.patterns.projection.epilogue import HeadNorm
from tilewright.patterns.projection.heads import Heads, match_heads, rope_table
from tilewright.patterns.projection.written import check_tokens
from tilewright.patterns.recognise.dtypes import check_dtypes
from tilewright.patterns.recognise.linear import Path

_PATH = Path("K_PATH", Stage.K_PATH, "the cache", masked="MASKED_WRITE")


@dataclass(frozen=True)
class MlaLatentStore:
    """Matches the cache write of multi-head latent attention."""

    name: str = "mla_latent_store"
    op: str = "mla_latent_store"
    asked_before: ClassVar[tuple[str, ...]] = (
        "qkv_cache",
    )  # qkv_cache would match a latent and its rope key as K and V.
    sought: ClassVar[Sought] = CACHE_WRITES

    def anchors(self, flow: Dataflow) -> Iterator[WritePair]:
        yield from latent_writes(flow)

    def match(self, anchor: WritePair, flow: Dataflow) -> Match:
        writes = [w for w in (anchor.first, anchor.second) if w is not None]
        parts = [_part(write, flow, anchor) for write in writes]
        parts.sort(key=lambda part: part.is_rope_key)
        latent, rope_key = (_known(part, i == 1) for i, part in enumerate(parts))
        _guard(latent, rope_key, flow)
        record = latent.write.record
        shared = latent.write.memory is rope_key.write.memory
        return Match(
            anchor=anchor.first.store,
            arguments={
                "latent": latent.rows,
                "k_rope": rope_key.rows,
                "latent_cache": latent.write.memory.root,
                "rope_cache": None if shared else rope_key.write.memory.root,
                "latent_window": latent.place.window.to_ints(),
                "rope_window": rope_key.place.window.to_ints(),
                **latent.place.slots.arguments,
                **_norm(latent.norm),
                **_rope(rope_key.heads),
            },
            absorbed=tuple(dict.fromkeys((*latent.absorbed, *rope_key.absorbed))),
            stores=anchor.stores,
            facts={
                "rank": latent.place.window.head_dim,
                "rope": rope_key.rope_fact,
                "norm": "none" if latent.norm is None else latent.norm.kind,
                "writes": len(anchor.stores),
                "write": record.kind,
                "slots": latent.place.slots.fact,
                "cache": "x".join(str(n) for n in latent.place.window.shape[:2]),
            },
            scope=common_scope(latent.rows.value.scope, anchor.first.store.scope),
            needs_kernel=True,
        )


@dataclass(frozen=True)
class Part:
    """A latent or a rope key that the graph writes to the cache.

    Attributes:
        write: The write of this part to the cache.
        place: The address of the write in the cache.
        heads: The projection that computes the written values; None if the match absorbs no value
            between the projection and the cache.
        rows: [T, L] or [T, R], the values before norm and rotation.
        absorbed: The values that disappear.
    """

    write: CacheWrite
    place: Address
    heads: Heads | None
    rows: View
    absorbed: tuple[Value, ...]

    @property
    def norm(self) -> HeadNorm | None:
        return None if self.heads is None else self.heads.norm

    @property
    def is_rope_key(self) -> tuple[bool, Any]:
        """A sort key that is larger for the part that is more likely the rope key. The rope key is
        rotated, has no norm, or is narrower."""
        rotated = self.heads is not None and self.heads.rope is not None
        return rotated, (self.norm is None, -int(self.place.window.head_dim))

    @property
    def rope_fact(self) -> str:
        rope = None if self.heads is None else self.heads.rope
        return "none" if rope is None else rope.style


def _part(write: CacheWrite, flow: Dataflow, anchor: WritePair) -> Part:
    place = address(write, flow)
    heads = _absorbable(place, flow, anchor)
    if heads is None:
        return _as_it_comes(write, place)
    below = {*heads.linear.absorbed}
    between = tuple(v for v in heads.absorbed if v not in below)
    return Part(write, place, heads, _rows(heads), (*place.absorbed, *between))


def _as_it_comes(write: CacheWrite, place: Address) -> Part:
    """Returns a part that the op stores unchanged, without norm or rotation."""
    rows = place.source.reshape(place.tokens, place.window.head_dim)
    return Part(write, place, None, rows, place.absorbed)


def _known(part: Part, is_rope_key: bool) -> Part:
    """Returns the part if the op supports its norm and rotation. Otherwise, returns a part that the
    op stores unchanged. The op supports an RMS norm of the latent with a weight, and a rotation of
    the whole rope key."""
    heads = part.heads
    if heads is None:
        return part
    norm, rope = heads.norm, heads.rope
    if is_rope_key:
        fits = norm is None and (rope is None or rope.rotary_dim == heads.head_dim)
    else:
        plain = norm is None or (norm.kind == "rms" and norm.weight is not None)
        fits = rope is None and plain and (norm is None or norm.bias is None)
    return part if fits else _as_it_comes(part.write, part.place)


def _absorbable(place: Address, flow: Dataflow, anchor: WritePair) -> Heads | None:
    """Returns the projection before norm and rotation, if no other value needs their results; else
    None."""
    try:
        heads = match_heads(place.source, _PATH)
        if check_tokens(heads, place, "latent", Stage.K_PATH) != 1:
            return None
    except Reject as rejection:
        if rejection.miss.code in (_PATH.code, "CAST"):
            return None  # the op cannot compute these latents, so it stores them unchanged
        raise
    whole = heads.linear.layout == effects.identity(heads.linear.value.shape)
    inside = {*heads.absorbed, *place.absorbed, *anchor.stores}
    for value in set(heads.absorbed) - set(heads.linear.absorbed):
        whole &= value not in flow.output_values
        whole &= inside.issuperset(flow.users.get(value, ()))
    return heads if whole else None


def _rows(heads: Heads) -> View:
    """Returns the columns of the projection's output that are these heads, [T, D]."""
    value = heads.linear.value
    feature = len(value.shape) - 1
    effect = effects.identity(value.shape)
    tokens = effects.product(value.shape[:-1])
    taken = effects.narrow(effect, feature, heads.rows.first, heads.head_dim)
    return View(value, effects.reshape(taken, (tokens, heads.head_dim)))


def _guard(latent: Part, rope_key: Part, flow: Dataflow) -> None:
    culprit = latent.write.store
    check_pair(latent.place, rope_key.place, flow, culprit)
    if latent.place.scale is not None or rope_key.place.scale is not None:
        reject("UNSUPPORTED", Stage.GUARDS, "a latent cache with a scale", culprit)
    dtypes = {part.place.dtype for part in (latent, rope_key)}
    dtypes |= {part.rows.value.dtype for part in (latent, rope_key)}
    dtypes |= {part.place.source.value.dtype for part in (latent, rope_key)}
    check_dtypes(dtypes, "latents and cache", culprit)


def _norm(norm: HeadNorm | None) -> dict[str, Any]:
    if norm is None:
        return {}
    return {"norm_weight": norm.with_factor.weight, "norm_eps": norm.eps}


def _rope(heads: Heads | None) -> dict[str, Any]:
    if heads is None or heads.rope is None:
        return {}
    rope = heads.rope
    return {
        "cos": rope_table(heads, rope.cos),
        "sin": rope_table(heads, rope.sin),
        "rope_style": rope.style,
    }


register(MlaLatentStore())
