"""Traces the keys and values of multi-head latent attention back to the latents.

    kv = linear(latents, kv_b)                         [K, H, N + V]
    k  = cat(kv[..., :N], rope_keys for every head)    [K, H, N + R]
    v  = kv[..., N:]

The graph assembles k with `cat`, or with writes to slices of new memory.

Dimension letters: B sequences with K keys each; H heads. N is the width of the projected part of a
key, R is the width of the rope part of a key, V is the width of a value, and L is the rank of
latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View
from tilewright.patterns.effects import Atom, Effect, InexpressibleError, Size
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.projection.rows import Rows, heads_of
from tilewright.patterns.quantised.scales import weight_arguments
from tilewright.patterns.quantised.weights import DequantizedWeight
from tilewright.patterns.recognise.attention import Attention
from tilewright.patterns.recognise.gemm import Gemm, piece_of
from tilewright.patterns.recognise.linear import Linear, match_columns


@dataclass(frozen=True)
class Piece:
    """A range of consecutive columns of K [B, K, H, ...]."""

    start: Size
    view: View

    @property
    def is_shared(self) -> bool:
        """Whether the columns are the same for every head."""
        return all(atom.axis is None for atom in self.view.effect.dims[2])


@dataclass(frozen=True)
class Assembled:
    """The columns of K.

    Attributes:
        pieces: The ranges of columns.
        absorbed: The values that assemble the columns.
        scratch: The writes to new memory.
    """

    pieces: tuple[Piece, ...]
    absorbed: tuple[Value, ...]
    scratch: tuple[Value, ...]


@dataclass(frozen=True)
class LatentKeys:
    """The tensors from which the keys and values of an attention are computed.

    Attributes:
        latents: The latents, [B, K, L].
        rope_keys: The rotated parts of the keys, [B, K, R].
        weight: The weight of the up-projection, [H * (N + V), L].
        row_scale: The scale [H * (N + V), 1] that multiplies the rows of the weight, or None. If
            the weight is quantised, the graph may multiply the product by such a scale.
        num_heads: The number H of heads.
        nope: The width N of the unrotated part of a key.
        v_dim: The width V of a value.
        scales: If the graph multiplies 8-bit codes themselves, the op's arguments for latents and
            weight; else empty.
        dtype: The dtype of the product.
        absorbed: The values that compute K and V from latents, rope keys and weight.
        scratch: The writes to new memory.
    """

    latents: View
    rope_keys: View
    weight: View
    row_scale: View | None
    num_heads: int
    nope: int
    v_dim: int
    scales: Mapping[str, Any]
    dtype: torch.dtype
    absorbed: tuple[Value, ...]
    scratch: tuple[Value, ...]


def has_shared_part(keys: Sequence[View], flow: Dataflow) -> bool:
    """Whether some, but not all, columns of K [B, K, H, D] are the same for every head."""
    try:
        found = assembled(keys, flow)
    except InexpressibleError:
        return False
    shared = [piece.is_shared for piece in found.pieces]
    return any(shared) and not all(shared)


def match_latent_keys(attention: Attention, flow: Dataflow) -> LatentKeys:
    """Returns the latents and the weight that K and V of an attention are projected from. Raises
    Reject if K and V have another form, or are projected from different latents."""
    found = assembled(attention.keys, flow)
    widths = " + ".join(str(piece.view.shape[-1]) for piece in found.pieces)
    if len(found.pieces) != 2:
        _refuse(
            f"K's columns come in {len(found.pieces)} pieces ({widths}), not two", attention.keys[0]
        )
    projected, shared = found.pieces
    if not shared.is_shared:
        _refuse(f"the second of K's pieces ({widths}) differs between heads", shared.view)
    k, k_rows, latents = _projection(projected.view, "K")
    v, v_rows, of_values = _projection(piece_of(attention.v), "V")
    k_gemm, v_gemm = k.gemm, v.gemm
    if not equal_values(latents, of_values):
        reject(
            "LATENT_VALUES",
            Stage.V_PATH,
            f"K is projected from {latents.value}, but V from {of_values.value}",
            v_gemm.value,
        )
    for gemm in (k_gemm, v_gemm):
        if gemm.bias is not None:
            reject("UNSUPPORTED", Stage.GUARDS, "the up-projection has a bias", gemm.value)
    weight = _weight(k_gemm, v_gemm, k_rows, v_rows)
    products = dict.fromkeys((*k.absorbed, *v.absorbed))
    joined = _joins(projected.view.value, k), _joins(attention.v.value, v)
    return LatentKeys(
        latents=latents,
        rope_keys=_one_head(shared.view),
        weight=weight,
        row_scale=_row_scale(k, v),
        num_heads=k_rows.num_heads,
        nope=k_rows.head_dim,
        v_dim=v_rows.head_dim,
        scales=_scales(k_gemm, v_gemm, projected.view),
        dtype=k.value.dtype,
        absorbed=tuple(dict.fromkeys((*found.absorbed, *joined[0], *joined[1], *products))),
        scratch=found.scratch,
    )


def _joins(value: Value, linear: Linear) -> tuple[Value, ...]:
    """Returns the concatenation from which K or V is taken, if one stands between the linear's
    result and K or V."""
    return () if value is linear.value else (value,)


def _one_head(view: View) -> View:
    batch, keys, _, width = view.effect.dims
    return view.with_dims(batch, keys, width)


def _refuse(why: str, culprit: View) -> NoReturn:
    reject(
        "LATENT_KEYS",
        Stage.K_PATH,
        why,
        culprit,
        hint=(
            "the known form of keys is [up-projected part, rope part], where all heads share "
            "the rope part"
        ),
    )


# --- the projection -------------------------------------------------------------------------------


def _projection(view: View, who: str) -> tuple[Linear, Rows, View]:
    """Returns three things for a view [B, K, H, D] of a linear's result: the linear, the rows of
    its weight that compute these heads, and the linear's input, which is the latents [B, K, L]."""
    code, stage = ("LATENT_KEYS", Stage.K_PATH) if who == "K" else ("LATENT_VALUES", Stage.V_PATH)
    columns = match_columns(view)
    if columns is not None and _only_scales(columns.linear):
        linear, layout = columns.linear, columns.layout
        rows = heads_of(layout, linear.gemm.feature, None)
        if columns.rank == 2 and rows and rows.dims(linear.gemm.feature) == layout.dims[2:]:
            return linear, rows, columns.x
    reject(
        code,
        stage,
        f"the heads of {who} are not the result of a linear: {view.value}",
        view,
        hint=(
            "compute the up-projection with a linear, and change its result only by scales of "
            "its rows"
        ),
    )


