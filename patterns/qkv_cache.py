"""QKV projection and KV-cache write: three projections of one activation, optional bias, per-head
RMS norm and rotation, K and V written into a cache by slot.

    x ─ linear ─ [+bias] ─ [norm] ─ [rope] ─▶ q
    x ─ linear ─ [+bias] ─ [norm] ─ [rope] ─▶ k ─▶ cache[slots] = k      ⇒   fused_qkv_paged
    x ─ linear ─ [+bias] ──────────────────▶ v ─▶ cache[slots] = v

Dimension letters: T tokens, K hidden size, Hq and Hkv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.patterns import effects
from tilewright.patterns.cache_write import Addressing, Computed, WritePair, address, pairs
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope
from tilewright.patterns.effects import Effect
from tilewright.patterns.language import Match, Reject, Result, Stage, register, reject
from tilewright.patterns.projection import Heads, match_heads, on_heads, rope_table

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# What lies between a projection and its consumer; a walk from the projection stays inside these.
_INSIDE = {
    "aten.add", "aten.sub", "aten.mul", "aten.neg", "aten.cat", "aten.pow", "aten.square",
    "aten.mean", "aten.rsqrt", "aten.rms_norm", "cast",
}  # fmt: skip
_REACH = 64


@dataclass(frozen=True)
class QkvCache:
    """The pattern; see the module."""

    name: str = "qkv_cache"
    op: str = "fused_qkv_paged"

    def anchors(self, flow: Dataflow) -> Iterator[WritePair]:
        yield from pairs(flow)

    def match(self, anchor: WritePair, flow: Dataflow) -> Match:
        first = address(anchor.first)
        if anchor.second is None:
            reject(
                "LONE_WRITE",
                Stage.ANCHORED,
                "this write has no twin at the same slots: K and V are written in pairs",
                anchor.first.store,
            )
        second = address(anchor.second)
        k, v, (k_place, v_place), (k_write, v_write) = _keys_and_values(
            (first, second), (anchor.first, anchor.second)
        )
        if k.x != v.x:
            reject(
                "ACTIVATION",
                Stage.ACTIVATION,
                f"K projects {k.linear.args[0].value}, V projects {v.linear.args[0].value}",
                k.linear,
                v.linear,
            )
        for heads, place, who, stage in (
            (k, k_place, "K", Stage.K_PATH),
            (v, v_place, "V", Stage.V_PATH),
        ):
            _check_tokens(heads, place, who, stage)
            _check_cast(heads, place, who, stage)
        q = _find_query(flow, k, v)
        _guard(flow, q, k, v, k_place, v_place, k_write.memory.dtype)
        shared = k_write.memory is v_write.memory
        arguments = _arguments(q, k, v, k_place, v_place)
        arguments["k_cache"] = k_write.memory.root
        arguments["v_cache"] = None if shared else v_write.memory.root
        joined = [w.joined for w in (k_write, v_write) if w.joined is not None]
        absorbed = tuple(dict.fromkeys((*q.absorbed, *k.absorbed, *v.absorbed, *joined)))
        record = anchor.first.store.store
        assert record is not None
        return Match(
            pattern=self.name,
            op=self.op,
            anchor=anchor.first.store,
            arguments=arguments,
            results=(Result(q.end, on_heads(q, q.layout)),),
            absorbed=absorbed,
            stores=anchor.stores,
            facts=_facts(q, k, v, k_place, record.kind),
            scope=common_scope(k.linear.scope, anchor.first.store.scope),
        )


def _keys_and_values(places: tuple[Addressing, Addressing], writes: tuple) -> tuple:
    """Which of two writes is K: the one that is rotated or normalised, else the first."""
    first, second = places
    try:
        k = match_heads(first.source, Stage.K_PATH)
    except Reject as rejection:
        # The other order has its own say only where the second write is plainly not V.
        swapped = _rotated(second)
        if swapped is None:
            raise rejection from None
        k, places, writes = swapped, places[::-1], writes[::-1]
    else:
        if k.rope is None and k.norm_weight is None and (swapped := _rotated(second)) is not None:
            k, places, writes = swapped, places[::-1], writes[::-1]
    v = match_heads(places[1].source, Stage.V_PATH)
    if v.rope is not None or v.norm_weight is not None:
        reject("V_PATH", Stage.V_PATH, "both writes are rotated or normalised", v.end)
    return k, v, places, writes


def _rotated(place: Addressing) -> Heads | None:
    try:
        heads = match_heads(place.source, Stage.K_PATH)
    except Reject:
        return None
    return heads if heads.rope is not None or heads.norm_weight is not None else None


def _check_tokens(heads: Heads, place: Addressing, who: str, stage: Stage) -> None:
    """The written dimensions must be exactly the linear's tokens in order, heads, head_dim."""
    source = heads.layout
    lead = effects.reshape(
        Effect(source.dims[: place.token_rank], source.start),
        (effects.product(source.shape[: place.token_rank]),),
    )
    sizes = heads.linear.shape[:-1]
    whole = effects.reshape(
        Effect(effects.identity(heads.linear.shape).dims[:-1], (0,) * len(heads.linear.shape)),
        (effects.product(sizes),),
    )
    if lead.dims != whole.dims or any(s != 0 for s in source.start[:-1]):
        reject(
            "SLOT_INDEX",
            stage,
            f"the {who} write does not store every token once and in order",
            heads.linear,
        )
    written = place.window[2:4]
    if written != (heads.num_heads, heads.head_dim):
        reject(
            "CACHE_LAYOUT",
            stage,
            f"the cache holds {written[0]} heads of {written[1]}, the {who} projection makes "
            f"{heads.num_heads} of {heads.head_dim}",
            heads.linear,
        )


