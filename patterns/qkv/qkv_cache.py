"""A QKV projection and the write of K and V to the KV cache. There are three projections of one
activation, each with an optional bias. Q and K may have a per-head RMS norm and a rotation. K and V
are written to a cache by slot. If the linear of q also computes gates, the op computes these too.

    x ─ linear ─ [+bias] ─ [norm] ─ [rope] ─▶ q
    x ─ linear ─ [+bias] ─ [norm] ─ [rope] ─▶ k ─▶ cache[slots] = k      ⇒   fused_qkv_paged
    x ─ linear ─ [+bias] ──────────────────▶ v ─▶ cache[slots] = v

The match includes the RMS norm or layer norm that computed x, if there are few tokens and no other
value reads the norm's result.

Dimension letters: T tokens, K hidden size, Hq and Hkv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from tilewright.ops.formats.activation_codes import ACTIVATION_BLOCK
from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.ops.qkv.qkv_cache import OP
from tilewright.patterns.cache.address import Address, address, check_pair, place_arguments
from tilewright.patterns.cache.eight_bit import can_scale
from tilewright.patterns.cache.latent_writes import latent_writes
from tilewright.patterns.cache.writes import (
    CACHE_WRITES,
    CacheWrite,
    WritePair,
    joined_features,
    pairs,
)
from tilewright.patterns.collective.sums import unless_summed
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View, common_scope
from tilewright.patterns.effects import size_fact
from tilewright.patterns.language import Match, Reject, Sought, Stage, Weight, register, reject
from tilewright.patterns.lora.arguments import fact as lora_fact
from tilewright.patterns.lora.arguments import has_kernels, own_deltas, packed_deltas
from tilewright.patterns.projection.epilogue import norm_arguments, norm_fact
from tilewright.patterns.projection.heads import Heads, match_heads, rope_table, same_activation
from tilewright.patterns.projection.written import check_tokens
from tilewright.patterns.qkv.gates import with_gates
from tilewright.patterns.qkv.query import Query, find_query
from tilewright.patterns.quantised.coded_rows import CodedRows, match_coded_rows
from tilewright.patterns.quantised.scales import weight_arguments
from tilewright.patterns.quantised.weights import refuse
from tilewright.patterns.recognise.dtypes import check_dtypes, dtype_name
from tilewright.patterns.recognise.linear import Path
from tilewright.patterns.recognise.norm import Norm
from tilewright.patterns.recognise.row_norm import match_norm_before, row_norm_arguments

_ALONE = "the cache write is fused by itself, and the operations before it stay in the graph"
_KEYS = Path("K_PATH", Stage.K_PATH, "the cache", masked="MASKED_WRITE", hint=_ALONE)
_VALUES = Path("V_PATH", Stage.V_PATH, "the cache", masked="MASKED_WRITE", hint=_ALONE)


@dataclass(frozen=True)
class Stored:
    """K or V, described by the heads of its projection and by the place to which these heads are
    written."""

    heads: Heads
    place: Address
    write: CacheWrite


@dataclass(frozen=True)
class QkvCache:
    """Matches a QKV projection and the write of K and V to the KV cache."""

    name: str = "qkv_cache"
    op: str = "fused_qkv_paged"
    asked_before: ClassVar[tuple[str, ...]] = ("mla_decode",)
    sought: ClassVar[Sought] = CACHE_WRITES

    def anchors(self, flow: Dataflow) -> Iterator[WritePair]:
        latents = {store for pair in latent_writes(flow) for store in pair.stores}
        yield from (pair for pair in pairs(flow) if not latents.issuperset(pair.stores))

    def match(self, anchor: WritePair, flow: Dataflow) -> Match:
        first = address(anchor.first, flow)
        if anchor.second is None or not any(
            write.is_projected for write in (anchor.first, anchor.second)
        ):
            _refuse_anchor(anchor, first)
        second = address(anchor.second, flow)
        keys, values = _keys_and_values((first, anchor.first), (second, anchor.second))
        k, v = keys.heads, values.heads
        if not same_activation(k, v):
            message = f"K projects {k.x.value}, but V projects {v.x.value}"
            reject("ACTIVATION", Stage.ACTIVATION, message, k.product, v.product)
        repeat = _check_written(keys, values)
        stored = (*keys.place.absorbed, *values.place.absorbed)
        inside = frozenset((*k.absorbed, *v.absorbed, *stored, *anchor.stores))
        place = max(flow.positions[store.node] for store in anchor.stores)
        q = with_gates(flow, find_query(flow, k, v, keys.write.store, inside, place), (k, v))
        three = (q.heads, k, v)
        _guard(flow, q.heads, keys, values)
        arguments = _arguments(q.heads, keys, values)
        arguments |= {"gate_run": q.run, "kv_repeat": repeat}
        norm = _input_norm(three, place, flow)
        if norm is not None:
            arguments |= {"x": norm.x, **row_norm_arguments(norm, "input_")}
        kept = set()
        if _own_deltas(three):
            kept = {value for h in three for d in h.linear.deltas for value in d.absorbed}
        before = () if norm is None else norm.absorbed
        absorbed = dict.fromkeys((*before, *q.heads.absorbed, *k.absorbed, *v.absorbed, *stored))
        return Match(
            anchor=anchor.first.store,
            arguments=arguments,
            results=q.results,
            absorbed=tuple(value for value in absorbed if value not in kept),
            stores=anchor.stores,
            facts=_facts(q, keys, v, arguments["x"]) | _norm_fact(norm),
            scope=common_scope(k.product.scope, anchor.first.store.scope),
        )


def _refuse_anchor(anchor: WritePair, place: Address) -> NoReturn:
    """Raises Reject for a write of data that the graph does not project, or for a write that has no
    partner."""
    write = anchor.first
    writes = [one for one in (anchor.first, anchor.second) if one is not None]
    weight: Weight | None = None
    culprits: tuple[Value, ...] = (write.store,)
    code = "LONE_WRITE"
    if not any(one.is_projected for one in writes):
        code, culprits = "EARLIER_GRAPH", anchor.stores
        message = (
            f"{write.store} writes an input of this graph, and the graph has no projection of it"
        )
        hint = "remove the graph break between projection and write"
    elif anchor.unlike is not None and anchor.unlike.written is not None:
        widths = [place.window.head_dim, anchor.unlike.written.view.shape[-1]]
        message = (
            f"the write at the same slots has heads of {widths[1]}, and this write has heads of "
            f"{widths[0]}: one op writes keys and values of one width"
        )
        hint, weight = "each write is fused by itself", "advice"  # no op has both
    elif (joined := joined_features(write)) is not None:
        code = "CACHE_LAYOUT"
        message = (
            f"keys and values are written together, as the features of one head: {joined} "
            f"joins them into rows of {joined.shape[-1]}"
        )
        hint = (
            "give keys and values separate dimensions, [..., 2, heads, head_dim], or separate "
            "caches"
        )
    else:
        message = "no other write goes to the same slots, but K and V are written in pairs"
        hint = (
            "write keys and values with the same index, in one module; this op does not write "
            "a tensor that is cached alone"
        )
    reject(code, Stage.ANCHORED, message, *culprits, hint=hint, weight=weight)


def _keys_and_values(*writes: tuple[Address, CacheWrite]) -> tuple[Stored, Stored]:
    """Returns K and V. K is the write that is rotated or normalised. If neither write is rotated or
    normalised, K is the first one. Raises Reject if the op cannot compute V."""
    first, second = writes
    try:
        k = match_heads(first[0].source, _KEYS, factors=True)
    except Reject as rejection:
        # The other order is tried only if the second write is rotated or normalised, because only K
        # is rotated or normalised.
        swapped = _rotated(second[0])
        if swapped is None:
            raise rejection from None
    else:
        swapped = _rotated(second[0]) if k.rope is None else None
        if swapped is not None and k.norm is not None and swapped.rope is None:
            swapped = None
    if swapped is not None:
        k, first, second = swapped, second, first
    v = match_heads(second[0].source, _VALUES, factors=True)
    if v.rope is not None:
        reject("V_PATH", Stage.V_PATH, "both writes are rotated", v.end)
    if v.norm is not None and (v.norm.weight is not None or v.norm.bias is not None):
        message = (
            "the values are normalised with a weight; the op normalises values only "
            "without a weight"
        )
        reject("V_PATH", Stage.V_PATH, message, v.end, hint="the cache write is fused by itself")
    if k.product is v.product and k.rows.indices() & v.rows.indices():
        message = "one projection computes both K and V, and the op would compute it twice"
        reject(
            "V_PATH", Stage.V_PATH, message, v.product, hint="the cache write is fused by itself"
        )
    return Stored(k, *first), Stored(v, *second)


def _rotated(place: Address) -> Heads | None:
    try:
        heads = match_heads(place.source, _KEYS, factors=True)
    except Reject:
        return None
    return heads if heads.rope is not None or heads.norm is not None else None


def _check_written(keys: Stored, values: Stored) -> int:
    """Returns the number of cache heads that each head is written to. Raises Reject unless K and V
    are written and clamped in the same way."""
    repeats = []
    for stored, who in ((keys, "K"), (values, "V")):
        heads, place = stored.heads, stored.place
        repeats.append(check_tokens(heads, place, who, heads.path.stage))
        # The op rounds once, to the dtype of the activation. A cache of another dtype needs another
        # op.
        written, projected = place.source.value.dtype, heads.product.dtype
        if written != projected and place.dtype not in FP8_DTYPES:
            names = [dtype_name(d) for d in (projected, written)]
            message = f"{who} is cast from {names[0]} to {names[1]} before the cache write"
            hint = "keep the cache in the activation's dtype"
            reject("CAST", heads.path.stage, message, place.source, hint=hint)
    if repeats[0] != repeats[1]:
        message = f"K's heads are written {repeats[0]} times each, but V's heads {repeats[1]} times"
        reject("UNSUPPORTED", Stage.GUARDS, message, keys.heads.product)
    clips = [stored.heads.linear.clip for stored in (keys, values)]
    if clips[0] != clips[1]:
        message = f"K is clamped to {clips[0] or 'nothing'}, but V to {clips[1] or 'nothing'}"
        hint = "clamp q, k and v alike, or none of them"
        reject("UNSUPPORTED", Stage.GUARDS, message, keys.heads.product, hint=hint)
    return repeats[0]


def _guard(flow: Dataflow, q: Heads, keys: Stored, values: Stored) -> None:
    k, v = keys.heads, values.heads
    dtypes = {t.dtype for p in (q, k, v) for t in p.float_operands}
    dtypes |= {keys.write.memory.dtype} - set(FP8_DTYPES)
    dtypes |= {p.product.dtype for p in (q, k, v)} | {q.end.dtype}
    check_dtypes(dtypes, "activation, weights and cache", k.product)
    if q.num_heads % k.num_heads or k.num_heads != v.num_heads or k.head_dim != v.head_dim:
        reject("HEADS", Stage.GUARDS, f"{q.num_heads} query, {k.num_heads} key heads", q.product)
    check_pair(keys.place, values.place, flow, k.product)


def _arguments(q: Heads, keys: Stored, values: Stored) -> dict[str, Any]:
    k, v = keys.heads, values.heads
    rope, shared = k.rope, keys.write.memory is values.write.memory
    return {
        "x": q.x,
        "q_weight": q.weight,
        "k_weight": k.weight,
        "v_weight": v.weight,
        "k_cache": keys.write.memory.root,
        "v_cache": None if shared else values.write.memory.root,
        **place_arguments(keys.place, values.place),
        "q_bias": q.bias_rows,
        "k_bias": k.bias_rows,
        "v_bias": v.bias_rows,
        **norm_arguments(q.norm, k.norm, v.norm, q.product),
        "cos": None if rope is None else rope_table(k, rope.cos),
        "sin": None if rope is None else rope_table(k, rope.sin),
        "rotary_dim": 0 if rope is None else rope.rotary_dim,
        "rope_style": "none" if rope is None else rope.style,
        "static_tokens": isinstance(q.num_tokens, int),
        "clip": k.linear.clip,
        **_factors(keys, values),
        "delta": _delta((q, k, v)),
        **_codes(q, k, v),
    }


def _input_norm(heads: tuple[Heads, Heads, Heads], place: int, flow: Dataflow) -> Norm | None:
    """Returns the norm that computed x, if the kernel for few tokens can compute this norm; else
    None. With quantised weights, or with a norm over all heads, the tiles of the kernel have no
    room for the norm of x. place: where the op will be inserted."""
    by_row = any(h.norm is not None and h.norm.width == "row" for h in heads)
    if by_row or any(h.quantized is not None for h in heads):
        return None
    readers = [h.product for h in heads]
    return unless_summed(match_norm_before(heads[1].x, readers, place, flow, OP))


def _factors(keys: Stored, values: Stored) -> dict[str, Any]:
    """Returns the numbers that multiply K and V, as scales of the cache. Raises Reject
    (UNSUPPORTED) if the cache already has a scale, or if a number cannot be a scale."""
    k, v = keys.heads, values.heads
    if k.factor == v.factor == 1.0:
        return {}
    for stored in (keys, values):
        heads = stored.heads
        if stored.place.scale is not None:
            message = "a constant factor multiplies numbers that the cache scales already"
            hint = "multiply the projection's weight by the factor once, when the model is loaded"
            reject("UNSUPPORTED", Stage.GUARDS, message, heads.end, hint=hint)
        if not can_scale(heads.factor):
            message = (
                f"the factor {heads.factor} cannot be a scale of the cache, because such "
                "scales are float32"
            )
            reject("UNSUPPORTED", Stage.GUARDS, message, heads.end)
    options = (("dtype", torch.float32), ("device", k.product.device))
    return {
        name: None if heads.factor == 1.0 else Computed("full", ((), heads.factor), options)
        for name, heads in (("k_cache_scale", k), ("v_cache_scale", v))
    } | {"cache_scale_multiplies": True}


def _delta(heads: tuple[Heads, Heads, Heads]) -> Computed | None:
    """Returns the sum of the deltas of the projections' adapters. The columns of q, k and v are
    side by side. Returns None if there are no adapters."""
    if not any(h.linear.deltas for h in heads):
        return None
    widths = [h.num_heads * h.head_dim for h in heads]
    if _own_deltas(heads):
        return own_deltas([[h.delta_columns(d) for d in h.linear.deltas] for h in heads], widths)
    return packed_deltas([[(d, h.expand_rows(d)) for d in h.linear.deltas] for h in heads], widths)


def _own_deltas(heads: tuple[Heads, Heads, Heads]) -> bool:
    """Whether the graph computes the deltas itself, because the LoRA ops have no kernels for
    them."""
    return not all(has_kernels(d) for h in heads for d in h.linear.deltas)


def _codes(q: Heads, k: Heads, v: Heads) -> dict[str, Any]:
    """Returns the op's arguments for quantised weights and activations."""
    found = [p.quantized for p in (q, k, v)]
    weights = [weight for weight in found if weight is not None]
    if not weights:
        return {}
    if len(weights) != len(found):
        refuse(weights[0].codes, "the weights of the other projections are not")
    arguments = weight_arguments(weights)
    if k.x_scale is not None:  # q uses k's codes of x, so the codes of x for q are not read
        return arguments | {"x": k.x, "x_scale": k.x_scale, "out_dtype": k.product.dtype}
    rows = _coded_x(k, arguments)
    if rows is None:
        return arguments
    return arguments | {"x": rows.codes, "x_scale": rows.x_scale, "out_dtype": k.product.dtype}


