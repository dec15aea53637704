"""Reads attention in a graph and returns it in one normal form: softmax(q @ k^T * scale + mask) @
v.

Dimension letters: B sequences, S queries of each sequence, K keys of each sequence, H heads, D
head_dim, V head_dim of the values, T = B * S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.constants import number_of
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Dataflow, Value, View, upstream
from tilewright.patterns.effects import Atom, Effect, Size
from tilewright.patterns.language import Parts, Result, Stage, reject
from tilewright.patterns.recognise.attention_eager import (
    HeadsOf,
    by_roles,
    logits_of,
    product_of,
    unread_step,
    weighted_by,
)
from tilewright.patterns.recognise.attention_varlen import FORMS, arguments_of, name_of_op, obstacle


@dataclass(frozen=True)
class Attention:
    """An attention of the graph in its normal form. In its tensors, the tokens come before the
    heads.

    Attributes:
        terms: Queries q [B, S, H, d] and keys k [B, K, H, d] for each part of the heads that has a
            separate product. Most graphs have one term, for whole heads.
        v: The values, [B, K, H, V].
        mask: A boolean mask [B or 1, H or 1, S or 1, K], or None. A query attends to a key where
            the mask equals `sees`.
        causal: Whether query i attends only to the keys up to i.
        scale: The factor of q @ k^T.
        end: The value that is the attention's result.
        layout: The dimensions of `end`, expressed on the axes [B, S, H, width].
        width: The width of the result's heads. This is V, or a larger number if the values, and
            therefore the result, are padded with columns of zeros.
        absorbed: All values from the products to `end`, including `end`.
        sees: The value of `mask` where a query attends to a key.
        added: A tensor [B or 1, H or 1, S or 1, K] that is added to the scaled products, or None.
            It has any dtype; True counts as 1.
        subtracted: Whether `added` is subtracted from the products instead of added.
        softcap: If this is a number c other than 0, the logits before the mask are c * tanh(scale *
            q @ k^T / c).
        sinks: An additional logit for each head [H], which has no value, or None.
        row_offsets, key_offsets: The offsets [B + 1] of a ragged batch, or None. For a ragged
            batch, the B of q, k and v is one, and `causal` counts from the last query and the last
            key.
    """

    terms: tuple[tuple[View, View], ...]
    v: View
    mask: View | None
    causal: bool
    scale: float
    end: Value
    layout: Effect
    width: Size
    absorbed: tuple[Value, ...]
    sees: bool = True
    added: View | None = None
    subtracted: bool = False
    softcap: float = 0.0
    sinks: View | None = None
    row_offsets: View | None = None
    key_offsets: View | None = None

    @property
    def keys(self) -> tuple[View, ...]:
        return tuple(k for _, k in self.terms)

    @property
    def queries(self) -> tuple[Size, Size, Size]:
        """(B, S, H): the numbers of sequences, of queries in each sequence, and of heads."""
        batch, queries, heads, _ = self.terms[0][0].shape
        return batch, queries, heads

    def scratch(self, flow: Dataflow) -> tuple[Value, ...]:
        """Returns the in-place writes to the logits or the weights. They include the write that
        completes `logits[...] += mask`."""
        made = flow.values_at(value.node for value in self.absorbed)
        writes = {value: value.store.memory for value in made if value.store is not None}
        again = (write for value in self.absorbed for write in flow.written_back(value))
        held = set(writes.values())
        ends = (write for write in again if write.store and write.store.memory in held)
        return tuple(dict.fromkeys((*writes, *ends)))

    def result(self) -> Result | Parts:
        """Returns the result that replaces `end` by an output [T, H, V]."""
        # One of several outputs of a node has no node of its own.
        if self.width == self.v.shape[-1] and "output" not in self.end.kwargs:
            return Result(self.end, self._on_output(effects.identity(self.end.shape)))
        return Parts(self.end, self._on_output)

    def _on_output(self, effect: Effect) -> Effect:
        """Converts an effect on `end` to an effect on [T, H, V]. Raises InexpressibleError for
        columns of padding."""
        batch, queries, heads = self.queries
        width = self.v.shape[-1]
        taken = effects.compose(effect, self.layout)
        last = [a for dim in taken.dims for a in dim if a.axis == 3]
        reach = taken.start[3] + sum(a.step * (a.length - 1) for a in last)
        if width != self.width and not reach < width:
            raise effects.InexpressibleError("some columns come from the padding of the values")
        flat = effects.identity((effects.product((batch, queries)), heads, width))
        return effects.compose(taken, effects.reshape(flat, (batch, queries, heads, width)))


def is_spelled_softmax(value: Value) -> bool:
    """Whether a value is exp(x) divided by the sum of exp(x)."""
    if value.op not in ("aten.div", "aten.mul"):
        return False
    for above, below in value.either_way:
        total = below.value
        for _ in range(_IN_A_SUM):
            if total.op == "aten.sum" or not total.operands:
                break
            total = total.operands[0].value
        if above.value.op == "aten.exp" and total.op == "aten.sum":
            return equal_values(above, total.operands[0])
    return False


def is_of_shared_keys(value: Value) -> bool:
    """Whether a softmax that :func:`logits_of` cannot read is probably attention that the op would
    compute faster.

    The softmax is probably attention if its product reads a cached tensor or repeated heads, if it
    is masked, or if it is written as separate operations.
    """
    if len(value.shape) > 2 and is_spelled_softmax(value):
        return bool(_products_above(value))
    if value.op != "aten.softmax" or len(value.shape) < 3 or logits_of(value) is not None:
        return False
    before = upstream(value, _REACH, lambda v: not _multiplies(v))
    factors = factors_of(value)
    cached = any(v.value.op == "store" and len(v.value.shape) > 2 for v in factors)
    return cached or any(map(_repeats_heads, factors)) or any(map(_is_masked, before))


def factors_of(value: Value) -> list[View]:
    """Returns the operands of the nearest products from which a value is computed."""
    return [view for product in _products_above(value) for view in product.operands]


def _is_masked(value: Value) -> bool:
    """Whether a value combines a batched product with an operand that is not computed from a
    product. A mask is such an operand."""
    if value.op not in _MASKING:
        return False
    above = [(view, _products_above(view.value)) for view in value.operands]
    batched = any(all(len(v.shape) > 2 for v in p.operands) for _, found in above for p in found)
    return batched and any(not found and effects.product(v.shape) != 1 for v, found in above)


def _products_above(value: Value) -> list[Value]:
    """Returns the nearest products from which a value is computed."""
    above = upstream(value, _REACH, lambda v: not _multiplies(v))
    return [v for v in above if _multiplies(v)]


def _repeats_heads(view: View) -> bool:
    """Whether a dimension of a batch of matrices has several elements and repeats each of them."""
    return len(view.shape) > 2 and any(
        {atom.axis is None for atom in dim} == {True, False} for dim in view.effect.dims
    )


def _multiplies(value: Value) -> bool:
    return value.op in _WITH_SUM or product_of(value) is not None


def match_attention(value: Value, flow: Dataflow, heads_of: HeadsOf | None = None) -> Attention:
    """Returns the attention whose result or intermediate result is `value`. :func:`keys_of` must
    find keys for this value.

    heads_of: a function that is passed on to `logits_of`. Raises Reject (ATTENTION_FORM,
        CHUNKED_PREFIX) for attention that the op cannot compute.
    """
    if value.op == "aten.logsumexp":
        _refuse_chunk(value)
    if is_spelled_softmax(value):
        refuse(
            "its softmax is written as separate operations", value, hint="torch.softmax(logits, -1)"
        )
    if value.op == _SDPA:
        return _scaled_dot_product(value)
    if value.op == "aten.softmax":
        return _spelled_out(value, flow, heads_of)
    return _ragged(value, flow)


def keys_of(value: Value) -> Iterator[tuple[View, ...]]:
    """Yields possible keys of a value that may be attention. Each item is the parts [B, K, H, d] of
    such keys.

    For an unknown operator, yields one item for each operand. For a value that is not attention,
    yields nothing.
    """
    if value.op in ("aten.softmax", "aten.logsumexp"):
        logits = logits_of(value)
        if logits is not None:
            heads = _broadcast([q.shape for q, _ in logits.terms])[2]
            yield tuple(_expanded(k, (*k.shape[:2], heads)) for _, k in logits.terms)
    elif value.op == _SDPA:
        k = value.named(*_NAMES).get("key")
        if isinstance(k, View) and len(k.shape) in (3, 4):
            yield (_token_major(k, k.shape),)
    elif (name := name_of_op(value)) and value.kwargs.get("output", 0) == 0:
        guesses = (arguments_of(value).get(FORMS[name].key),) if name in FORMS else value.operands
        for k in guesses:
            if isinstance(k, View) and len(k.shape) == 3:
                yield (k.unsqueeze(0),)


@dataclass(frozen=True)
class Sketch:
    """The main facts of an attention: q [B, S, H, d], k [B, K, H or fewer, d], and whether there is
    a mask tensor."""

    q: View
    k: View
    masked: bool


def sketch_of(value: Value) -> Sketch | None:
    """Returns the main facts of an attention. Returns None for a value that is not attention, and
    for an attention whose heads have several parts."""
    if value.op == _SDPA:
        given = value.named(*_NAMES)
        q, k = given.get("query"), given.get("key")
        if not (isinstance(q, View) and isinstance(k, View)):
            return None
        if len(q.shape) != len(k.shape) or len(q.shape) not in (3, 4):
            return None
        q, k = (_token_major(view, view.shape) for view in (q, k))
        return Sketch(q, k, given.get("attn_mask") is not None)
    logits = logits_of(value) if value.op == "aten.softmax" else None
    if logits is None or len(logits.terms) != 1:
        return None
    ((q, k),) = logits.terms
    return Sketch(q, k, bool(logits.mask or logits.added))


# Products that also add a tensor.
_WITH_SUM = frozenset({"aten.linear", "aten.addmm", "aten.baddbmm"})
# The largest number of values between a quotient and the sum in it. They may be a reciprocal, a
# clamp and an epsilon.
_IN_A_SUM = 4
# The largest number of operations between a product and its softmax.
_REACH = 24
# Operations that combine a mask and scores.
_MASKING = frozenset({"aten.add", "aten.sub", "aten.where", "aten.masked_fill"})
_SDPA = "aten.scaled_dot_product_attention"
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _scaled_dot_product(value: Value) -> Attention:
    given = value.named(*_NAMES)
    q, k, v = (given["query"], given["key"], given["value"])
    if number_of(given.get("dropout_p") or 0.0) != 0.0:
        refuse("its weights are dropped at random", value, hint="model.eval(), or dropout_p=0.0")
    rank = len(q.shape)
    if rank not in (3, 4) or any(len(view.shape) != rank for view in (k, v)):
        refuse(f"q, k and v have {len(q.shape)}, {len(k.shape)} and {len(v.shape)} axes", value)
    batch = (q.shape[0],) if rank == 4 else ()
    # The product broadcasts a batch of one, and also a single head.
    q, k, v = (_token_major(view, (*batch, *view.shape[len(batch) :])) for view in (q, k, v))
    shared = bool(given.get("enable_gqa"))
    k, v = (_with_heads(view, q.shape[2], shared) for view in (k, v))
    _check_heads(q, k, v, value)
    scale, head_dim = given.get("scale"), q.shape[-1]
    if scale is None and not isinstance(head_dim, int):
        refuse("its head_dim is not known", value)
    mask = given.get("attn_mask")
    given_mask = None if mask is None else _four_axes(mask, k.shape[1], value)
    shows = mask is not None and mask.value.dtype == torch.bool
    shape = (q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    layout = effects.permute(effects.identity(shape), (0, 2, 1, 3))
    return Attention(
        terms=((q, k),),
        v=v,
        mask=given_mask if shows else None,
        added=None if shows else given_mask,
        causal=bool(given.get("is_causal", False)),
        scale=head_dim**-0.5 if scale is None else number_of(scale),
        end=value,
        layout=layout if batch else effects.squeeze(layout, [0]),
        width=v.shape[-1],
        absorbed=(value,),
    )


def _check_heads(q: View, k: View, v: View, value: Value) -> None:
    """Raises Reject (ATTENTION_FORM) unless all tensors [B, S, H, D] have the same number of
    heads."""
    if len({view.shape[2] for view in (q, k, v)}) != 1:
        refuse(f"{q.shape[2]} query, {k.shape[2]} key and {v.shape[2]} value heads", value)


def _with_heads(view: View, count: Size, shared: bool) -> View:
    """Returns [B, K, H, D] with its heads repeated to `count` heads, if PyTorch would repeat
    them."""
    batch, keys, heads, width = view.effect.dims
    group = effects.divides(view.shape[2], count)
    if group is None or not (shared or view.shape[2] == 1):
        return view
    heads = effects.coalesce((*heads, Atom(None, 0, group)))
    return view.with_dims(batch, keys, heads, width)


def _token_major(view: View, shape: tuple[Size, ...]) -> View:
    """Returns [B, H, S, D], or [H, S, D], as [B, S, H, D]."""
    effect = effects.expand(view.effect, shape)
    if len(shape) == 3:
        effect = effects.unsqueeze(effect, 0)
    return View(view.value, effects.permute(effect, (0, 2, 1, 3)))


def _four_axes(mask: View, keys: Size, value: Value) -> View:
    """Returns a mask [..., S, K] as [B or 1, H or 1, S or 1, K]. Dimensions that only repeat become
    1."""
    if not 0 < len(mask.shape) <= 4:
        refuse(f"its mask has {len(mask.shape)} axes", value)
    effect = effects.expand(mask.effect, (*mask.shape[:-1], keys))
    dims = ((),) * (4 - len(mask.shape)) + effect.dims
    return View(mask.value, Effect((*effects.once(dims[:-1]), dims[-1]), effect.start))


def _refuse_chunk(value: Value) -> NoReturn:
    reject(
        "CHUNKED_PREFIX",
        Stage.ACTIVATION,
        f"the log-sum-exp of {value} is used, so {value} is one part of an attention whose parts "
        "are merged",
        value,
        hint=(
            "compute one attention with all keys; the op does not create a key or value "
            "tensor that could be too large"
        ),
    )


def refuse(why: str, value: Value, hint: str = "") -> NoReturn:
    """Raises Reject with the code ATTENTION_FORM."""
    reject("ATTENTION_FORM", Stage.ACTIVATION, f"{value}: {why}", value, hint=hint)


def _spelled_out(softmax: Value, flow: Dataflow, heads_of: HeadsOf | None) -> Attention:
    """Matches a softmax between two products."""
    logits = logits_of(softmax, heads_of)
    above = None if logits is None else weighted_by(softmax, logits, flow)
    if logits is not None and logits.finite:
        refuse(
            "its mask is a large number instead of minus infinity",
            softmax,
            hint=(
                'exclude keys with float("-inf"), or add torch.where(seen, 0.0, number) to '
                "the logits"
            ),
        )
    if logits is None:
        _refuse_logits(softmax)
    if above is None:
        refuse(
            "its result is read by something other than one product with the values",
            softmax,
            hint="do not return the attention weights, and do not use them for anything else",
        )
    batch, queries, heads, _ = _broadcast([q.shape for q, _ in logits.terms])
    # The part that all heads share (the part with RoPE) comes last.
    parts = sorted(logits.terms, key=lambda term: term[1].effect.dims[2] == ())
    terms = tuple(
        (_expanded(q, (batch, queries, heads)), _expanded(k, (batch, k.shape[1], heads)))
        for q, k in parts
    )
    v = _expanded(above.v, (batch, above.v.shape[1], heads))
    return Attention(
        terms=terms,
        v=v,
        mask=None if logits.mask is None else by_roles(logits.mask, logits),
        causal=False,
        scale=logits.scale,
        end=above.end,
        layout=above.layout,
        width=v.shape[-1],
        absorbed=_with_all_outputs((*logits.absorbed, *above.absorbed), flow),
        sees=logits.sees,
        added=None if logits.added is None else by_roles(logits.added, logits),
        subtracted=logits.subtracted,
        softcap=logits.softcap,
        sinks=logits.sinks,
    )


def _refuse_logits(softmax: Value) -> NoReturn:
    step = unread_step(softmax)
    if step is not None and step.op == "aten.mul" and len(step.operands) == 2:
        refuse(
            f"its products of queries and keys are multiplied by a tensor ({step}), but the op "
            "scales them by one number",
            softmax,
            hint=(
                'exclude keys with masked_fill(mask == 0, float("-inf")), or add '
                "torch.where(mask == 0, number, 0.0) to the products"
            ),
        )
    why = "its logits are not a known sum of products of queries and keys"
    if step is not None and step.store is not None:
        why = f"a part of its products of queries and keys is changed in place ({step})"
    refuse(
        why,
        softmax,
        hint=(
            "add all tensors that are added to the products, and pass the sum to "
            "scaled_dot_product_attention as attn_mask"
        ),
    )


def _with_all_outputs(values: Sequence[Value], flow: Dataflow) -> tuple[Value, ...]:
    """Returns the values together with the other outputs of their nodes, such as the indices of a
    maximum."""
    several = {v.node: v.operands[0].value for v in values if "output" in v.kwargs}
    others = [u for node, x in several.items() for u in flow.users[x] if u.node is node]
    return tuple(dict.fromkeys((*values, *others)))


def _broadcast(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    return tuple(next((n for n in column if n != 1), 1) for column in zip(*shapes, strict=True))


def _expanded(view: View, lead: tuple[Size, ...]) -> View:
    return view.expand(*lead, view.shape[-1])


def _ragged(value: Value, flow: Dataflow) -> Attention:
    """Matches a varlen operator of a library, which is recognised by its name."""
    form = FORMS.get(name_of_op(value))
    if form is None:
        refuse(
            "it is not known what this operator computes",
            value,
            hint=(
                "use torch's scaled_dot_product_attention or varlen_attn, or declare what the "
                "operator computes: "
                "tilewright.patterns.recognise.attention_varlen.register_varlen"
            ),
        )
    given = arguments_of(value)
    names = (form.query, form.key, form.value, form.row_offsets, form.key_offsets)
    tensors = [tensor for name in names if isinstance(tensor := given.get(name), View)]
    if len(tensors) != len(names):
        refuse("queries, keys, values or their offsets are missing", value)
    if reason := obstacle(form, given):
        refuse(reason, value)
    q, k, v, rows, keys = tensors
    if any(len(view.shape) != 3 for view in (q, k, v)):
        refuse("queries, keys and values have other axes than [tokens, heads, width]", value)
    others = [u for u in flow.values_at([value.node]) if u is not value]
    if any(flow.users.get(u) or u in flow.output_values for u in others):
        _refuse_chunk(value)
    q, k, v = (view.unsqueeze(0) for view in (q, k, v))
    _check_heads(q, k, v, value)
    scale = given.get(form.scale)
    layout = effects.identity((1, *q.shape[1:3], v.shape[3]))
    return Attention(
        terms=((q, k),),
        v=v,
        mask=None,
        causal=bool(given[form.causal]) if form.causal else True,
        scale=q.shape[-1] ** -0.5 if scale is None else number_of(scale),
        end=value,
        layout=effects.squeeze(layout, [0]),
        width=v.shape[-1],
        absorbed=(value, *others),
        row_offsets=rows,
        key_offsets=keys,
    )


# --- values padded to the width of the keys -------------------------------------------------------


def without_padding(found: Attention) -> Attention:
    """Returns the attention with the original width of the values, if columns of zeros were added
    to the values."""
    columns = unpadded(found.v)
    if columns is None or columns[0] != 0:
        return found
    return replace(found, v=columns[1], absorbed=(*found.absorbed, found.v.value))


def unpadded(view: View) -> tuple[int, View] | None:
    """Returns (first, columns) for a view [..., D] that is zero except in one run of columns.
    Returns None if the view is not padded."""
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