def _only_scales(linear: Linear) -> bool:
    """Whether a linear is a plain product, or a product of codes whose sums are scaled by row."""
    changed = linear.clip or linear.deltas or linear.bias is not linear.gemm.bias
    same = all(value.dtype == linear.value.dtype for value in linear.absorbed)
    return not changed and same


def _row_scale(k: Linear, v: Linear) -> View | None:
    """Returns the scale [N, 1] that multiplies the product, one number for each row of the weight;
    None if there is no such scale. Raises Reject (WEIGHT_FORMAT) if K and V have different scales,
    or if the product of codes is already scaled."""
    if k.scale is None and v.scale is None:
        return None
    rows = k.gemm.shape[-1]
    if k.value is not v.value or k.scale is None or k.scale.shape != (rows,):
        reject(
            "WEIGHT_FORMAT",
            Stage.GUARDS,
            "K and V are multiplied by different scales",
            k.value,
            v.value,
        )
    if k.gemm.x_scale is not None:
        reject("WEIGHT_FORMAT", Stage.GUARDS, "products of codes are scaled twice", k.value)
    return k.scale.reshape(rows, 1)


def _weight(k: Gemm, v: Gemm, k_rows: Rows, v_rows: Rows) -> View:
    """Returns the weight [H * (N + V), L]. For each head, it has the rows of K and then the rows of
    V. Raises Reject (LATENT_WEIGHT) if K and V do not use one weight with its rows in this
    order."""
    width = k_rows.head_dim + v_rows.head_dim
    count = k_rows.num_heads
    heads = ((count, width),) if count > 1 else ()
    in_turn = k_rows == Rows(0, heads, k_rows.head_dim)
    in_turn = in_turn and v_rows == Rows(k_rows.head_dim, heads, v_rows.head_dim)
    same = equal_values(k.weight, v.weight) and k.weight.shape[0] == count * width
    if not in_turn or not same:
        reject(
            "LATENT_WEIGHT",
            Stage.GUARDS,
            f"K takes {k_rows.shape} rows from {k_rows.first} on, V {v_rows.shape} from "
            f"{v_rows.first} on, of weights with {k.weight.shape[0]} and {v.weight.shape[0]} rows",
            k.value,
            v.value,
            hint="use one weight [heads * (nope + v), rank] in which each head's rows for K "
            "come before its rows for V",
        )
    return k.weight


