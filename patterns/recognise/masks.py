"""Finds the keys that each query attends to, by reading the operations that compute an attention
mask.

The mask `arange(K) <= positions[:, None]` is causal by position. Together with `arange(K) >
positions[:, None] - n` it is a sliding window. A term `padding[:, None, None]` excludes further
keys. The module `lines` reads the indices that `arange` computes, and the comparisons of such
indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.arithmetic.steps import (
    INVERSIONS,
    chosen_by_mask,
    filled_with,
    floor_quotient,
)
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Effect, InexpressibleError, Size
from tilewright.patterns.recognise.lines import (
    INTEGERS,
    Compared,
    is_of_bits,
    line_of,
    line_of_operand,
    negated,
    same_everywhere,
    sum_lines,
    truth_of,
)


@dataclass(frozen=True)
class Visible:
    """The keys j that a query at position p attends to.

    Attributes:
        mask: "none": all keys; "causal": j <= p; "sliding_window": p - window < j <= p; "chunked":
            j <= p and j // window == p // window.
        positions: The p of each query, [S] or [B * S]. If it is None, the p of query i is i.
        window: The length of the window or chunk.
        padding: A boolean tensor [B or 1, 1, 1, K], or None. A query attends to a key only if the
            tensor is True for the key.
    """

    mask: str
    positions: View | Computed | None = None
    window: int = 0
    padding: View | Computed | None = None


@dataclass
class _Terms:
    """The terms of a mask. A query attends to a key if all terms are true. Below, j is the index of
    the key.

    Attributes:
        queries: The number of queries.
        upper: Pairs (numbers, shift) for terms j <= numbers + shift, where `numbers` has one number
            for each query. None means the index i of query i.
        lower: Pairs (numbers, shift) for terms j >= numbers + shift.
        chunks: Pairs (numbers, size) for terms j // size == numbers // size.
        padding: Pairs (view, sees) for terms that depend only on keys. A term is true where the
            view equals `sees`.
        rows: For each term whose numbers index the rows of a table, the number of rows. Negative
            numbers count from the end of the table.
        whole: Whether the terms are the whole mask.
    """

    queries: Size
    upper: list[tuple[View | None, Size]] = field(default_factory=list)
    lower: list[tuple[View | None, Size]] = field(default_factory=list)
    chunks: list[tuple[View, int]] = field(default_factory=list)
    padding: list[tuple[View, bool]] = field(default_factory=list)
    rows: list[Size] = field(default_factory=list)
    whole: bool = True


def visible_by(
    mask: View, batch: Size, queries: Size, sees: bool = True, added: bool = False
) -> Visible | None:
    """Returns the keys that a mask [B or 1, H or 1, S or 1, K] lets `batch` times `queries` queries
    attend to. Returns None if the mask cannot be read.

    added: whether the mask consists of zeros and minus infinities, and is added to the logits;
    otherwise it is boolean. sees: the value of a boolean mask where a query attends to a key.
    """
    terms = _Terms(queries)
    dtype = mask.value.dtype
    if not (dtype.is_floating_point if added else dtype == torch.bool):
        return None
    try:
        if added:
            terms.whole = _add_numbers(mask, terms)
        else:
            _collect(mask, sees, terms)
        return _visible(terms, mask, batch, queries) if terms.whole else None
    except InexpressibleError:
        return None


def _visible(terms: _Terms, mask: View, batch: Size, queries: Size) -> Visible | None:
    padding = _joined(terms.padding)
    if not terms.upper:
        return None if terms.lower or terms.chunks else Visible("none", padding=padding)
    (high, shift), *others = terms.upper
    if any(_apart(high, other) != more - shift for other, more in others):
        return None
    limits = (*terms.upper, *terms.lower, *terms.chunks)
    if terms.rows and (len(terms.rows) != len(limits) or len(set(terms.rows)) != 1):
        return None  # in other terms, a negative number does not count from the end
    if high is None:
        positions: View | Computed | None = _counted(shift, queries, mask)
    elif terms.rows:
        positions = Computed("remainder", (_numbers(high, batch, queries), terms.rows[0]))
        positions = Computed("add", (positions, shift)) if shift != 0 else positions
    else:
        positions = _positions(high, shift, batch, queries)
    windows = {_apart(high, low, shift + 1 - more) for low, more in terms.lower}
    chunks = {size if _apart(high, at, shift) == 0 else None for at, size in terms.chunks}
    if not windows and not chunks:
        return Visible("causal", positions, padding=padding)
    (window,) = windows | chunks if len(windows | chunks) == 1 else (None,)
    if window is None or window < 1 or (windows and chunks):
        return None
    return Visible("sliding_window" if windows else "chunked", positions, window, padding)


def _joined(padding: Sequence[tuple[View, bool]]) -> View | Computed | None:
    """Returns a mask that is True where all terms are true."""
    shown = [view if sees else Computed("invert", (view,)) for view, sees in padding]
    return reduce(lambda a, b: Computed("bitwise_and", (a, b)), shown) if shown else None


def _counted(first: Size, queries: Size, mask: View) -> Computed | None:
    """Returns first + i for each query i. Returns None if this equals i."""
    if first == 0:
        return None
    return Computed("arange", (first, first + queries), (("device", mask.value.device),))


def _positions(high: View, shift: Size, batch: Size, queries: Size) -> View | Computed | None:
    """Returns high + shift for each query. Returns None if this equals i for each query i."""
    line = line_of(high)
    steps = (0, 0, 0 if queries == 1 else 1, 0)
    if line is not None and line.slopes == steps and line.offset + shift == 0:
        return None
    positions = _numbers(high, batch, queries)
    return positions if shift == 0 else Computed("add", (positions, shift))


def _numbers(high: View, batch: Size, queries: Size) -> View:
    """Returns one number for each query as [S], or as [B * S] if the sequences differ."""
    of_batch, _, of_query, _ = high.effect.dims
    both = Effect((*effects.once((of_batch,)), of_query), high.effect.start)
    lead = 1 if effects.repeats(of_batch) else batch
    wide = effects.expand(both, (lead, queries))
    return View(high.value, effects.reshape(wide, (effects.product(wide.shape),)))


# --- terms ----------------------------------------------------------------------------------------

_AND = {"aten.bitwise_and", "aten.logical_and"}
_OR = {"aten.bitwise_or", "aten.logical_or"}


def _collect(view: View, sees: bool, terms: _Terms) -> None:
    """Adds the terms whose conjunction is the mask if `sees` is true, or the negation of the mask
    otherwise."""
    value = view.value
    if is_of_bits(value):
        terms.whole = False
    elif value.op in INVERSIONS and len(value.operands) == 1:
        _collect(view.of_operand(value.operands[0]), not sees, terms)
    elif value.op in (_AND if sees else _OR) and len(value.operands) == 2:
        for operand in value.operands:
            _collect(view.of_operand(operand), sees, terms)
    elif not any(add(view, sees, terms) for add in _KINDS):
        terms.whole = False


def _add_comparison(view: View, sees: bool, terms: _Terms) -> bool:
    truth = truth_of(view) if sees else negated(truth_of(view))
    if not isinstance(truth, Compared):
        return truth is True
    low, high = _sorted_out(truth.low, 1), _sorted_out(truth.high, -1)
    if low is None or high is None:
        return False
    keys, more = low.keys + high.keys, low.more + high.more - truth.slack
    numbers = (*low.numbers, *high.numbers)
    if len(numbers) != 1 or numbers[0][0] != -keys:
        return False
    if keys == 1:
        terms.upper.append((numbers[0][1], -more))
    else:
        terms.lower.append((numbers[0][1], more))
    return True


@dataclass(frozen=True)
class _SortedOut:
    """The sum keys * j + more + sum(sign * number), where j is the index of the key. `numbers` has
    the pairs (sign, number), in which a number is a view that depends on the query."""

    keys: int
    more: int
    numbers: tuple[tuple[int, View], ...]


def _sorted_out(item: Any, sign: int) -> _SortedOut | None:
    """Splits integers, multiplied by a sign, into a part that depends on the key, parts that depend
    on the query, and a constant. Returns None if they depend on anything else."""
    if isinstance(item, int) and not isinstance(item, bool):
        return _SortedOut(0, sign * item, ())
    if not isinstance(item, View):
        return None
    if (offset := _key_offset(item)) is not None:
        return _SortedOut(sign, sign * offset, ())
    if _is_of_queries(item):
        return _SortedOut(0, 0, ((sign, item),))
    value = item.value
    if value.op not in ("aten.add", "aten.sub") or len(value.args) != 2 or value.kwargs:
        return None
    signs = sign, sign if value.op == "aten.add" else -sign
    parts = [
        _sorted_out(item.of_operand(x) if isinstance(x, View) else x, s)
        for x, s in zip(value.args, signs, strict=True)
    ]
    one, other = parts
    if one is None or other is None or value.dtype not in INTEGERS:
        return None
    return _SortedOut(one.keys + other.keys, one.more + other.more, (*one.numbers, *other.numbers))


def _add_chunks(view: View, sees: bool, terms: _Terms) -> bool:
    """Adds the term j // size == p // size."""
    value = view.value
    if value.op != ("aten.eq" if sees else "aten.ne") or len(value.operands) != 2:
        return False
    for one, other in value.either_way:
        keys, at = (_quotient(view.of_operand(v)) for v in (one, other))
        if keys is None or at is None or keys[1] != at[1]:
            return False
        if _key_offset(keys[0]) == 0 and _is_of_queries(at[0]):
            terms.chunks.append(at)
            return True
    return False


