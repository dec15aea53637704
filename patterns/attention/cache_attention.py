"""Attention that reads each key-value head once, where it is stored, for example in a cache.

    k, v = repeat(cache_k), repeat(cache_v)            [B, Hq, K, D]
    out  = softmax(q @ k^T * scale, masked) @ v        ⇒   cache_attention(q, cache_k, cache_v)

The pattern matches `scaled_dot_product_attention`, or two products and a softmax. The model may
repeat key-value heads itself, share them with `enable_gqa`, or have one key-value head for each
query head. Keys may come from a cache that the graph has written before, from pages that the graph
gathers, or from a computation in the graph. If the expressions of a mask in the graph are
recognised, the mask becomes options of the op. Any other mask is passed as a tensor. Dimension
letters are explained in `patterns/recognise/attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewright.patterns import effects
from tilewright.patterns.attention.bare import bare, by_token, check_dense, of_bare_operands
from tilewright.patterns.attention.called import is_call, match_call
from tilewright.patterns.attention.decoded import (
    Decoded,
    as_dtype,
    bytes_of,
    decoded,
    decoded_pair,
)
from tilewright.patterns.attention.flex import refuse_unread, unread_calls
from tilewright.patterns.attention.from_cache import reads_a_cache
from tilewright.patterns.attention.pages import pages_of, same_pages
from tilewright.patterns.attention.shared_heads import (
    group_of,
    heads_repeat,
    once,
)
from tilewright.patterns.attention.visible import mask_fact, visible_keys
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View
from tilewright.patterns.language import Match, Sought, Weight, as_advice, register
from tilewright.patterns.recognise.attention import (
    Attention,
    Sketch,
    is_of_shared_keys,
    match_attention,
    refuse,
    sketch_of,
)
from tilewright.patterns.recognise.dtypes import FLOATS, check_dtypes, dtype_name


@dataclass(frozen=True)
class CacheAttention:
    """Matches attention that reads a cache, has a mask, or shares keys among heads."""

    name: str = "cache_attention"
    op: str = "cache_attention"
    asked_before: ClassVar[tuple[str, ...]] = ("moe",)
    takes_leftovers: bool = True
    sought: ClassVar[Sought] = Sought(
        "attention that reads a cache, has a mask, or shares keys among heads",
        frozenset({"aten.scaled_dot_product_attention", "aten.softmax", "aten.bmm"}),
        before=frozenset({"product", "softmax"}),
        behind=frozenset({"product"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """Yields the model's own calls of the op, and attentions that read a key more than once or
        read keys that no query attends to. Also yields what becomes a miss: softmaxes that look
        like such attentions but are not recognised, and calls of flex_attention that are not
        understood."""
        for value in flow.values:
            if is_call(value):
                yield value
                continue
            sketch = sketch_of(value)
            if is_of_shared_keys(value) if sketch is None else gains(sketch):
                yield value
        yield from unread_calls(flow)

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        if is_call(anchor):
            return match_call(anchor)
        if reads_a_cache(anchor):
            return self._match(anchor, flow, None)
        with as_advice(anchor):  # a library's kernel is as good
            return self._match(anchor, flow, "advice")

    def _match(self, anchor: Value, flow: Dataflow, weight: Weight | None) -> Match:
        refuse_unread(anchor)
        attention = of_bare_operands(match_attention(anchor, flow), flow)
        arguments = _arguments(attention, flow)
        return Match(
            anchor=anchor,
            arguments=arguments,
            results=(attention.result(),),
            absorbed=attention.absorbed,
            scratch=attention.scratch(flow),
            facts=_facts(attention, arguments),
            scope=anchor.scope,
            needs_kernel=True,
            miss_weight=weight,
        )


def gains(sketch: Sketch) -> bool:
    """Whether the op reads less than the graph's own attention."""
    k, _ = bare(sketch.k)
    if decoded(k) is not None:
        return True
    if heads_repeat(k) or k.shape[2] != sketch.q.shape[2] or sketch.masked:
        return True
    if pages_of(k) is not None:
        return True
    return k.value.op == "store" and k.shape[1] != sketch.q.shape[1]


