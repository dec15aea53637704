"""The cache write alone, for heads whose projection could not be absorbed.

Even then a step should touch only the slots it writes: stock compilation of a write through a view
copies the whole cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewright.patterns import effects
from tilewright.patterns.cache_write import Addressing, WritePair, address, pairs
from tilewright.patterns.dataflow import Dataflow, View
from tilewright.patterns.language import Match, Stage, register, reject
from tilewright.patterns.qkv_cache import SUPPORTED_DTYPES, same_slots


@dataclass(frozen=True)
class CacheStore:
    """The pattern; see the module."""

    name: str = "cache_store"
    op: str = "paged_kv_store"

    def anchors(self, flow: Dataflow) -> Iterator[WritePair]:
        yield from pairs(flow)

    def match(self, anchor: WritePair, flow: Dataflow) -> Match:
        k_write, v_write = anchor.first, anchor.second
        k = address(k_write)
        v = address(v_write) if v_write is not None else None
        if v is not None and not same_slots(k, v, flow):
            reject(
                "SLOT_INDEX", Stage.GUARDS, "the two writes go to different slots", k_write.store
            )
        for write, place in ((k_write, k), (v_write, v)):
            if write is None or place is None:
                continue
            dtype = place.source.value.dtype
            if dtype != write.memory.dtype or dtype not in SUPPORTED_DTYPES:
                reject(
                    "DTYPE",
                    Stage.GUARDS,
                    f"{dtype} is written into a cache of {write.memory.dtype}; expected one of "
                    f"{', '.join(map(str, SUPPORTED_DTYPES))} for both",
                    write.store,
                )
        shared = v_write is not None and v_write.memory is k_write.memory
        arguments: dict[str, Any] = {
            "k": _heads(k),
            "v": None if v is None else _heads(v),
            "k_cache": k_write.memory.root,
            "v_cache": None if v_write is None or shared else v_write.memory.root,
            "slot_mapping": k.slot_mapping,
            "k_window": list(k.window),
            "v_window": list((v or k).window),
            "slots": k.slots,
            "indexing": "torch",
            "static_tokens": isinstance(effects.product(k.source.shape[: k.token_rank]), int),
        }
        store = k_write.store.store
        assert store is not None
        facts = {
            "heads": f"{k.window[2]}x{k.window[3]}",
            "writes": 1 if v is None else 2,
            "write": store.kind,
            "slots": k.slots,
            "cache": "x".join(str(n) for n in k.window[:4]),
        }
        return Match(
            pattern=self.name,
            op=self.op,
            anchor=k_write.store,
            arguments=arguments,
            results=(),
            absorbed=(),
            stores=anchor.stores,
            facts=facts,
            scope=k_write.store.scope,
        )


def _heads(place: Addressing) -> View:
    """The written heads as [T, H, D]."""
    source = place.source
    tokens = effects.product(source.shape[: place.token_rank])
    heads, dim = place.window[2:4]
    return View(source.value, effects.reshape(source.effect, (tokens, heads, dim)))


register(CacheStore())