def _quotient(view: View) -> tuple[View, int] | None:
    """Returns (x, n) for x // n; else None."""
    found = floor_quotient(view.value) if view.value.dtype in INTEGERS else None
    return None if found is None else (view.of_operand(found[0]), found[1])


def _add_padding(view: View, sees: bool, terms: _Terms) -> bool:
    """Adds a term that is the same for every head and query."""
    if len(view.shape) != 4 or view.value.dtype != torch.bool:
        return False
    _, heads, queries, keys = view.effect.dims
    if not (effects.repeats(heads) and effects.repeats(queries)):
        return False
    terms.padding.append((view.with_dims(*effects.once(view.effect.dims[:3]), keys), sees))
    return True


def _key_offset(view: View) -> int | None:
    """Returns n for numbers that are n + j for every key j; else None."""
    line = line_of(view)
    if line is None or not isinstance(line.offset, int):
        return None
    return line.offset if line.slopes == (0, 0, 0, 1) else None


def _is_of_queries(view: View) -> bool:
    """Whether integers [B, H, S, K] are the same for every head and key."""
    if view.value.dtype not in INTEGERS or len(view.shape) != 4:
        return False
    _, heads, _, keys = view.effect.dims
    return effects.repeats(heads) and effects.repeats(keys)


def _apart(one: View | None, other: View | None, more: int = 0) -> int | None:
    """Returns one - other + more if this is the same for all elements; else None."""
    if one is None or other is None:
        return more if one is other else None
    (a, m), (b, n) = _shifted(one), _shifted(other)
    if equal_values(a, b):
        return m - n + more
    lines = line_of(one), line_of(other)
    if lines[0] is None or lines[1] is None:
        return None
    known = sum_lines(lines[0], lines[1], -1).constant
    return known + more if isinstance(known, int) else None