def _check_cast(heads: Heads, place: Addressing, who: str, stage: Stage) -> None:
    """The op rounds once, to the activation's dtype: another dtype in the cache is another op."""
    written, projected = place.source.value.dtype, heads.linear.dtype
    if written != projected:
        reject(
            "CAST",
            stage,
            f"{who} is cast from {_short(projected)} to {_short(written)} before the cache write",
            place.source,
            hint="keep the cache in the activation's dtype",
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _find_query(flow: Dataflow, k: Heads, v: Heads) -> Heads:
    """The projection of the same activation that is neither K nor V, as far as it mirrors K."""
    found: list[Heads] = []
    nearest: Reject | None = None
    for linear in _projections_of(flow, k.x):
        try:
            heads = _query_at(flow, linear, k, v)
        except Reject as rejection:
            nearest = rejection
            continue
        if heads is not None:
            found.append(heads)
    if len(found) == 1:
        return found[0]
    if not found and nearest is not None:
        raise nearest
    what = "no" if not found else f"{len(found)} candidates for the"
    reject(
        "Q_PATH",
        Stage.Q_PATH,
        f"{what} query projection of {k.x.value} was found beside K and V",
        k.linear,
        hint="the query must project the same activation and be rotated with the same cos and sin",
    )


def _projections_of(flow: Dataflow, x: View) -> list[Value]:
    linears = [u for u in flow.users.get(x.value, ()) if u.op == "aten.linear"]
    return [u for u in dict.fromkeys(linears) if _flat(u.args[0]) == x]


def _flat(activation: Any) -> View | None:
    if not isinstance(activation, View):
        return None
    *tokens, hidden = activation.shape
    try:
        flat = effects.reshape(activation.effect, (effects.product(tokens), hidden))
    except effects.InexpressibleError:
        return None
    return View(activation.value, flat)


def _query_at(flow: Dataflow, linear: Value, k: Heads, v: Heads) -> Heads | None:
    """Q's heads on this linear, or None where the linear holds nothing but K and V."""
    plain = k.rope is None and k.norm_weight is None
    if plain:
        return _plain_query(flow, linear, k, v)
    taken = {k.linear: k.rows, v.linear: v.rows} if k.linear is not v.linear else {}
    for end in _mirrors(flow, linear, k.end):
        try:
            heads = match_heads(end.whole, Stage.Q_PATH)
        except (Reject, effects.InexpressibleError):
            continue
        if heads.linear is not linear or heads.head_dim != k.head_dim:
            continue
        if heads.rows == taken.get(linear) or (linear is k.linear and heads.rows == k.rows):
            continue
        if _same_rotation(heads, k):
            return heads
    return None


def _plain_query(flow: Dataflow, linear: Value, k: Heads, v: Heads) -> Heads | None:
    """Without rotation or norm Q is a whole linear, as wide as a number of heads."""
    if linear in (k.linear, v.linear):
        return None
    width = linear.shape[-1]
    if not isinstance(width, int) or width % k.head_dim:
        return None
    ends = [u for u in flow.users.get(linear, ()) if u.op == "aten.add" and linear.args[2] is None]
    for end in (*ends, linear):
        try:
            return match_heads(end.whole, Stage.Q_PATH, head_dim=k.head_dim)
        except (Reject, effects.InexpressibleError):
            continue
    return None


def _mirrors(flow: Dataflow, linear: Value, end: Value) -> list[Value]:
    """Values downstream of `linear` made by the same operation as K's last one, furthest first."""
    seen: dict[Value, None] = {}
    front = [linear]
    while front and len(seen) < _REACH:
        for user in flow.users.get(front.pop(0), ()):
            if user.op in _INSIDE and user not in seen:
                seen[user] = None
                front.append(user)
    same = [v for v in seen if v.op == end.op and v is not end]
    return sorted(same, key=lambda value: -value.position)


def _same_rotation(q: Heads, k: Heads) -> bool:
    if q.rope is None or k.rope is None:
        return q.rope is k.rope
    return (
        q.rope.style == k.rope.style
        and q.rope.rotary_dim == k.rope.rotary_dim
        and rope_table(q, q.rope.cos) == rope_table(k, k.rope.cos)
        and rope_table(q, q.rope.sin) == rope_table(k, k.rope.sin)
    )


def _guard(
    flow: Dataflow,
    q: Heads,
    k: Heads,
    v: Heads,
    k_place: Addressing,
    v_place: Addressing,
    cache: torch.dtype,
) -> None:
    dtypes = {p.linear.args[1].value.dtype for p in (q, k, v)} | {cache, k.x.value.dtype}
    dtypes |= {p.linear.dtype for p in (q, k, v)} | {q.end.dtype}
    if len(dtypes) != 1 or not dtypes <= set(SUPPORTED_DTYPES):
        names = ", ".join(sorted(_short(d) for d in dtypes))
        known = ", ".join(_short(d) for d in SUPPORTED_DTYPES)
        reject(
            "DTYPE",
            Stage.GUARDS,
            f"activation, weights and cache have {names}; expected one of {known} for all",
            k.linear,
        )
    if q.num_heads % k.num_heads or k.num_heads != v.num_heads or k.head_dim != v.head_dim:
        reject("HEADS", Stage.GUARDS, f"{q.num_heads} query, {k.num_heads} key heads", q.linear)
    if (q.norm_eps or k.norm_eps) != (k.norm_eps or q.norm_eps):
        reject("UNSUPPORTED", Stage.GUARDS, "q and k norms have different eps", q.linear)
    if not same_slots(k_place, v_place, flow):
        reject("SLOT_INDEX", Stage.GUARDS, "K and V are written at different slots", k.linear)


def same_slots(k: Addressing, v: Addressing, flow: Dataflow) -> bool:
    """Whether a pair of writes (equal index tensors) addresses pages of one number and size."""
    sizes = zip(k.window[:2], v.window[:2], strict=True)
    return k.slots == v.slots and all(flow.same_size(a, b) for a, b in sizes)


def _arguments(
    q: Heads, k: Heads, v: Heads, k_place: Addressing, v_place: Addressing
) -> dict[str, Any]:
    rope = k.rope
    eps = k.norm_eps if k.norm_eps is not None else q.norm_eps
    return {
        "x": q.x,
        "q_weight": q.weight,
        "k_weight": k.weight,
        "v_weight": v.weight,
        "slot_mapping": k_place.slot_mapping,
        "k_window": list(k_place.window),
        "v_window": list(v_place.window),
        "q_bias": q.bias_rows,
        "k_bias": k.bias_rows,
        "v_bias": v.bias_rows,
        "q_norm_weight": q.norm_weight,
        "k_norm_weight": k.norm_weight,
        "norm_eps": 1e-6 if eps is None else eps,
        "cos": None if rope is None else rope_table(k, rope.cos),
        "sin": None if rope is None else rope_table(k, rope.sin),
        "rotary_dim": 0 if rope is None else rope.rotary_dim,
        "rope_style": "none" if rope is None else rope.style,
        "slots": k_place.slots,
        "indexing": "torch",
        "static_tokens": isinstance(q.num_tokens, int),
    }


def _facts(q: Heads, k: Heads, v: Heads, place: Addressing, kind: str) -> dict[str, Any]:
    rope = k.rope
    packed = len({q.linear, k.linear, v.linear}) == 1
    style = "none" if rope is None else rope.style
    if rope is not None and rope.rotary_dim != k.head_dim:
        style += f"({rope.rotary_dim})"
    tokens = q.num_tokens if isinstance(q.num_tokens, int) else "T"
    paged = isinstance(place.slot_mapping, Computed)
    return {
        "projection": "packed" if packed else "separate",
        "gqa": q.num_heads // k.num_heads,
        "heads": f"{q.num_heads}/{k.num_heads}x{k.head_dim}",
        "rope": style,
        "bias": "yes" if any(p.bias is not None for p in (q, k, v)) else "no",
        "norm": "rms" if k.norm_weight is not None else "none",
        "write": kind,
        "slots": "page+offset" if paged else place.slots,
        "cache": "x".join(str(n) for n in place.window[:4]),
        "x": f"{_short(k.x.value.dtype)}[{tokens},{k.x.shape[1]}]",
    }


register(QkvCache())
