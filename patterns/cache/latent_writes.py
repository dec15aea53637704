"""Finds writes of latents. Each token has one entry for all heads, which consists of a normalised
latent and a rotated key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.patterns import effects
from tilewright.patterns.cache.writes import CacheWrite, WritePair, cache_writes, same_slots
from tilewright.patterns.dataflow import Dataflow
from tilewright.patterns.recognise.gemm import piece_of


def latent_writes(flow: Dataflow) -> Iterator[WritePair]:
    """Yields pairs of writes that have one head, the same slots and different widths.

    A single write of two such parts side by side is yielded as a pair as well.
    """
    pending: CacheWrite | None = None
    for write in cache_writes(flow):
        both = _columns(write)
        if both is not None:
            yield WritePair(*both)
            pending = None
        elif pending is not None and _belong(pending, write):
            yield WritePair(pending, write)
            pending = None
        else:
            pending = write if _has_one_head(write) else None


def _has_one_head(write: CacheWrite) -> bool:
    rest = write.rest
    return write.written is not None and len(rest) >= 2 and write.target.dims[rest[-2]] == ()


def _belong(one: CacheWrite, other: CacheWrite) -> bool:
    if not _has_one_head(other) or one.written is None or other.written is None:
        return False
    (*tokens, width), (*others, other_width) = one.written.view.shape, other.written.view.shape
    return (
        tokens == others
        and width != other_width
        and one.memory.dtype == other.memory.dtype
        and same_slots(one, other)
    )


def _columns(write: CacheWrite) -> tuple[CacheWrite, CacheWrite] | None:
    """Splits `cache[slots] = cat([latent, rope_key], -1)` into two writes."""
    written = write.written
    if written is None or not _has_one_head(write) or written.view.value.op != "aten.cat":
        return None
    view, last = written.view, len(written.view.shape) - 1
    pieces, axis = view.value.args
    whole = effects.identity(view.value.shape).dims[axis]
    widths = [piece.shape[axis] for piece in pieces]
    if len(pieces) != 2 or view.effect.dims[-1] != whole or view.effect.start[axis] != 0:
        return None
    if not all(isinstance(width, int) for width in widths) or widths[0] == widths[1]:
        return None
    element = write.rest[-1]
    found = []
    for first, width in zip((0, widths[0]), widths, strict=True):
        part = written.through(effects.narrow(effects.identity(view.shape), last, first, width))
        between = (*written.between, view.value)
        part = replace(part, view=piece_of(part.view), between=between)
        target = effects.narrow(write.target, element, first, width)
        found.append(replace(write, target=target, written=part))
    return found[0], found[1]