def _shifted(view: View) -> tuple[View, int]:
    """Returns (x, n) for integers x + n. x has length one along dimensions that only repeat."""
    shift = 0
    while view.value.op in ("aten.add", "aten.sub") and len(view.value.args) == 2:
        if view.value.dtype not in INTEGERS:
            break  # arithmetic in eight bits wraps around
        x, n = view.value.args
        line = line_of_operand(view, n)
        known = None if line is None else line.constant
        if not isinstance(x, View) or not isinstance(known, int) or view.value.kwargs:
            break
        shift += known if view.value.op == "aten.add" else -known
        view = view.of_operand(x)
    return view.with_dims(*effects.once(view.effect.dims)), shift


# --- triangles ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Triangle:
    """A matrix that has one number in a triangle, and zeros elsewhere.

    Attributes:
        lower: Whether the triangle is j <= i + diagonal. Otherwise it is j >= i + diagonal.
        diagonal: The diagonal at which the triangle ends.
        number: The number in the triangle.
    """

    lower: bool
    diagonal: int
    number: float


def _triangle(value: Value) -> _Triangle | None:
    """Returns the triangle of a value that is the tril or triu of a matrix filled with one number;
    else None."""
    if value.op not in ("aten.tril", "aten.triu") or len(value.shape) != 2:
        return None
    diagonal = value.argument(1, "diagonal", 0)
    if not isinstance(diagonal, int) or set(value.kwargs) - {"diagonal"}:
        return None
    number = _number(value.args[0])
    return None if number is None else _Triangle(value.op == "aten.tril", diagonal, number)


def _number(view: View) -> float | None:
    """Returns the number that all elements of a tensor are equal to, where True counts as 1; else
    None."""
    made = filled_with(view)
    if made is not None:
        return made
    known = same_everywhere(view)
    return float(known) if isinstance(known, int) else None


def _add_triangle(view: View, sees: bool, terms: _Terms) -> bool:
    """Adds a triangle of True, or a part of it, or rows of it, as in table[positions]."""
    value = view.value
    if value.op in ("aten.index", "aten.index_select"):
        return _add_rows(view, sees, terms)
    found = _triangle(value)
    if found is None or found.number != 1:
        return False
    return _add_part(view, found, sees, 0, terms)


def _add_part(view: View, found: _Triangle, sees: bool, first: Size, terms: _Terms) -> bool:
    """Adds a triangle over queries and keys. The first column of the triangle is the key
    `first`."""
    *lead, queries, keys = effects.once(view.effect.dims)
    by_row = len(queries) == 1 and queries[0].axis == 0 and queries[0].step == 1
    by_row |= terms.queries == 1 and not queries
    by_column = len(keys) == 1 and keys[0].axis == 1 and keys[0].step == 1
    if any(lead) or not by_row or not by_column:
        return False
    row, column = view.effect.start
    _add_limit(None, row - column + first, found, sees, terms)
    return True


