"""A cache write without its projection, for heads whose projection could not be absorbed.

The op writes only the slots of the new tokens. With torch.compile alone, a write through a view
copies the whole cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.patterns.cache.address import Address, address, check_pair, place_arguments
from tilewright.patterns.cache.writes import CACHE_WRITES, CacheWrite, WritePair, pairs
from tilewright.patterns.dataflow import Dataflow, View
from tilewright.patterns.language import Match, Sought, Stage, as_advice, register, reject
from tilewright.patterns.recognise.dtypes import FLOATS, dtype_name, dtype_names


@dataclass(frozen=True)
class CacheStore:
    """Matches a cache write without its projection."""

    name: str = "cache_store"
    op: str = "paged_kv_store"
    asked_before: ClassVar[tuple[str, ...]] = ("mla_prefill",)
    sought: ClassVar[Sought] = CACHE_WRITES

    def anchors(self, flow: Dataflow) -> Iterator[WritePair]:
        found = list(pairs(flow))
        yield from found
        for pair in found:  # Two writes that do not match as a pair may match one by one.
            yield from pair.apart()

    def match(self, anchor: WritePair, flow: Dataflow) -> Match:
        if anchor.first.is_projected:
            return self._match(anchor, flow)
        with as_advice(anchor.node):  # nothing shows that these inputs are keys and values
            return self._match(anchor, flow)

    def _match(self, anchor: WritePair, flow: Dataflow) -> Match:
        k_write, v_write = anchor.first, anchor.second
        k = address(k_write, flow)
        v = address(v_write, flow) if v_write is not None else None
        if v is not None:
            check_pair(k, v, flow, k_write.store)
        for write, place in ((k_write, k), (v_write, v)):
            if write is not None and place is not None:
                _check_dtypes(write, place)
        shared = v_write is not None and v_write.memory is k_write.memory
        arguments: dict[str, Any] = {
            "k": _heads(k),
            "v": None if v is None else _heads(v),
            "k_cache": k_write.memory.root,
            "v_cache": None if v_write is None or shared else v_write.memory.root,
            **place_arguments(k, v),
            "static_tokens": isinstance(k.tokens, int),
        }
        facts = {
            "heads": f"{k.window.num_kv_heads}x{k.window.head_dim}",
            "writes": 1 if v is None else 2,
            "write": k_write.record.kind,
            "slots": k.slots.fact,
            "cache": "x".join(str(n) for n in k.window.shape),
        }
        return Match(
            anchor=k_write.store,
            arguments=arguments,
            stores=anchor.stores,
            facts=facts,
            scope=k_write.store.scope,
        )


def _check_dtypes(write: CacheWrite, place: Address) -> None:
    dtype = place.source.value.dtype
    rounds = place.dtype in FP8_DTYPES
    names = [dtype_name(d) for d in (dtype, place.dtype)]
    if dtype not in FLOATS or (dtype != place.dtype and not rounds):
        reject(
            "DTYPE",
            Stage.GUARDS,
            f"{names[0]} is written into a cache of {names[1]}; expected one of "
            f"{dtype_names(FLOATS)} for both, or 8-bit floats for the cache",
            write.store,
        )


def _heads(place: Address) -> View:
    """Returns the written heads as [T, H, D]."""
    source, (heads, dim) = place.source, place.window.shape[2:]
    return source.reshape(place.tokens, heads, dim)


register(CacheStore())
