"""The GEMMs of an adapter. A GEMM has one matrix for all rows, or takes a matrix from a stack for
each row, or is a grouped GEMM.

A matrix may be a part of a wider matrix whose result is split, such as one A for q, k and v.

Dimension letters: T rows, K summed, N columns, G adapters, B sequences of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Atom, Dim, Effect
from tilewright.patterns.lora.factors import is_index
from tilewright.patterns.recognise.gemm import Side, is_weight, named_product
from tilewright.patterns.recognise.grouped_gemm import match_grouped, on_stack
from tilewright.patterns.recognise.linear import match_columns
from tilewright.patterns.recognise.outside import LOOKUPS, REFUSED, Outside
from tilewright.patterns.recognise.routing import flat, gathered, strip_integer_casts

#: Products in which one operand may be a stack of matrices.
BATCHED = ("aten.einsum", "aten.bmm", "aten.matmul")


@dataclass(frozen=True)
class Product:
    """The product of x [T, K] and the weight [G, N, K] of each row's adapter.

    Attributes:
        index: [T or B], the adapters. If it is None, there is only one adapter, or the rows are
            sorted.
        outside: The meaning of numbers that are not the number of an adapter.
        ends: [G], the ends of the groups of sorted rows.
    """

    x: View
    weight: View
    index: View | None
    value: Value
    outside: Outside = REFUSED
    ends: View | None = None


def match_product(view: View) -> Product | None:
    """Returns the product of which `view` [..., N] has all rows, in order, and some or all columns;
    None if there is no such product."""
    try:
        return _of_one(view) or _by_index(view) or _of_groups(view)
    except effects.InexpressibleError:
        return None


def _of_one(view: View) -> Product | None:
    columns = match_columns(view, bare=True)
    if columns is None or columns.rank != len(view.shape) - 1 or not columns.all_tokens:
        return None
    gemm = columns.linear.gemm
    if gemm.bias is not None or gemm.x_scale is not None or not _is_matrix(gemm.weight):
        return None
    weight = columns.weight
    stack = weight.unsqueeze(0)
    return Product(gemm.flat_x, stack, None, gemm.value)


def _is_matrix(weight: View) -> bool:
    """Whether a weight is a parameter, or a tensor that is an input of the graph."""
    return is_weight(weight) or weight.value.op == "input"


def _of_groups(view: View) -> Product | None:
    gemm = match_grouped(view.value)
    if gemm is None or len(gemm.x.shape) != 2 or isinstance(gemm.end.kwargs.get("bias"), View):
        return None
    columns = gemm.columns_of(view)
    if columns is None:
        return None
    start, length, step = columns
    weight = gemm.weight.narrow(1, start, length, step)
    return Product(gemm.x, weight, None, gemm.end, gemm.outside, gemm.ends)


def _by_index(view: View) -> Product | None:
    value = view.value
    product = named_product(value) if value.op in BATCHED else None
    if product is None:
        return None
    ways = product.either_way
    found = (_gathered_product(view, x, weight, product.result) for weight, x in ways)
    return next(filter(None, found), None)


def _gathered_product(view: View, x: Side, weight: Side, result: str) -> Product | None:
    """Returns the product of x and `weight`. Returns None if `weight` is not a stack of matrices
    that is indexed by row. result: the names of the dimensions of the result. The operands use the
    same names."""
    matrices = weight.view
    taken = gathered(matrices.value.whole)
    if taken is None or not is_index(taken[1]):
        return None
    stored, index = taken
    lead = len(index.shape)
    xs, ws = x.dims, weight.dims
    if len(xs) != len(x.names) or len(ws) != len(weight.names) or len(stored.shape) < 2:
        return None
    _part_repeated(xs, ws)
    rows = [n for n in result if n in xs and n in ws]
    tokens = [n for n in result if n in xs and n not in ws]
    features = [n for n in result if n in ws and n not in xs]
    summed = [n for n in xs if n in ws and n not in result]
    known = {*rows, *tokens, *features, *summed}
    if len(summed) != 1 or not features or known != xs.keys() | ws.keys():
        return None
    (k,) = summed
    shape = matrices.value.shape
    wanted = effects.coalesce(a for dim in effects.identity(shape).dims[:lead] for a in dim)
    if effects.coalesce(a for n in rows for a in ws[n]) != wanted:
        return None
    columns = _columns(
        view, [result.index(n) for n in (*rows, *tokens)], [result.index(n) for n in features]
    )
    whole = on_stack(stored, lead, [ws[n] for n in (*features, k)], matrices.effect.start)
    if columns is None or whole is None:
        return None
    merged = effects.coalesce(a for n in (*rows, *tokens) for a in xs[n])
    return Product(
        x.view.with_dims(merged, xs[k]),
        View(stored.value, effects.compose(_cut(whole, features, result, columns), whole.effect)),
        flat(strip_integer_casts(index)),
        view.value,
        outside=LOOKUPS.get(matrices.value.op, REFUSED),
    )


def _part_repeated(xs: dict[str, Dim], ws: dict[str, Dim]) -> None:
    """Removes a dimension from an operand that only repeats its elements along this dimension, if
    the other operand has the dimension too."""
    for name in xs.keys() & ws.keys():
        repeats = [all(a.axis is None for a in dims[name]) for dims in (xs, ws)]
        if repeats == [True, False]:
            del xs[name]
        elif repeats == [False, True]:
            del ws[name]


def _cut(stack: View, features: Sequence[str], result: str, columns: Effect) -> Effect:
    """Returns an effect [G, N, K] on a stack [G, features..., K] of matrices. It selects the
    features that compute some columns of the result. columns: an effect that selects these columns
    on the axes of the result."""
    place = {result.index(name): 1 + at for at, name in enumerate(features)}
    (dim,) = columns.dims
    taken = tuple(Atom(place[a.axis], a.step, a.length) for a in dim if a.axis is not None)
    first, *_, last = effects.identity(stack.shape).dims
    starts = [columns.start[axis] for axis in place]
    return Effect((first, taken, last), (0, *starts, 0))


def _columns(view: View, rows: Sequence[int], features: Sequence[int]) -> Effect | None:
    """Returns the columns that `view` [..., N] selects from every row, as an effect with one
    dimension. Returns None if the view does not have all rows in order.

    rows, features: the axes of the value that are rows, in order, and the axes that are columns.
    """
    shape = view.value.shape
    *lead, last = view.effect.dims
    own = effects.identity(shape).dims
    wanted = effects.coalesce(atom for axis in rows for atom in own[axis])
    if effects.coalesce(atom for dim in lead for atom in dim) != wanted:
        return None
    if any(view.effect.start[axis] != 0 for axis in rows):
        return None
    if any(atom.axis not in features for atom in last):
        return None
    return Effect((last,), view.effect.start)
