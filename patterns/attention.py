"""Attention as a graph has it, in one normal form: softmax(q @ k^T * scale + mask) @ v.

Dimension letters: B sequences, S queries and K keys of each, H heads, D head_dim, V head_dim of the
values; T = B * S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilewright.patterns import effects
from tilewright.patterns.constants import number_of
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import Atom, Effect, Size
from tilewright.patterns.language import Parts, Result, Stage, register_code, reject

register_code("ATTENTION_FORM", "attention is computed in a way that the op does not know")


@dataclass(frozen=True)
class Attention:
    """One attention, token-major.

    q [B, S, H, D]; k [B, K, H, D]; v [B, K, H, V]. mask: [B or 1, H or 1, S or 1, K], bool (True:
    seen) or added; causal: query i sees the keys up to i. scale: of q @ k^T.
    row_offsets, key_offsets: [B + 1] of ragged batches; then B of q, k and v is one.
    end: the result. layout: its dimensions on the axes [B, S, H, width]. width: V, or more, where
        values are padded with columns of zeros: so is the result.
    absorbed: everything between, `end` too.
    """

    q: View
    k: View
    v: View
    mask: View | None
    causal: bool
    scale: float
    end: Value
    layout: Effect
    width: Size
    absorbed: tuple[Value, ...]
    row_offsets: View | None = None
    key_offsets: View | None = None

    @property
    def head_dim(self) -> Size:
        return self.q.shape[-1]

    @property
    def num_heads(self) -> Size:
        return self.q.shape[2]

    def result(self) -> Result | Parts:
        """`end` as what it is of an output [T, H, V]."""
        if self.width == self.v.shape[-1]:
            return Result(self.end, self._on_output(effects.identity(self.end.shape)))
        return Parts(self.end, self._on_output)

    def _on_output(self, effect: Effect) -> Effect:
        """An effect on `end` as one on [T, H, V]; raises InexpressibleError for padded columns."""
        batch, queries, heads, _ = self.q.shape
        width = self.v.shape[-1]
        taken = effects.compose(effect, self.layout)
        last = [a for dim in taken.dims for a in dim if a.axis == 3]
        reach = taken.start[3] + sum(a.step * (a.length - 1) for a in last)
        if width != self.width and not reach < width:
            raise effects.InexpressibleError("columns that padded values make")
        flat = effects.identity((effects.product((batch, queries)), heads, width))
        return effects.compose(taken, effects.reshape(flat, (batch, queries, heads, width)))


def is_attention(value: Value) -> bool:
    """Whether a value is the end of an attention, or what is left of one to look at."""
    return value.op in _RULES


def match_attention(value: Value, flow: Dataflow) -> Attention:
    """The attention that a value for which :func:`is_attention` holds is.

    Raises Reject (ATTENTION_FORM).
    """
    return _RULES[value.op](value, flow)


def keys_of(value: Value) -> View | None:
    """The keys [B, K, H, D] of what may be an attention; None where they cannot be told."""
    k = _named(value, _NAMES[value.op]).get("key")
    if not isinstance(k, View) or len(k.shape) not in (3, 4):
        return None
    return _token_major(k, k.shape)


_SDPA = "aten.scaled_dot_product_attention"
_NAMES = {
    _SDPA: (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
    ),
}  # fmt: skip


def _named(value: Value, names: tuple[str, ...]) -> dict[str, Any]:
    return dict(zip(names, value.args, strict=False)) | dict(value.kwargs)


def _scaled_dot_product(value: Value, flow: Dataflow) -> Attention:
    given = _named(value, _NAMES[_SDPA])
    q, k, v = (given["query"], given["key"], given["value"])
    if number_of(given.get("dropout_p") or 0.0) != 0.0:
        refuse("its weights are dropped at random", value)
    rank = len(q.shape)
    if rank not in (3, 4) or any(len(view.shape) != rank for view in (k, v)):
        refuse(f"q, k and v have {len(q.shape)}, {len(k.shape)} and {len(v.shape)} axes", value)
    batch = (q.shape[0],) if rank == 4 else ()
    # A batch of one is broadcast by the product; heads are not.
    q, k, v = (_token_major(view, (*batch, *view.shape[len(batch) :])) for view in (q, k, v))
    if len({view.shape[2] for view in (q, k, v)}) != 1:
        refuse(f"{q.shape[2]} query, {k.shape[2]} key and {v.shape[2]} value heads", value)
    scale = given.get("scale")
    head_dim = q.shape[-1]
    if scale is None and not isinstance(head_dim, int):
        refuse("its head_dim is not known", value)
    mask = given.get("attn_mask")
    shape = (q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    order = (0, 2, 1, 3) if rank == 4 else (2, 1, 3)
    layout = effects.identity(shape)
    if rank == 3:
        layout = effects.squeeze(layout, [0])
        order = (1, 0, 2)
    return Attention(
        q=q,
        k=k,
        v=v,
        mask=None if mask is None else _four_axes(mask, k.shape[1], value),
        causal=bool(given.get("is_causal", False)),
        scale=head_dim**-0.5 if scale is None else number_of(scale),
        end=value,
        layout=effects.permute(layout, order),
        width=v.shape[-1],
        absorbed=(value,),
    )


def _token_major(view: View, shape: tuple[Size, ...]) -> View:
    """[B, H, S, D], or without B, as [B, S, H, D]."""
    effect = effects.expand(view.effect, shape)
    if len(shape) == 3:
        effect = effects.unsqueeze(effect, 0)
    return View(view.value, effects.permute(effect, (0, 2, 1, 3)))


def _four_axes(mask: View, keys: Size, value: Value) -> View:
    """A mask [..., S, K] as [B or 1, H or 1, S or 1, K], without what only repeats."""
    if not 0 < len(mask.shape) <= 4:
        refuse(f"its mask has {len(mask.shape)} axes", value)
    effect = effects.expand(mask.effect, (*mask.shape[:-1], keys))
    dims = ((),) * (4 - len(mask.shape)) + effect.dims
    lead = tuple(() if all(a.axis is None for a in dim) else dim for dim in dims[:-1])
    return View(mask.value, Effect((*lead, dims[-1]), effect.start))


def refuse(why: str, value: Value, hint: str = "") -> Any:
    """Ends the attempt: ATTENTION_FORM."""
    reject("ATTENTION_FORM", Stage.ACTIVATION, f"{value}: {why}", value, hint=hint)


_RULES: dict[str, Callable[[Value, Dataflow], Attention]] = {_SDPA: _scaled_dot_product}


# --- values padded to the width of the keys -------------------------------------------------------


def without_padding(found: Attention) -> Attention:
    """The attention with its values' own width, where columns of zeros were added to them."""
    columns = unpadded(found.v)
    if columns is None or columns[0] != 0:
        return found
    return replace(found, v=columns[1], absorbed=(*found.absorbed, found.v.value))


def unpadded(view: View) -> tuple[int, View] | None:
    """(first, columns) of a view [..., D] that is zero but for a run of columns; None where it is
    nothing that was padded."""
    value = view.value
    if value.op != "aten.pad" or len(value.args) < 2 or value.kwargs:
        return None
    inner, sizes, *rest = value.args
    plain = rest in ([], ["constant"], ["constant", None], ["constant", 0], ["constant", 0.0])
    if not plain or len(sizes) != 2 or not all(isinstance(n, int) and n >= 0 for n in sizes):
        return None
    last = len(value.shape) - 1
    whole = effects.identity(value.shape).dims[last]
    if not whole or view.effect.dims[-1] != whole or view.effect.start[last] != 0:
        return None
    dims = (*view.effect.dims[:-1], (Atom(last, 1, inner.shape[-1]),))
    return sizes[0], inner.through(Effect(dims, view.effect.start))
