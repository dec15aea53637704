"""Attention to expanded latents: the up-projection, the assembly of K, and the attention.

    kv = linear(latents, kv_b)
    k  = cat(kv[..., :N], rope_keys for every head)            ⇒   mla_prefill_dense
    out = attention(q, k, kv[..., N:])

The projection of the query, and everything before the latents, are not a part of the op. Therefore
the same pattern matches a graph without a cache, a graph that reads its latents from a static
cache, and a graph that gathers them from pages. The rotation of the query is absorbed if the
query's projection is found. A decode step that expands its latents matches like a prefill. The op
does not compute K, and does not read keys after the position of the query.

Dimension letters are explained in `patterns/mla/keys.py`. There are T = B * S queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright.patterns.attention.visible import mask_fact, visible_keys
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View, common_scope
from tilewright.patterns.effects import size_fact
from tilewright.patterns.language import Match, Sought, register
from tilewright.patterns.mla.keys import LatentKeys, has_shared_part, match_latent_keys
from tilewright.patterns.mla.query import Query, match_query
from tilewright.patterns.mla.rounded_latents import absorbed_decode
from tilewright.patterns.recognise.attention import (
    Attention,
    keys_of,
    match_attention,
    refuse,
    without_padding,
)
from tilewright.patterns.recognise.dtypes import check_dtypes, dtype_name


@dataclass(frozen=True)
class MlaPrefill:
    """Matches attention to expanded latents: the up-projection, the assembly of K, and the
    attention."""

    name: str = "mla_prefill"
    op: str = "mla_prefill_dense"
    asked_before: ClassVar[tuple[str, ...]] = (
        "cache_attention",
    )  # cache_attention would also match keys that are up-projected from latents
    sought: ClassVar[Sought] = Sought(
        "attention to keys and values that are projected from latents",
        frozenset({"aten.scaled_dot_product_attention", "aten.softmax"}),
        before=frozenset({"product", "softmax"}),
        behind=frozenset({"product"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        for value in flow.values:
            if _is_latent(value, flow):
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        attention = without_padding(match_attention(anchor, flow))
        keys = match_latent_keys(attention, flow)
        _guard(attention, keys)
        if (absorbed := absorbed_decode(attention, keys, flow)) is not None:
            return _absorbed_match(anchor, attention, keys, *absorbed)
        query = match_query(attention, keys.nope, flow)
        inside = (*attention.absorbed, *keys.absorbed, *query.absorbed)
        return Match(
            anchor=anchor,
            arguments=_arguments(attention, keys, query, flow),
            results=(attention.result(),),
            absorbed=tuple(dict.fromkeys(inside)),
            facts=_facts(attention, keys, query),
            scope=common_scope(keys.weight.value.scope or anchor.scope, anchor.scope),
            scratch=keys.scratch,
            needs_kernel=True,
        )


def _absorbed_match(
    anchor: Value,
    attention: Attention,
    keys: LatentKeys,
    arguments: dict[str, Any],
    rounding: tuple[Value, ...],
) -> Match:
    """Returns the match whose op rounds the latents and attends to them in place. rounding: the
    values that round them in the graph."""
    return Match(
        anchor=anchor,
        op="mla_decode",
        arguments=arguments,
        results=(attention.result(),),
        absorbed=tuple(dict.fromkeys((*attention.absorbed, *keys.absorbed, *rounding))),
        facts=_facts(attention, keys, Query(arguments, ())) | {"latents": "rounded to fp8"},
        scope=common_scope(keys.weight.value.scope or anchor.scope, anchor.scope),
        scratch=keys.scratch,
        needs_kernel=True,
    )


def _is_latent(value: Value, flow: Dataflow) -> bool:
    """Whether K has a part that all heads share. If such an attention is not fused, it is reported
    as a miss."""
    return any(has_shared_part(keys, flow) for keys in keys_of(value))


def _guard(attention: Attention, keys: LatentKeys) -> None:
    if attention.softcap or attention.sinks is not None:
        refuse("its logits are capped, or have sinks", attention.end)
    queries = (q for q, _ in attention.terms)
    codes = () if keys.scales else (keys.latents, keys.weight)
    dtypes = {keys.dtype, *(view.value.dtype for view in (*queries, keys.rope_keys, *codes))}
    check_dtypes(dtypes, "query, latents, rope keys and weight", attention.end)


def _arguments(
    attention: Attention, keys: LatentKeys, query: Query, flow: Dataflow
) -> dict[str, Any]:
    arguments = {
        **query.arguments,
        "latent": keys.latents.matrix,
        "k_rope": keys.rope_keys.matrix,
        "kv_b_weight": _weight(keys, flow),
        "v_dim": keys.v_dim,
        "scale": attention.scale,
        **{name: _flat(item) for name, item in keys.scales.items()},
        **visible_keys(attention),
    }
    if attention.row_offsets is None:
        return arguments | {"num_sequences": attention.queries[0]}
    offsets = {"row_offsets": attention.row_offsets, "key_offsets": attention.key_offsets}
    return arguments | offsets


def _weight(keys: LatentKeys, flow: Dataflow) -> View | Computed:
    """Returns the weight with its rows scaled. The graph scales the product instead, which differs
    by at most one rounding."""
    rows = _in_rows(keys.weight, flow)
    return rows if keys.row_scale is None else Computed("mul", (rows, keys.row_scale))


def _in_rows(weight: View, flow: Dataflow) -> View | Computed:
    """Returns the weight [N, L]. If the graph computes the weight as [L, N], for example by
    decoding codes by column, the weight is made contiguous. A weight that is stored as [L, N] stays
    as it is, and the op's checks accept or refuse it."""
    stored = weight.value.op in ("constant", "input")
    return weight if stored or flow.rows_are_dense(weight) else Computed("contiguous", (weight,))


def _flat(item: Any) -> Any:
    """Returns scales [B, K, n] as [B * K, n]. Returns other items unchanged."""
    return item.matrix if isinstance(item, View) and len(item.shape) == 3 else item


def _facts(attention: Attention, keys: LatentKeys, query: Query) -> dict[str, Any]:
    ragged = attention.row_offsets is not None
    return {
        "heads": f"{keys.num_heads}x({keys.nope}+{keys.rope_keys.shape[-1]})/{keys.v_dim}",
        "rank": keys.latents.shape[-1],
        "queries": size_fact(attention.queries[1]),
        "keys": size_fact(keys.latents.shape[1]),
        "mask": mask_fact(visible_keys(attention)),
        "batch": "ragged" if ragged else "equal",
        "q rope": query.style,
        "latents": "fp8" if keys.scales else "dense",
        "q": dtype_name(attention.v.value.dtype),
    }


register(MlaPrefill())