def _arguments(attention: Attention, flow: Dataflow) -> dict[str, Any]:
    if len(attention.terms) != 1:
        refuse("its logits are a sum of several products", attention.end)
    ((q, k),), v = attention.terms, attention.v
    codes = decoded_pair(k, v)
    read = (q, k, v) if codes is None else (q,)
    dtypes = {view.value.dtype for view in read} | {attention.end.dtype}
    check_dtypes(
        dtypes, "queries, keys, values and result", attention.end, (*FLOATS, torch.float64)
    )
    keys = _keys(k, v) if codes is None else _codes(*codes)
    for view, who in ((keys["k"], "key"), (keys["v"], "value")):
        if heads_repeat(view):
            refuse(
                f"the copies of a {who} head are not next to each other, or their number is not "
                "known",
                attention.end,
                hint=(
                    "place query heads that share a key head next to each other: "
                    "repeat_interleave, or enable_gqa"
                ),
            )
        check_dense(view, who, attention, flow)
    if codes is not None:
        keys |= {name: as_dtype(keys[name], codes[0].dtype) for name in ("k", "v")}
    return {
        "q": _queries(q, flow),
        **keys,
        "scale": attention.scale,
        "num_sequences": attention.queries[0],
        **visible_keys(attention),
        "softcap": attention.softcap,
        "sinks": attention.sinks,
    }


def _keys(k: View, v: View) -> dict[str, Any]:
    """Returns the op's arguments for k and v [B, K, Hq, D]. Each group of equal heads becomes one
    head in the arguments."""
    group = group_of(k, v)
    return _places(once(k, group), once(v, group))


def _codes(k: Decoded, v: Decoded) -> dict[str, Any]:
    """Returns the op's arguments for the codes of k and v and for their scales."""
    scales = {"k_scale": k.scale_argument(), "v_scale": v.scale_argument()}
    return _places(k.codes, v.codes) | {name: s for name, s in scales.items() if s is not None}


def _places(k: View, v: View) -> dict[str, Any]:
    """Returns the op's arguments for k and v [B, K, Hkv, D]. If k and v are in pages, the arguments
    are the pools of pages and the block table."""
    paged = same_pages(k, v)
    if paged is None:
        return {"k": k, "v": v}
    k, v = paged.pools
    return {"k": k, "v": v, "block_table": paged.block_table}


def _queries(q: View, flow: Dataflow) -> View | Computed:
    """Returns [B, S, Hq, D] as [T, Hq, D]."""
    rows = by_token(q)
    return rows if flow.rows_are_dense(q) else Computed("contiguous", (rows,))


def _facts(attention: Attention, arguments: dict[str, Any]) -> dict[str, Any]:
    _, queries, heads = attention.queries
    k, v = (bytes_of(arguments[name]) for name in ("k", "v"))
    codes = decoded_pair(attention.keys[0], attention.v)
    widths = str(k.shape[3]) if k.shape[3] == v.shape[3] else f"({k.shape[3]}/{v.shape[3]})"
    return {
        "heads": f"{heads}/{k.shape[2]}x{widths}",
        "queries": effects.size_fact(queries),
        "keys": effects.size_fact(attention.keys[0].shape[1]),
        **({"page": effects.size_fact(k.shape[1])} if "block_table" in arguments else {}),
        **({"cache": dtype_name(codes[0].dtype)} if codes else {}),
        "mask": mask_fact(arguments),
        **({"softcap": attention.softcap} if attention.softcap else {}),
        **({"sinks": "yes"} if attention.sinks is not None else {}),
        "q": dtype_name(attention.end.dtype),
    }


register(CacheAttention())