def _scales(k: Gemm, v: Gemm, keys: View) -> dict[str, Any]:
    """Returns the op's arguments for the scales of latents and weight, if the graph multiplies
    their codes; else an empty dict. Raises Reject if K and V are products of different codes, or if
    the op does not support the blocks of their scales."""
    if k.x_scale is None or k.weight_scale is None:
        return {}
    if k.value is not v.value or k.weight.value.dtype != torch.float8_e4m3fn:
        reject("WEIGHT_FORMAT", Stage.GUARDS, "K and V are products of different codes", k.value)
    codes = DequantizedWeight(k.weight, "fp8", k.weight_scale, None, 0, ())
    found = weight_arguments([codes])
    (rows, columns), rank = found["scale_block"], k.weight.shape[1]
    groups = k.x_scale.shape[1]
    width = (rank if groups == 1 else effects.divides(groups, rank)) or 0
    block = min(width, columns) if isinstance(width, int) else 0
    if block < 1 or width % block or columns % block or rank % block:
        reject(
            "SCALE_BLOCK", Stage.GUARDS, f"a latent of {rank} columns has {groups} scales", k.value
        )
    repeats = columns // block if columns < rank else rank // block
    layout = effects.compose(keys.effect, k.layout)
    lead = (
        layout.dims[:2]
        if k.x_scale.shape[0] != 1
        else ((Atom(None, 0, n),) for n in keys.shape[:2])
    )
    batch, tokens = lead
    first = layout.start[0] if k.x_scale.shape[0] != 1 else 0
    last = effects.identity(k.x_scale.shape).dims[1]
    scale = k.x_scale.through(Effect((batch, tokens, last), (first, 0)))
    return {
        "latent_scale": finer(scale, width // block if groups > 1 else rank // block),
        "kv_b_scale": _finer_stored(found["q_scale"], repeats),
        "scale_block": [rows, block],
    }


def finer(scale: View, repeats: int) -> View:
    """Returns the scale with each number repeated along the last dimension."""
    *lead, last = scale.effect.dims
    dim = effects.coalesce((*last, Atom(None, 0, repeats)))
    return scale.with_dims(*lead, dim)


def _finer_stored(scale: View | Computed, repeats: int) -> View | Computed:
    """Returns the scale of a weight with each number repeated along the last dimension. The scale
    may be read in another dtype."""
    if isinstance(scale, View):
        return finer(scale, repeats)
    stored, *given = scale.operands
    return replace(scale, operands=(finer(stored, repeats), *given))


# --- the columns of K -----------------------------------------------------------------------------


def assembled(keys: Sequence[View], flow: Dataflow) -> Assembled:
    """Splits K [B, K, H, D], which is given in one or more parts, into ranges of columns. Each
    range is a view of the tensor that it was assembled from."""
    parts = [_assembled(k, flow) for k in keys]
    pieces: list[Piece] = []
    first: Size = 0
    for k, part in zip(keys, parts, strict=True):
        pieces += [replace(piece, start=piece.start + first) for piece in part.pieces]
        first = first + k.shape[-1]
    return Assembled(
        tuple(pieces),
        tuple(value for part in parts for value in part.absorbed),
        tuple(value for part in parts for value in part.scratch),
    )


def _assembled(k: View, flow: Dataflow) -> Assembled:
    value = k.value
    if value.op == "aten.cat":
        pieces = _cat_pieces(k)
        if pieces is not None:
            made, scratch = _fresh_memory(value, flow)
            return Assembled(pieces, (value, *made), scratch)
    return Assembled((Piece(0, k),), (), ())


def _cat_pieces(k: View) -> tuple[Piece, ...] | None:
    """Returns the pieces of a concatenation, if K has all columns of the concatenation; else
    None."""
    parts, axis = k.value.args
    last = k.effect.dims[-1]
    whole = effects.identity(k.value.shape).dims[axis]
    if last != whole or k.effect.start[axis] != 0:
        return None
    found, start = [], 0
    for part in parts:
        length = part.shape[axis]
        if not isinstance(length, int):
            return None
        if length:
            narrow = effects.narrow(k.effect, 3, start, length)
            found.append(Piece(start, piece_of(View(k.value, narrow))))
        start += length
    return tuple(found)


def _fresh_memory(cat: Value, flow: Dataflow) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Returns (the allocation, the writes) of a concatenation that was written slice by slice.
    Returns two empty tuples for any other value."""
    home = flow.home(cat)
    if home is cat.node:
        return (), ()
    memory = flow.memory_of[home]
    made = flow.views.get(memory.root)
    stores = tuple(v for v in flow.written.get(memory, ()) if v.position <= cat.position)
    return ((made.value,) if isinstance(made, View) else ()), stores