def _add_limit(
    numbers: View | None, shift: Size, found: _Triangle, sees: bool, terms: _Terms
) -> None:
    """Adds the limit of a triangle, j <= row + diagonal or j >= row + diagonal. If `sees` is false,
    adds its negation. The row of a query is numbers + shift."""
    if found.lower == sees:
        terms.upper.append((numbers, shift + found.diagonal - (0 if sees else 1)))
    else:
        terms.lower.append((numbers, shift + found.diagonal + (0 if sees else 1)))


def _add_rows(view: View, sees: bool, terms: _Terms) -> bool:
    value = view.value
    if value.op == "aten.index_select":
        base, dim, index = value.args[0], value.argument(1, "dim"), value.argument(2, "index")
    else:
        base, indices = value.args
        dim, index = indices[0] if len(indices) == 1 else (0, None)
    if not isinstance(index, View) or index.value.dtype not in INTEGERS:
        return False
    dim %= len(base.shape)
    table = base.value
    triangles = _triangles(table, sees)
    whole = effects.identity(table.shape)
    rows = ((),) * dim + (whole.dims[0], whole.dims[1]) if len(whole.dims) == 2 else ()
    if not triangles or base.effect.dims != rows or base.effect != Effect(rows, whole.start):
        return False
    wide = index.effect.dims
    along = Effect((*((),) * dim, *wide, ()), index.effect.start)
    numbers = view.of_operand(View(index.value, along))
    last = len(value.shape) - 1
    keys = view.effect.dims[-1]
    in_order = len(keys) == 1 and keys[0].axis == last and keys[0].step == 1
    if not in_order or view.effect.start[last] != 0 or not _is_of_queries(numbers):
        return False
    if any(a.axis == last for d in view.effect.dims[:-1] for a in d):
        return False
    for triangle in triangles:
        _add_limit(numbers, 0, triangle, sees, terms)
        terms.rows.append(table.shape[0])
    return True


def _triangles(table: Value, sees: bool) -> list[_Triangle]:
    """Returns triangles of True. The matrix is their intersection if `sees` is true, and their
    union otherwise. Returns an empty list if there are no such triangles."""
    found = _triangle(table)
    if found is not None:
        return [found] if found.number == 1 else []
    if table.op not in (_AND if sees else _OR) or len(table.operands) != 2:
        return []
    if not all(v.is_whole for v in table.operands):
        return []
    one, other = (_triangles(v.value, sees) for v in table.operands)
    return [*one, *other] if one and other else []


# --- numbers that are added -----------------------------------------------------------------------

_HIDDEN = float("-inf")


def _add_numbers(view: View, terms: _Terms) -> bool:
    """Adds a mask that is zero where a query attends to a key, and minus infinity elsewhere."""
    value = view.value
    if is_float_cast(value):
        return _add_numbers(view.of_operand(value.operands[0]), terms)
    if value.op == "aten.cat":
        return _add_joined(view, terms)
    found = _triangle(value)
    if found is not None:
        return found.number == _HIDDEN and _add_part(view, found, False, 0, terms)
    hides = _hiding(value)
    if hides is None:
        return False
    condition, sees = hides
    _collect(view.of_operand(condition), sees, terms)
    return terms.whole


def _hiding(value: Value) -> tuple[View, bool] | None:
    """Returns (condition, whether a query attends to a key where the condition is True) for `where`
    and `masked_fill` with zero and minus infinity; else None."""
    chosen = chosen_by_mask(value)
    if chosen is None or chosen[0].value.dtype != torch.bool:
        return None
    numbers = [_number(x) if isinstance(x, View) else x for x in chosen[1:]]
    known = sorted(map(repr, numbers)) in _TWO
    return (chosen[0], numbers[1] == _HIDDEN) if known else None


_TWO = [sorted(map(repr, (zero, _HIDDEN))) for zero in (0, 0.0)]


def _add_joined(view: View, terms: _Terms) -> bool:
    """Adds a mask that joins zeros for the keys of a cache with a triangle for the new keys."""
    pieces, axis = view.value.args
    if len(pieces) != 2 or axis != len(view.value.shape) - 1 or axis != 1:
        return False
    zeros, new = pieces
    found = _triangle(new.value)
    if found is None or found.number != _HIDDEN or _number(zeros) != 0 or not new.is_whole:
        return False
    # If the triangle of minus infinities were not above the diagonal, more keys would be excluded.
    if found.lower or found.diagonal < 1:
        return False
    return _add_part(view, found, False, zeros.shape[1], terms)


#: The possible kinds of a term, the most specific kind first. Each function adds the term of a
#: view, and returns False if the term is of another kind.
_KINDS: tuple[Callable[[View, bool, _Terms], bool], ...] = (
    _add_triangle,
    _add_comparison,
    _add_chunks,
    _add_padding,
)
