"""Reads attention that is written as matmul, softmax, matmul. The roles of the dimensions follow
from their names in the two products.

    weights = softmax(scale * (q @ k^T), capped, masked)
    out = weights @ v

The logits may be a sum of products, one for each part of the heads (for example, one without RoPE
and one with RoPE). A sink is an additional logit of each head that has no value: the graph joins it
to the other logits before the softmax, and removes its weight after the softmax. Dimension letters
are explained in `patterns/recognise/attention.py`.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast
from tilewright.patterns.arithmetic.constants import number_of, one_number
from tilewright.patterns.arithmetic.formula import largest, tensor
from tilewright.patterns.arithmetic.steps import (
    INVERSIONS,
    chosen_by_mask,
    constant_factor,
    is_filled,
    reduced_dims,
)
from tilewright.patterns.dataflow import Dataflow, Value, View, upstream
from tilewright.patterns.effects import Atom, Dim, Effect, Size
from tilewright.patterns.recognise.gemm import NamedProduct, Side, layout_on, named_product

# The largest number of operations between a product and its softmax.
_REACH = 12

#: Returns which dimension of a query is the heads. Returns None if this is not known.
HeadsOf = Callable[[Side], str | None]


@dataclass
class Logits:
    """The logits of a softmax.

    Attributes:
        scale: The factor of the products.
        mask: A mask over the dimensions of the softmax, or None. A query attends to a key where the
            mask equals `sees`.
        sees: The value of `mask` where a query attends to a key.
        finite: Whether the mask uses a large negative number instead of minus infinity.
        added: Numbers that are added to the scaled products, or None.
        subtracted: Whether `added` is subtracted from the products instead of added.
        softcap: If this is a number c other than 0, the logits before the mask are `c * tanh(scaled
            products / c)`.
        sinks: The sinks [H], or None.
        terms: The products of q [B, S, H, d] and k [B, K, H, d], which are summed.
        absorbed: The values that compute the logits.
        roles: Which dimensions of the softmax are B, H, S and K. B may have no dimension. H has two
            dimensions if the heads are in groups. S may have no dimension if `heads_of` says which
            dimension is the heads.
        heads_of: The function that :func:`logits_of` got as its argument of this name.
        unread: The operation that could not be read, or None.
    """

    scale: float = 1.0
    mask: View | None = None
    sees: bool = True
    finite: bool = False
    added: View | None = None
    subtracted: bool = False
    softcap: float = 0.0
    sinks: View | None = None
    terms: list[tuple[View, View]] = field(default_factory=list)
    absorbed: list[Value] = field(default_factory=list)
    roles: tuple[tuple[int, ...], ...] = ()
    heads_of: HeadsOf | None = None
    unread: Value | None = None


@dataclass(frozen=True)
class Weighted:
    """The product of the softmax and the values.

    Attributes:
        v: The values, [B, K, H, V].
        end: The value that is the result of the product.
        layout: The dimensions of `end`, expressed on the axes [B, S, H, V].
        absorbed: The values that compute the product.
    """

    v: View
    end: Value
    layout: Effect
    absorbed: tuple[Value, ...]


def logits_of(softmax: Value, heads_of: HeadsOf | None = None) -> Logits | None:
    """Returns the logits of a softmax (or log-sum-exp) over the last dimension. Returns None if the
    softmax is not a part of attention.

    heads_of: a function that says which dimension is the heads. It is needed if all heads share the
    keys, because then the product does not distinguish heads from queries.
    """
    found = Logits(absorbed=[softmax], heads_of=heads_of)
    if not _read(found, softmax) or not _keeps_sinks_by_head(found):
        return None
    found.scale *= found.softcap or 1.0
    return found


def unread_step(softmax: Value) -> Value | None:
    """Returns the operation between a product and a softmax that :func:`logits_of` cannot read."""
    found = Logits()
    return None if _read(found, softmax) else found.unread


def weighted_by(softmax: Value, logits: Logits, flow: Dataflow) -> Weighted | None:
    """Returns the product of the values with the result of a softmax, from which the sinks are
    removed. Returns None unless this product is the only reader of the result, and only casts are
    between them."""
    value, absorbed = softmax, []
    shape = (*softmax.shape[:-1], softmax.shape[-1] - int(logits.sinks is not None))
    while True:
        user = flow.only_user(value)
        if user is None:
            return None
        absorbed.append(user)
        found = product_of(user)
        if found is not None:
            return _weighted(user, value, shape, found, logits, tuple(absorbed))
        if not is_float_cast(user) or user.operands[0].effect != effects.identity(shape):
            return None
        value = user


# --- below ----------------------------------------------------------------------------------------


def _read(found: Logits, softmax: Value) -> bool:
    """Reads the logits of a softmax over the last dimension. Returns False if the softmax is not a
    part of attention."""
    logits = softmax.args[0]
    if not isinstance(logits, View):
        return False
    rank = len(logits.shape)
    if reduced_dims(softmax) != (rank - 1,) or rank not in (3, 4, 5):
        return False
    try:
        return _peel(found, logits) and bool(found.terms)
    except effects.InexpressibleError:
        return False


def _peel(found: Logits, view: View) -> bool:
    """Goes back from the logits, operation by operation. Returns False if an operation is
    unknown."""
    for _ in range(_REACH):
        value = found.unread = view.value
        if (product := _batched_sum(found, view) or product_of(value)) is not None:
            return _term(found, view, product)
        if is_float_cast(value):
            inner: View | None = value.operands[0]
        elif value.op in ("aten.mul", "aten.div"):
            inner = _scaled(found, value)
        elif value.op == "aten.tanh":
            inner = _capped(found, value)
        elif value.op == "aten.sub":
            inner = _shifted(found, value) or _added(found, value, view)
        elif value.op == "aten.cat":
            inner = _without_sinks(found, view)
        elif value.op in ("aten.masked_fill", "aten.where"):
            inner = _masked(found, value, view)
        elif value.op == "aten.add" and value.kwargs.get("alpha", 1) == 1:
            if len(value.operands) == 2 and all(v.value.projected for v in value.operands):
                return _sum(found, view)
            inner = _added(found, value, view)
        else:
            return False
        if inner is None:
            return False
        found.absorbed.append(value)
        view = inner if value.op == "aten.cat" else view.of_operand(inner)
    return False


def _sum(found: Logits, view: View) -> bool:
    """Reads a sum of products. Only a product in which each head has its own keys determines the
    roles of the dimensions. Therefore, a product that could not be read is tried again after such a
    product."""
    found.absorbed.append(view.value)
    left = [view.of_operand(v) for v in view.value.operands]
    around = _around(found)
    for _ in range(2):
        left = [part for part in left if not _peel(found, part)]
    # A scale or mask on one product would not apply to the other product.
    return not left and _around(found) == around


def _around(found: Logits) -> tuple[Any, ...]:
    masks = found.mask, found.sees, found.added, found.subtracted, found.finite
    return found.scale, found.softcap, found.sinks, *masks


def _scaled(found: Logits, value: Value) -> View | None:
    if found.terms:
        return None
    scaled = constant_factor(value, one_number)
    if scaled is None:
        return None
    found.scale *= scaled[1]
    return scaled[0]


def _capped(found: Logits, value: Value) -> View | None:
    """Reads c * tanh(x / c). The scale that has been read up to here is outside of the tanh, so it
    is c."""
    if found.softcap or found.scale == 0 or found.terms:
        return None
    found.softcap, found.scale = abs(found.scale), math.copysign(1.0, found.scale)
    return value.operands[0]


_X = tensor("x")
_LESS_THE_LARGEST = _X - largest(_X, "keys")


def _shifted(found: Logits, value: Value) -> View | None:
    """Reads x - max(x), which does not change the softmax."""
    match = _LESS_THE_LARGEST.match(value.whole) if _is_bare(found) else None
    if match is None:
        return None
    x: View = match.bound["x"]
    found.absorbed += [one for one in match.absorbed if one is not value]
    return x


def _without_sinks(found: Logits, view: View) -> View | None:
    """Reads cat(x, sinks), where x is [..., K] and the sinks are [..., 1]. The product determines
    later which dimensions of the sinks are heads."""
    parts, axis = view.value.args
    if not view.is_whole or len(parts) != 2 or not _is_bare(found) or found.sinks is not None:
        return None
    x, sinks = parts
    if axis != len(view.shape) - 1 or sinks.shape[axis] != 1:
        return None
    found.sinks = sinks
    return x


def _keeps_sinks_by_head(found: Logits) -> bool:
    """Reduces the sinks to [H], if there are any. Returns False if they differ between sequences or
    queries."""
    if found.sinks is None:
        return True
    batch, heads, queries, _ = found.roles
    if any(_varies(found.sinks, at) for at in (*batch, *queries)):
        return False
    dims = found.sinks.effect.dims
    found.sinks = found.sinks.with_dims(effects.coalesce(a for at in heads for a in dims[at]))
    return True


def _varies(view: View | None, dim: int) -> bool:
    return view is not None and not effects.repeats(view.effect.dims[dim])


def _is_bare(found: Logits) -> bool:
    """Whether no operation that has been read so far, back from the softmax, changes the logits."""
    plain = found.scale == 1.0 and not found.softcap and not found.terms
    return plain and not (found.mask or found.added)


def _masked(found: Logits, value: Value, view: View) -> View | None:
    """Reads a mask that sets logits to minus infinity."""
    chosen = chosen_by_mask(value)
    if chosen is None or found.mask is not None:
        return None
    mask, *sides = chosen
    fills = value.op == "aten.masked_fill" or one_number(sides[0]) is not None
    fill, x = sides if fills else reversed(sides)
    number = one_number(fill)
    if found.softcap or found.terms or not isinstance(x, View) or number is None:
        return None
    found.finite = number != float("-inf")
    if mask.value.dtype != torch.bool:
        return None
    found.mask, found.sees = view.of_operand(mask), not fills
    inner = mask.value.operands[0] if mask.value.op in INVERSIONS else None
    if fills and inner is not None and inner.value.dtype == torch.bool:
        found.mask, found.sees = found.mask.of_operand(inner), True
    return x


def _added(found: Logits, value: Value, view: View) -> View | None:
    """Reads a mask of numbers. The mask is added to the scaled products, or subtracted from them,
    so a scale must not follow the mask."""
    products = [v for v in value.operands if v.value.projected]
    if len(products) != 1:
        products = [v for v in value.operands if _holds_product(v)]
    if len(value.operands) != 2 or len(products) != 1 or found.added is not None:
        return None
    if found.scale != 1.0 or found.softcap or found.terms:
        return None
    (other,) = [v for v in value.operands if v is not products[0]]
    subtracted = value.op == "aten.sub"
    if value.kwargs.get("alpha", 1) != 1 or (subtracted and value.args[0] is not products[0]):
        return None
    found.added, found.subtracted = view.of_operand(other), subtracted
    return products[0]


def _holds_product(view: View) -> bool:
    """Whether a value a few steps back is a product of two tensors."""
    return any(named_product(value) is not None for value in upstream(view.value, _REACH))


def product_of(value: Value) -> NamedProduct | None:
    """Returns a value as a product of two tensors. The product may be a linear x @ keys^T for one
    sequence. Returns None for every other value."""
    if value.op != "aten.linear" or len(value.operands) != 2 or len(value.args[1].shape) != 2:
        return named_product(value)
    x, weight = value.operands
    lead = string.ascii_lowercase[: len(x.shape) - 1]
    return NamedProduct((Side(x, lead + "K"), Side(weight, "NK")), lead + "N")


def _batched_sum(found: Logits, view: View) -> NamedProduct | None:
    """Returns the product of a baddbmm, alpha * product + beta * tensor, and records the other
    terms of the baddbmm. Returns None for every other value."""
    value = view.value
    if value.op != "aten.baddbmm" or len(value.operands) != 3 or found.terms:
        return None
    alpha, beta = (number_of(value.kwargs.get(name, 1)) for name in ("alpha", "beta"))
    if beta != 0 and not is_filled(value.operands[0], 0.0):
        if beta != 1 or found.added is not None or found.scale != 1.0 or found.softcap:
            return None
        found.added = view.of_operand(value.operands[0])
    found.scale *= alpha
    one, other = (
        Side(v, names) for v, names in zip(value.operands[1:], ("aMK", "aKN"), strict=True)
    )
    return NamedProduct((one, other), "aMN")


def _term(found: Logits, view: View, product: NamedProduct) -> bool:
    """Reads one product q @ k^T."""
    sides = [without_repeats(side, product) for side in product.sides]
    product = replace(product, sides=(sides[0], sides[1]))
    named = _named(view.effect, product, view.value.shape) if product.names_differ else None
    if named is None or (keys := named[1][-1]) is None:
        return False
    product, dims = named
    q, k = sorted(product.sides, key=lambda side: keys in side.names)
    q_names, k_names = q.names, k.names
    if keys in q_names or keys not in k_names:
        return False
    order = found.roles or _roles_in(dims, q, k_names, found)
    if not order:
        return False
    batch, heads, queries, last = (tuple(n for at in role if (n := dims[at])) for role in order)
    summed = tuple(n for n in q_names if n not in product.result)
    known = {*batch, *heads, *queries, *summed}
    fits = last == (keys,) and len(summed) == 1 and not set(queries) & set(k_names)
    fits = fits and set(heads) <= set(q_names)
    if (
        not fits
        or not set(q_names) <= known
        or not set(k_names) <= (known - {*queries, keys}) | {keys}
    ):
        return False
    found.roles = order
    found.absorbed.append(view.value)
    found.terms.append(
        (
            _on_axes(q, (batch, queries, heads, summed), product),
            _on_axes(k, (batch, last, heads, summed), product),
        )
    )
    return True


def _roles_in(
    dims: Sequence[str | None], q: Side, k_names: Sequence[str], found: Logits
) -> tuple[tuple[int, ...], ...]:
    """Returns which dimensions of the softmax are B, H, S and K. Returns () if the product does not
    determine this.

    Each head or group of heads must have its own keys, unless `heads_of` says which dimension is
    the heads. If several dimensions could be B, the first of these dimensions is B. If the sinks
    vary along this dimension, it is H instead.
    """
    of_q = [n for n in dims[:-1] if n is not None and n in q.names]
    own = [n for n in of_q if n not in k_names]
    if found.heads_of is not None:
        heads = found.heads_of(q)
        if heads not in of_q:
            return ()
        others = [n for n in of_q if n != heads]
        wanted = ([n for n in others if n not in own], [heads], [n for n in others if n in own])
    else:
        lead = [n for n in of_q if n not in own[-1:]]
        if not own or not lead or not set(lead) & set(k_names):
            return ()
        first = len(lead) > 1 and not _varies(found.sinks, dims.index(lead[0]))
        wanted = (lead[:first], lead[first:], own[-1:])
    return (*(tuple(dims.index(n) for n in names) for names in wanted), (len(dims) - 1,))


def without_repeats(side: Side, product: NamedProduct) -> Side:
    """Returns a side without the names of the dimensions that broadcast."""
    sizes = product.sizes
    kept = [
        n
        for n, size in zip(side.names, side.view.shape, strict=True)
        if size != 1 or sizes[n] == 1 or n not in product.result
    ]
    return Side(side.ordered(kept), "".join(kept))


def _on_axes(side: Side, axes: Sequence[Sequence[str]], product: NamedProduct) -> View:
    """Returns a side in which the dimensions of each axis are merged. If the side has only some
    dimensions of an axis, it repeats along the other dimensions of this axis."""
    dims, sizes = side.dims, product.sizes
    found: list[Dim] = []
    for names in axes:
        held = any(n in dims for n in names)
        repeated = {n: (Atom(None, 0, sizes[n]),) for n in names if held and sizes[n] != 1}
        parts: list[Dim] = [dims.get(n, ()) or repeated.get(n, ()) for n in names]
        found.append(effects.coalesce(a for dim in parts for a in dim))
    return side.view.with_dims(*found)


def _named(
    effect: Effect, product: NamedProduct, shape: Sequence[Size]
) -> tuple[NamedProduct, list[str | None]] | None:
    """Returns the product, and a name for each dimension of `effect`, which is a view of the
    product's result. Returns None if the names are not known.

    If the view splits a dimension (for example, into sequences and their heads), the returned
    product is split in the same way.
    """
    dims = _names_of(effect, product.result, tuple(shape))
    if dims is not None:
        return product, dims
    atoms = [a for dim in effect.dims for a in dim]
    if any(effect.start) or any(len(dim) > 1 for dim in effect.dims):
        return None
    parts: list[list[Atom]] = [[a for a in atoms if a.axis == i] for i in range(len(shape))]
    if any(a.axis is None for a in atoms) or any(
        not _tile(mine, size) for mine, size in zip(parts, shape, strict=True)
    ):
        return None
    split = {
        n: [a.length for a in mine]
        for n, mine in zip(product.result, parts, strict=True)
        if len(mine) > 1
    }
    product, groups = _split(product, split)
    known = {
        (mine[i].axis, mine[i].step): name
        for mine, names in zip(parts, groups, strict=True)
        for i, name in enumerate(names[: len(mine)])
    }
    left = [names for mine, names in zip(parts, groups, strict=True) if not mine]
    unused = [n for names in left for n in names]
    named: list[str | None] = []
    for dim in effect.dims:
        spare = unused.pop(0) if not dim and unused else None
        named.append(known[dim[0].axis, dim[0].step] if dim else spare)
    return product, named


def _tile(atoms: Sequence[Atom], size: Size) -> bool:
    """Whether the atoms of one axis, outermost first, select all of its `size` indices in order."""
    step: Size = 1
    for atom in reversed(atoms):
        if atom.step != step:
            return False
        step = step * atom.length
    return bool(step == size)


def _split(product: NamedProduct, split: dict[str, list[Size]]) -> tuple[NamedProduct, list[str]]:
    """Returns the product with some dimensions split, and the names of all dimensions of its
    result.

    Raises InexpressibleError if a dimension of a side cannot be split.
    """
    letters = iter(map(chr, range(0x3B1, 0x3C9)))
    names = {n: "".join(next(letters) for _ in sizes) for n, sizes in split.items()}
    sides = []
    for side in product.sides:
        sizes: list[Size] = []
        for name, size in zip(side.names, side.view.shape, strict=True):
            own = split.get(name, [size])
            sizes += own if size != 1 else [1] * len(own)
        new = "".join(names.get(n, n) for n in side.names)
        sides.append(Side(side.view.reshape(*sizes), new))
    groups = [names.get(n, n) for n in product.result]
    return NamedProduct((sides[0], sides[1]), "".join(groups)), groups


def _names_of(effect: Effect, names: str, shape: tuple[Size, ...]) -> list[str | None] | None:
    """Returns the name of each dimension of a view, if each dimension is one dimension of the value
    and has the length given in `shape`.

    Dimensions of length one can be exchanged for each other, so they get the remaining names in
    order.
    """
    whole = effects.identity(shape).dims
    if any(effect.start):
        return None
    known = {dim: name for dim, name in zip(whole, names, strict=True) if dim}
    if any(dim and dim not in known for dim in effect.dims):
        return None
    used = [known[dim] for dim in effect.dims if dim]
    if len(set(used)) != len(used) or len(used) != len(known):
        return None
    left = [name for dim, name in zip(whole, names, strict=True) if not dim]
    return [known[dim] if dim else (left.pop(0) if left else None) for dim in effect.dims]


def by_roles(view: View, logits: Logits) -> View:
    """Returns a view over the dimensions of the logits as [B or 1, H or 1, S or 1, K]."""
    *lead, keys = (
        effects.coalesce(a for at in role for a in view.effect.dims[at]) for role in logits.roles
    )
    return view.with_dims(*effects.once(lead), keys)


# --- above ----------------------------------------------------------------------------------------


def _weighted(
    end: Value,
    weights: Value,
    shape: tuple[Size, ...],
    product: NamedProduct,
    logits: Logits,
    absorbed: tuple[Value, ...],
) -> Weighted | None:
    """Returns the product of the weights and the values. shape: the shape of the weights without
    the sinks."""
    p, v = sorted(product.sides, key=lambda side: side.view.value is not weights)
    if not product.names_differ or v.view.value is weights:
        return None
    # Dimensions of the softmax that the product has as one merged dimension.
    merged = {
        n: [a.length for a in dim]
        for n, dim in zip(p.names, p.view.effect.dims, strict=True)
        if len(dim) > 1
    }
    try:
        product, groups = _split(product, merged)
    except effects.InexpressibleError:
        return None
    p, v = sorted(product.sides, key=lambda side: side.view.value is not weights)
    v = without_repeats(v, product)
    p_names, v_names = p.names, v.names
    # One letter for each dimension of the softmax.
    letters = "".join(chr(ord("a") + i) for i in range(len(shape)))
    at = _names_of(p.view.effect, letters, shape)
    if at is None or None in at:
        return None
    named = dict(zip(at, p_names, strict=True))
    roles = tuple(
        tuple(n for i in role if (n := named.get(letters[i])) is not None) for role in logits.roles
    )
    batch, heads, queries, keys = roles
    width = tuple(n for n in v_names if n not in p_names)
    extra = set(p_names) - {n for names in roles for n in names}
    if not heads or not keys or len(width) != 1 or extra:
        return None
    if not queries and logits.roles[2]:
        return None
    if set(queries) & set(v_names) or not set(keys) <= set(v_names):
        return None
    axes = (batch, queries, heads, width)
    if sorted(n for names in axes for n in names) != sorted(product.result):
        return None
    layout = layout_on(axes, groups, product.sizes)
    values = _on_axes(v, (batch, keys, heads, width), product)
    return Weighted(values, end, layout, absorbed)