def _coded_x(k: Heads, weights: Mapping[str, Any]) -> CodedRows | None:
    """Returns the codes from which the graph decodes the activation, if the op multiplies them with
    the codes of the weights; else None. weights: the op's arguments for the weights."""
    rows = match_coded_rows(k.x) if weights["weight_format"] == "fp8" else None
    whole = weights["scale_block"][1] in (ACTIVATION_BLOCK, k.x.shape[1])
    return rows if whole and isinstance(rows, CodedRows) else None


def _facts(query: Query, keys: Stored, v: Heads, x: View) -> dict[str, Any]:
    q, k, place = query.heads, keys.heads, keys.place
    rope = k.rope
    num_heads = q.num_heads // 2 if query.run else q.num_heads
    style = "none" if rope is None else rope.style
    if rope is not None and rope.rotary_dim != k.head_dim:
        style += f"({rope.rotary_dim})"
    tokens = size_fact(q.num_tokens)
    facts = {
        "projection": _projection(q, k, v),
        "gqa": num_heads // k.num_heads,
        "heads": f"{num_heads}/{k.num_heads}x{k.head_dim}",
        "rope": style,
        "bias": "yes" if any(p.linear.bias is not None for p in (q, k, v)) else "no",
        "norm": norm_fact(k.norm) + (", v too" if v.norm is not None else ""),
        "write": keys.write.record.kind,
        "slots": place.slots.fact,
        "cache": "x".join(str(n) for n in place.window.shape),
        "x": f"{dtype_name(x.value.dtype)}[{tokens},{x.shape[1]}]",
    }
    three = (("q", q), ("k", k), ("v", v))
    factors = {name: h.factor for name, h in three if h.factor != 1.0}
    if factors:
        facts["factor"] = ", ".join(f"{name} {factor:g}" for name, factor in factors.items())
    if query.run:
        facts["gates"] = "beside q" if query.run == 1 else "behind q"
    if k.linear.clip:
        facts["clip"] = k.linear.clip
    facts |= lora_fact([p.linear.deltas for p in (q, k, v)], own=_own_deltas((q, k, v)))
    if (weight := k.quantized) is not None:
        facts["weight"] = weight.format + (" with zeros" if weight.zero is not None else "")
    return facts


def _norm_fact(norm: Norm | None) -> dict[str, Any]:
    return {} if norm is None else {"input_norm": norm.kind}


def _projection(q: Heads, k: Heads, v: Heads) -> str:
    if q.product is k.product is v.product:
        return "packed"
    return "q + packed kv" if k.product is v.product else "separate"


register(QkvCache())
