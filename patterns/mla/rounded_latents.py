"""Matches attention to cached latents that the graph rounds to float8 codes before the
up-projection.

    codes, scales = round(latents)                        all keys of the cache
    kv  = (codes @ kv_b_codes^T) * scales * kv_b_scales   ⇒   mla_decode(.., round_latents=True)
    out = attention(q, kv..., rope_keys)

For few queries, `mla_decode` reads the latents, and rounds only the latents that a query attends
to. For more queries, the graph rounds the latents, and `mla_prefill` takes the codes. Dimension
letters are explained in `patterns/mla/keys.py`.
"""

from __future__ import annotations

from typing import Any

from tilewright.ops.mla.decode.gains import is_faster
from tilewright.patterns.arithmetic.casts import strip_widening
from tilewright.patterns.attention.visible import visible_keys
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import InexpressibleError, Size
from tilewright.patterns.language import Reject
from tilewright.patterns.mla.keys import LatentKeys, finer
from tilewright.patterns.mla.query import whole_query
from tilewright.patterns.quantised.rounded_rows import RoundedRows, is_rounded, match_rounded_rows
from tilewright.patterns.recognise.attention import Attention
from tilewright.patterns.recognise.row_norm import unread


def absorbed_decode(
    attention: Attention, keys: LatentKeys, flow: Dataflow
) -> tuple[dict[str, Any], tuple[Value, ...]] | None:
    """Returns (arguments of `mla_decode`, the values that round the latents); None if the latents
    are not rounded as the op rounds them, or if attention is faster with keys and values that are
    computed from the latents."""
    if not keys.scales or keys.row_scale is not None or attention.row_offsets is not None:
        return None
    rows = _rounding(keys.latents.value)
    found = None if rows is None else _latents(rows, keys)
    if rows is None or found is None or not _is_faster(attention, keys):
        return None
    latents, group = found
    options = {f"latent_{name}": rows.options[name] for name in rows.options if name != "rounded"}
    arguments = {
        "q": whole_query(attention),
        "latent": latents,
        "rope_keys": keys.rope_keys,
        "kv_b_weight": keys.weight,
        "v_dim": keys.v_dim,
        "scale": attention.scale,
        "num_sequences": attention.queries[0],
        "weight_format": "fp8",
        "kv_b_scale": keys.scales["kv_b_scale"],
        "scale_block": keys.scales["scale_block"],
        "round_latents": True,
        "latent_group": group,
        **options,
        **visible_keys(attention),
    }
    return arguments, unread((*rows.absorbed, rows.codes), keys.absorbed, flow)


def _rounding(codes: Value) -> RoundedRows | None:
    """Returns the rounding by which the graph makes codes. Returns None if there is no rounding, if
    its scale is a number that the model stores, or if its scales are rounded to 16 bits. (In 16
    bits, scales may become zero or infinite.)"""
    if not is_rounded(codes):
        return None
    try:
        rows = match_rounded_rows(codes)
    except (Reject, InexpressibleError):
        return None
    return None if rows.is_given or rows.options.get("rounded") else rows


def _latents(rows: RoundedRows, keys: LatentKeys) -> tuple[View, int] | None:
    """Returns the latents [B, K, L] before the graph rounds them, and the number of columns that
    share a scale; 0 if all columns of a token share a scale. Returns None unless the graph
    multiplies all codes by the same scales with which it rounded them."""
    shape, width = keys.latents.shape, rows.width
    rank, scale = shape[-1], keys.scales["latent_scale"]
    if not isinstance(rank, int) or not isinstance(width, int) or rank % width:
        return None
    try:
        own = rows.scale.whole.reshape(*shape[:-1], rank // width)
        own = finer(own, scale.shape[-1] // (rank // width))
        multiplied, _ = strip_widening(scale)
        latents = rows.x.reshape(*shape)
        if keys.latents != rows.codes.whole.reshape(*shape) or multiplied != own:
            return None
    except InexpressibleError:
        return None
    return latents, 0 if width == rank else width


def _is_faster(attention: Attention, keys: LatentKeys) -> bool:
    """Whether attention to the latents themselves is faster than attention to keys and values that
    are computed from the latents. Returns False if any size, except the number of sequences, is a
    symbol."""
    sequences, queries, heads = attention.queries
    sizes: dict[str, Size] = {
        "queries": queries,
        "keys": keys.latents.shape[1],
        "heads": heads,
        "nope": keys.nope,
        "rope": keys.rope_keys.shape[-1],
        "v_dim": keys.v_dim,
        "rank": keys.latents.shape[-1],
    }
    known = {name: size for name, size in sizes.items() if isinstance(size, int)}
    if len(known) < len(sizes):
        return False
    return is_faster(**known, sequences=sequences if isinstance(sequences, int) else 0)
