"""Absorbed attention: attention to latents in place, between products with the two halves of the
up-projection.

    q_latent = q_nope @ W_UK[h]                                       ⇒   mla_decode
    o_latent = attention([q_latent, q_rope], [latents, rope_keys], latents)
    out      = o_latent @ W_UV[h]^T

Latents and rope keys are columns of one cache or of two caches. A cache is stored sequence by
sequence, or in pages that a block table lists. The graph multiplies the query by latents and rope
keys in one product, or in two. Dimension letters are explained in `patterns/mla/keys.py`. Each
sequence has S queries, and T = B * S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.attention.bare import bare, between, by_token, check_dense, with_end_in
from tilewright.patterns.attention.pages import same_pages
from tilewright.patterns.attention.visible import mask_fact, visible_keys
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View, common_scope
from tilewright.patterns.effects import Effect, Size, size_fact
from tilewright.patterns.language import (
    Match,
    Result,
    Sought,
    Stage,
    register,
    reject,
)
from tilewright.patterns.mla.absorbed import (
    Absorbed,
    PerHead,
    absorbed_attentions,
    heads_of,
    query_of,
    taken_of,
)
from tilewright.patterns.mla.keys import assembled
from tilewright.patterns.mla.up_weight import UpProjection, up_projection
from tilewright.patterns.recognise.attention import Attention, match_attention, refuse
from tilewright.patterns.recognise.dtypes import FLOATS, check_dtypes, dtype_name
from tilewright.patterns.recognise.gemm import piece_of

_HINT = (
    "known forms: queries [q_nope @ W_UK, q_rope], in one tensor or with a product for each part, "
    "and keys [latents, rope keys] that all heads share"
)


@dataclass(frozen=True)
class MlaDecode:
    """Matches attention to latents in place, between products with the two halves of the
    up-projection."""

    name: str = "mla_decode"
    op: str = "mla_decode"
    asked_before: ClassVar[tuple[str, ...]] = (
        "lora_qkv",
    )  # That pattern would match the sum of the two products as a base projection and its adapter.
    sought: ClassVar[Sought] = Sought(
        "attention to latents: its queries and its result are multiplied by a weight for each head",
        frozenset({"aten.scaled_dot_product_attention", "aten.softmax", "aten.einsum", "aten.bmm"}),
        before=frozenset({"product", "softmax"}),
        behind=frozenset({"product"}),
        depth=2,
    )

    def anchors(self, flow: Dataflow) -> Iterator[Absorbed]:
        return absorbed_attentions(flow)

    def match(self, anchor: Absorbed, flow: Dataflow) -> Match:
        heads = partial(heads_of, anchor.query)
        attention = match_attention(anchor.attention, flow, heads)
        columns = _columns(attention, anchor.query, flow)
        nope = query_of(anchor.query, columns.q_latent)
        attention = _guarded(attention, columns, nope, anchor, flow)
        taken = taken_of(anchor.result, attention.layout)
        _check_values(attention, columns, taken.columns)
        weight = up_projection(anchor.query.weight, anchor.result.weight, flow)
        arguments = _arguments(attention, columns, nope, anchor, weight)
        ends = (anchor.query.value, anchor.result.value)
        absorbed = (*columns.absorbed, *attention.absorbed, *ends)
        return Match(
            anchor=anchor.attention,
            arguments=arguments,
            results=(_result(anchor.result, attention, taken.layout),),
            absorbed=tuple(dict.fromkeys(absorbed)),
            facts=_facts(attention, columns, arguments, weight),
            scope=common_scope(anchor.query.value.scope, anchor.result.value.scope),
            scratch=(*columns.scratch, *attention.scratch(flow)),
            needs_kernel=True,
        )


@dataclass(frozen=True)
class Columns:
    """The two parts of queries and keys: q_latent [B, S, H, L], a view of the absorbed product,
    q_rope [B, S, H, R], latents [B, K, L] and rope_keys [B, K, R].

    factor: the number that multiplies the products of queries and keys to give the logits.
    absorbed: the values between q_latent and the attention.
    scratch: the writes to memory that the graph itself allocates.
    """

    q_latent: View
    q_rope: View
    latents: View
    rope_keys: View
    factor: float
    absorbed: tuple[Value, ...]
    scratch: tuple[Value, ...]


def _columns(attention: Attention, product: PerHead, flow: Dataflow) -> Columns:
    """Returns the columns of queries and keys. Raises Reject (ABSORBED_DECODE) if the query or the
    keys do not consist of exactly these parts."""
    own, others = [], []
    absorbed: list[Value] = []
    scratch: list[Value] = []
    for whole, k in attention.terms:
        q, factor = bare(whole)
        made = assembled([q], flow)
        for piece in made.pieces:
            keys = k.narrow(3, piece.start, piece.view.shape[-1])
            inner, more = bare(piece.view)
            if inner.value is product.value:
                own.append((factor * more, inner, keys))
                outer, below = between(whole, q.value), between(piece.view, inner.value)
                absorbed += (*outer, *made.absorbed, *below)
                scratch += made.scratch
            elif len(made.pieces) == 1:
                others.append((1.0, whole, keys))
            else:
                others.append((factor, piece.view, keys))
    if len(own) != 1 or len(others) != 1:
        why = f"the query has {len(own)} absorbed and {len(others)} other parts, not one of each"
        reject("ABSORBED_DECODE", Stage.Q_PATH, why, product.value, hint=_HINT)
    (factor, q_latent, latents), (known, q_rope, rope_keys) = own[0], others[0]
    q_rope, more = bare(q_rope, scaled=factor != known)
    if factor != known * more:
        why = f"the query's parts are scaled by {factor:g} and {known * more:g}"
        reject("ABSORBED_DECODE", Stage.Q_PATH, why, product.value, hint="scale their logits")
    latents, rope_keys = _shared(latents), _shared(rope_keys)
    return Columns(q_latent, q_rope, latents, rope_keys, factor, tuple(absorbed), tuple(scratch))


def _shared(keys: View) -> View:
    """Returns keys [B, K, H, D] that all heads share as [B, K, D]. Raises Reject (ABSORBED_DECODE)
    if the keys differ between heads."""
    keys, _ = bare(piece_of(keys), scaled=False)
    batch, length, heads, width = keys.effect.dims
    if any(atom.axis is not None for atom in heads):
        why = f"the keys, of {keys.value}, differ from head to head"
        reject("ABSORBED_DECODE", Stage.K_PATH, why, keys, hint=_HINT)
    return keys.with_dims(batch, length, width)


def _guarded(
    attention: Attention, columns: Columns, nope: View, anchor: Absorbed, flow: Dataflow
) -> Attention:
    """Returns the attention with its result in the dtype of its operands. Raises Reject if the
    operands have different dtypes, or if the attention has options that the op lacks."""
    if attention.softcap or attention.sinks is not None:
        refuse("its logits are capped, or have sinks", attention.end)
    if attention.row_offsets is not None:
        hint = "store the keys of each sequence side by side, or in pages that a block table lists"
        refuse("its keys belong to a ragged batch", attention.end, hint)
    query, result = anchor.query, anchor.result
    parts = (nope, columns.q_rope, columns.latents, columns.rope_keys, query.weight, result.weight)
    dtypes = {view.value.dtype for view in parts} | {query.value.dtype, result.value.dtype}
    check_dtypes(
        dtypes,
        "query, latents, rope keys, weights and result",
        attention.end,
        (*FLOATS, torch.float64),
    )
    ended = with_end_in(attention, dtypes.pop(), flow)
    if ended is None or ended.end is not result.x.view.value:
        refuse("no product with the values' weight reads the attention's result", attention.end)
    for view, who in ((columns.latents, "latent"), (columns.rope_keys, "rope key")):
        check_dense(view, who, attention, flow)
    return ended


def _check_values(attention: Attention, columns: Columns, first: Size) -> None:
    """Raises Reject (LATENT_VALUES) unless the columns of V from `first` on are the latents."""
    rank = columns.latents.shape[-1]
    v, _ = bare(piece_of(attention.v.narrow(3, first, rank)), scaled=False)
    batch, length, heads, width = v.effect.dims
    shared = all(atom.axis is None for atom in heads)
    if not shared or not equal_values(v.with_dims(batch, length, width), columns.latents):
        why = f"the keys are latents of {columns.latents.value}, the values are {v.value}"
        reject("LATENT_VALUES", Stage.V_PATH, why, attention.v)


def _arguments(
    attention: Attention, columns: Columns, nope: View, anchor: Absorbed, weight: UpProjection
) -> dict[str, Any]:
    parts = tuple(by_token(part) for part in (nope, columns.q_rope))
    return {
        "q": Computed("cat", (parts, -1)),
        **_keys(columns),
        **weight.arguments,
        "v_dim": anchor.result.sizes[2],
        "scale": attention.scale * columns.factor,
        "num_sequences": attention.queries[0],
        **visible_keys(attention),
    }


def _keys(columns: Columns) -> dict[str, Any]:
    """Returns the op's arguments for latents and rope keys: the caches themselves, with the block
    table if the graph gathers pages."""
    latents, rope_keys = columns.latents, columns.rope_keys
    paged = same_pages(latents.unsqueeze(2), rope_keys.unsqueeze(2))
    if paged is None:
        return {"latent": latents, "rope_keys": rope_keys}
    pools = (pool.select(2, 0) for pool in paged.pools)
    names = ("latent", "rope_keys")
    return {**dict(zip(names, pools, strict=True)), "block_table": paged.block_table}


def _result(product: PerHead, attention: Attention, layout: Effect) -> Result:
    """Returns the Result by which the op's output [T, H, V] replaces the result of the product."""
    batch, queries, heads = attention.queries
    sizes = (heads, product.sizes[2])
    flat = effects.identity((effects.product((batch, queries)), *sizes))
    by_sequence = effects.reshape(flat, (batch, queries, *sizes))
    return Result(product.value, effects.compose(layout, by_sequence))


def _facts(
    attention: Attention, columns: Columns, arguments: dict[str, Any], weight: UpProjection
) -> dict[str, Any]:
    _, queries, heads = attention.queries
    latents, v_dim = arguments["latent"], arguments["v_dim"]
    widths = f"({_nope(arguments)}+{columns.rope_keys.shape[-1]})/{v_dim}"
    return {
        "heads": f"{heads}x{widths}",
        "rank": columns.latents.shape[-1],
        "queries": size_fact(queries),
        "keys": size_fact(columns.latents.shape[1]),
        **({"page": size_fact(latents.shape[1])} if "block_table" in arguments else {}),
        "mask": mask_fact(arguments),
        "weight": weight.form,
        "q": dtype_name(columns.latents.value.dtype),
    }


def _nope(arguments: dict[str, Any]) -> Size:
    nope, _ = arguments["q"].operands[0]
    return nope.shape[-1]


register(MlaDecode())
