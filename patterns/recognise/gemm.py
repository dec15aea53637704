"""Reads GEMMs with a weight and returns them in one normal form: x @ weight^T + bias.

`F.linear`, `addmm`, `x @ W`, `bmm` with a batch of one, a batched `matmul` and `einsum` differ only
in the names of their dimensions. A dimension that only x has is a token dimension. A dimension that
only the weight has is a feature dimension. A dimension that both have and the result lacks is
summed.

Dimension letters: N output features, K hidden size.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.ops.formats.fp8_block import BLOCK
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View, once
from tilewright.patterns.effects import Atom, Dim, Effect, Size


@dataclass(frozen=True)
class Gemm:
    """The product x @ weight^T + bias.

    Attributes:
        value: The tensor of the graph that has the result.
        shape: The shape [tokens..., N]: the token dimensions of x in order, and then N.
        layout: The dimensions of `value`, expressed on the axes of `shape`.
        x: The activation, [tokens..., K].
        weight: The weight, [N, K].
        bias: The bias, [N], or None.
        x_scale: The scales of x if x is eight-bit codes, [T or 1, K / block or 1].
        weight_scale: The scales of the weight if the weight is codes, [N, K], expanded to one
            number for each element.
    """

    value: Value
    shape: tuple[Size, ...]
    layout: Effect
    x: View
    weight: View
    bias: View | None
    x_scale: View | None = None
    weight_scale: View | None = None

    @property
    def feature(self) -> int:
        """The axis of `shape` that has the N output features."""
        return len(self.shape) - 1

    @property
    def flat_x(self) -> View:
        """The activation as [T, K]."""
        return self.x.matrix


def match_gemm(value: Value) -> Gemm | None:
    """Returns a value as a GEMM with a weight. Returns None if it is not a GEMM."""
    return _gemm_of(value) if value.op in _RULES else None


@once
def _gemm_of(value: Value) -> Gemm | None:
    try:
        return _RULES[value.op](value)
    except effects.InexpressibleError:
        return None


def _linear(value: Value) -> Gemm | None:
    x, weight, bias = value.args[:3]
    if not isinstance(x, View) or not isinstance(weight, View) or len(weight.shape) != 2:
        return None
    if len(value.shape) < 2:
        return None
    identity = effects.identity(value.shape)
    if bias is not None:
        rows = bias_rows(bias, identity, len(value.shape) - 1)
        if rows is None or rows[1] != 0:
            return None
        bias = rows[0]
    return Gemm(value, value.shape, identity, x, weight, bias)


def _scaled_mm(value: Value) -> Gemm | None:
    """Matches a product of codes: (x * scale_a) @ (weight * scale_b), where the scales may belong
    to blocks."""
    given = value.named("self", "mat2", "scale_a", "scale_b", "bias", "scale_result")
    scale_a, scale_b = given.get("scale_a"), given.get("scale_b")
    if not isinstance(scale_a, View) or not isinstance(scale_b, View):
        return None
    if given.get("scale_result") is not None:
        return None
    return _of_codes(value, given, scale_a, scale_b)


# The number by which `_scaled_mm_v2` knows the recipe of one scale for the whole tensor.
_TENSOR_WISE = 0
# The number of the recipe of one scale for each row.
_ROW_WISE = 1
# The number of the recipe of one scale for every 128 columns of a row.
_BY_128 = 4
# The number of the recipe of one scale for every block of 128 rows and 128 columns.
_BY_128_SQUARED = 5
_V2 = ("self", "mat2", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b")


def _scaled_mm_v2(value: Value) -> Gemm | None:
    """Matches a product of codes whose scales are lists. Each scale comes with the number of its
    recipe: one scale for the tensor, for each row, or for each block of 128."""
    given = value.named(*_V2, "bias", "out_dtype", "contraction_dim")
    x, weight = given.get("self"), given.get("mat2")
    if not isinstance(x, View) or not isinstance(weight, View):
        return None
    if any(given.get("swizzle_a") or ()) or any(given.get("swizzle_b") or ()):
        return None
    if given.get("contraction_dim"):
        return None
    rows, (summed, columns) = x.shape[0], weight.shape
    of_a: dict[int, tuple[Size, Size]] = {_ROW_WISE: (rows, 1)}
    of_b: dict[int, tuple[Size, Size]] = {_ROW_WISE: (1, columns)}
    if isinstance(summed, int) and isinstance(columns, int):
        blocks = -(-summed // 128)
        of_a[_BY_128], of_b[_BY_128] = (rows, blocks), (columns, blocks)
        of_b[_BY_128_SQUARED] = (blocks, -(-columns // 128))
    scale_a, scale_b = _by_recipe(given, "a", of_a), _by_recipe(given, "b", of_b)
    if scale_b is not None and scale_b.shape == of_b.get(_BY_128):
        scale_b = scale_b.permute(1, 0)
    if scale_a is None or scale_b is None:
        return None
    return _of_codes(value, given, scale_a, scale_b)


def _by_recipe(
    given: Mapping[str, Any], side: str, shapes: Mapping[int, tuple[Size, Size]]
) -> View | None:
    """Returns the scale of one side as [1, 1], or in the shape that `shapes` gives for its recipe.
    Returns None for another recipe, and for blocks in another order."""
    scales: Sequence[Any] = given.get(f"scale_{side}") or ()
    recipe: Sequence[Any] = given.get(f"recipe_{side}") or ()
    if len(scales) != 1 or len(recipe) != 1:
        return None
    (scale,), (number,) = scales, recipe
    wanted = {_TENSOR_WISE: (1, 1), **shapes}.get(int(number))
    if wanted is None or not isinstance(scale, View):
        return None
    if int(number) in (_BY_128, _BY_128_SQUARED):
        return scale if tuple(scale.shape) == wanted else None
    if effects.product(scale.shape) != effects.product(wanted):
        return None
    return scale.reshape(*wanted)


def _of_codes(value: Value, given: Mapping[str, Any], scale_a: View, scale_b: View) -> Gemm | None:
    x, weight = given.get("self"), given.get("mat2")
    if not isinstance(x, View) or not isinstance(weight, View) or weight.value.projected:
        return None
    weight_scale = _over_blocks(scale_b, weight.shape)
    x_scale = _two_dims(scale_a)
    if weight_scale is None or x_scale is None:
        return None
    if _repeats(x_scale.shape[1], x.shape[1]) is None:
        return None
    transposed = effects.permute(weight.effect, (1, 0))
    scale = weight_scale.permute(1, 0)
    identity = effects.identity(value.shape)
    weight = View(weight.value, transposed)
    return Gemm(value, value.shape, identity, x, weight, given.get("bias"), x_scale, scale)


def _two_dims(scale: View) -> View | None:
    """Returns a scale as [rows or 1, blocks or 1]. The scale may have any rank if it is a single
    number."""
    if len(scale.shape) == 2:
        return scale
    if effects.product(scale.shape) != 1:
        return None
    return scale.reshape(1, 1)


def _over_blocks(scale: View, shape: Sequence[Size]) -> View | None:
    """Expands one scale for each block to one scale for each element. Returns None if the blocks do
    not fit the shape."""
    flat = _two_dims(scale)
    if flat is None:
        return None
    dims = []
    for dim, count, size in zip(flat.effect.dims, flat.shape, shape, strict=True):
        repeats = _repeats(count, size)
        if repeats is None:
            return None
        dims.append(effects.coalesce((*dim, Atom(None, 0, repeats))))
    return flat.with_dims(*dims)


def _repeats(count: Size, size: Size) -> Size | None:
    """Returns how many neighbouring elements share one of `count` scales: all elements, one
    element, or a whole block. Returns None if the last block is not whole."""
    repeats = effects.divides(count, size)
    return repeats if repeats in (1, size, BLOCK) else None


@dataclass(frozen=True)
class Side:
    """One operand of a product. `names` has one letter for each dimension of the operand."""

    view: View
    names: str

    @property
    def dims(self) -> dict[str, Dim]:
        """The dimensions by name. A name that occurs twice has one entry."""
        return dict(zip(self.names, self.view.effect.dims, strict=True))

    def ordered(self, names: Sequence[str | None]) -> View:
        """Returns the dimensions in another order. A dimension that the operand lacks gets the
        length one."""
        dims = self.dims
        effect = Effect(tuple(dims.get(n, ()) for n in names), self.view.effect.start)  # type: ignore[arg-type]
        return View(self.view.value, effect)


@dataclass(frozen=True)
class NamedProduct:
    """A product of two tensors. `result` has the names of the dimensions of the result. The product
    sums over all other dimensions."""

    sides: tuple[Side, Side]
    result: str

    @property
    def either_way(self) -> tuple[tuple[Side, Side], tuple[Side, Side]]:
        """The two sides in both orders."""
        return self.sides, self.sides[::-1]

    @property
    def sizes(self) -> dict[str, Size]:
        """The length of each dimension, by name. If one side broadcasts along a dimension, its
        length is that of the other side."""
        found: dict[str, Size] = {}
        for side in self.sides:
            for name, size in zip(side.names, side.view.shape, strict=True):
                found[name] = size if found.get(name, 1) == 1 else found[name]
        return found

    @property
    def names_differ(self) -> bool:
        """Whether the dimensions of each tensor have different names. If a tensor has a name twice,
        the product takes its diagonal."""
        named = (*(side.names for side in self.sides), self.result)
        return all(len(set(names)) == len(names) for names in named)


def named_product(value: Value) -> NamedProduct | None:
    """Returns a value as a product of two tensors with named dimensions. Returns None if the value
    is not such a product."""
    if value.op == "aten.einsum":
        return _einsum(value)
    if value.op not in ("aten.matmul", "aten.mm", "aten.bmm"):
        return None
    # In [..., M, K] @ [..., K, N], the leading dimensions broadcast.
    if len(value.operands) != 2 or any(len(v.shape) < 2 for v in value.operands):
        return None
    batch = string.ascii_lowercase[: max(len(v.shape) for v in value.operands) - 2]
    one, other = (
        Side(v, batch[len(batch) - len(v.shape) + 2 :] + two)
        for v, two in zip(value.operands, ("MK", "KN"), strict=True)
    )
    return NamedProduct((one, other), batch + "MN")


# --- names of dimensions --------------------------------------------------------------------------


def _einsum(value: Value) -> NamedProduct | None:
    operands, text = value.operands, value.args[0]
    if not isinstance(text, str) or len(operands) != 2:
        return None
    left, arrow, right = text.replace(" ", "").partition("->")
    named = left.split(",")
    if len(named) != len(operands):
        return None
    missing = [
        len(v.shape) - len(n.replace("...", "")) for v, n in zip(operands, named, strict=True)
    ]
    # The dimensions of `...` are aligned at the right.
    extra = string.digits[: max(missing)]
    one, other = (
        Side(v, n.replace("...", extra[len(extra) - m :]))
        for v, n, m in zip(operands, named, missing, strict=True)
    )
    if not arrow:
        once = sorted({n for n in "".join(named) if n.isalpha() and left.count(n) == 1})
        right = ("..." if "..." in left else "") + "".join(once)
    return NamedProduct((one, other), right.replace("...", extra))


def _contracted(value: Value) -> Gemm | None:
    """Returns the GEMM of a product in which either operand may be the weight. If both may be, a
    parameter is preferred."""
    product = named_product(value)
    if product is None or not product.names_differ:
        return None
    for x, weight in sorted(product.either_way, key=lambda pair: not is_weight(pair[1].view)):
        if not weight.view.value.projected:
            found = _contraction(value, x, weight, product.result)
            if found is not None:
                return found
    return None


def is_weight(view: View) -> bool:
    """Whether a view selects from a parameter, or from a cast or concatenation of a parameter."""
    if view.value.op in ("aten.cat", "cast"):
        return any(is_weight(v) for v in view.value.operands)
    return view.value.op == "constant"


# A product that sums fewer numbers than this is not a product with a weight. For example, the
# product of positions and frequencies computes angles.
_LEAST_SUMMED = 16
_NO_OPERATIONS = ("input", "constant", "store", "cast", "bitcast")
_KNOWN = ("aten.", "tilewright::", "opaque:tilewright::")
_SCALED = ("aten._scaled_mm", "aten._scaled_mm_v2")
# The numbers of codes that one stored element may have.
_CODES_IN_A_WORD = (1, 2, 4, 8)


def multiplies_stored(value: Value) -> bool:
    """Whether a value is a product with a stored tensor, that is, with a parameter or a buffer."""
    if any(is_weight(view) for view in value.operands):
        return True
    gemm = match_gemm(value)
    return gemm is not None and gemm.weight.value.op == "input" and sums_enough(gemm)


def sums_enough(gemm: Gemm) -> bool:
    """Whether a product sums enough numbers to be a product with a weight."""
    summed = gemm.weight.shape[-1]
    return isinstance(summed, int) and summed >= _LEAST_SUMMED


def unread_product(value: Value) -> tuple[View, View] | None:
    """Returns (x, weight) for an unknown operation, or for a scaled product that cannot be read, if
    the shapes show that it is a product: x is [..., K], the result is [..., N], and a stored matrix
    has N * K numbers or codes. The operation may write its result in place."""
    written = value.op == "store" and value.store is not None and value.store.source is None
    known = value.op in _NO_OPERATIONS or value.op.startswith(_KNOWN)
    known = known and (value.op not in _SCALED or match_gemm(value) is not None)
    if (known and not written) or len(value.shape) < 2:
        return None
    *rows, columns = value.shape
    tokens = effects.product(rows)
    stored = [view for view in value.operands if _is_stored(view.value)]
    for x in value.operands:
        if len(x.shape) < 2 or effects.product(x.shape[:-1]) != tokens:
            continue
        for weight in stored:
            if weight.value is not x.value and _holds(weight, columns, x.shape[-1]):
                return x, weight
    return None


def _is_stored(value: Value) -> bool:
    """Whether a value is an input, a parameter, or such a tensor after an in-place write. For
    example, bitsandbytes repacks its codes in place at the first call."""
    packed_anew = value.store is not None and value.store.memory.is_input
    return packed_anew or value.op in ("input", "constant")


def _holds(weight: View, columns: Size, summed: Size) -> bool:
    """Whether the shape of a stored matrix fits a weight of `columns` times `summed` numbers, which
    are stored as numbers or as codes. A parameter of codes that has a row for each column fits,
    too."""
    count = effects.product(weight.shape)
    if not all(isinstance(n, int) for n in (count, columns, summed)) or summed < _LEAST_SUMMED:
        return False
    dtype, rank = weight.value.dtype, len(weight.shape)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return rank == 2 and count == columns * summed
    in_rows = weight.value.op == "constant" and rank == 2 and weight.shape[0] == columns
    return in_rows or any(count * per == columns * summed for per in _CODES_IN_A_WORD)


def operator_of(value: Value) -> str:
    """Returns the name of the operation that computes a product of an unknown form."""
    named = value.store.kind if value.store is not None else value.op
    return named.removeprefix("opaque:")


def _contraction(value: Value, x: Side, weight: Side, result: str) -> Gemm | None:
    """Returns the GEMM of x and a weight. Returns None for diagonals, batched weights and similar
    products."""
    xs, ws = x.dims, weight.dims
    for name in xs.keys() & ws.keys():
        if name not in result:
            if bool(xs[name]) != bool(ws[name]):
                return None
        # A dimension that is broadcast in one operand belongs only to the other operand.
        elif effects.repeats(ws[name]):
            del ws[name]
        elif effects.repeats(xs[name]):
            del xs[name]
        else:
            return None
    tokens = [n for n in xs if n not in ws]
    features = [n for n in result if n in ws]
    summed = [n for n in xs if n in ws]
    if sorted(tokens + features) != sorted(result) or len(ws) != len(features) + len(summed):
        return None
    if not (tokens and features and summed):
        return None
    if any(effects.repeats(d) and d for d in (*xs.values(), *ws.values())):
        return None
    sizes = {n: effects.product(a.length for a in (ws if n in ws else xs)[n]) for n in result}
    if not all(isinstance(sizes[n], int) for n in features):
        return None
    hidden = effects.coalesce(a for n in summed for a in xs[n])
    rows = effects.coalesce(a for n in features for a in ws[n])
    columns = effects.coalesce(a for n in summed for a in ws[n])
    x_effect = Effect((*(xs[n] for n in tokens), hidden), x.view.effect.start)
    weight_effect = Effect((rows, columns), weight.view.effect.start)
    shape = (*x_effect.shape[:-1], effects.product(sizes[n] for n in features))
    return Gemm(
        value,
        shape,
        layout_on([*tokens, features], result, sizes),
        View(x.view.value, x_effect),
        View(weight.view.value, weight_effect),
        None,
    )


def layout_on(
    axes: Sequence[Sequence[str]], dims: Sequence[Sequence[str]], sizes: Mapping[str, Size]
) -> Effect:
    """Returns the effect on `axes` whose dimensions are `dims`. Both arguments list names,
    outermost first, for each axis or dimension."""
    atoms: dict[str, Atom] = {}
    for axis, names in enumerate(axes):
        step: Size = 1
        for name in reversed(names):
            atoms[name] = Atom(axis, step, sizes[name])
            step = step * sizes[name]
    walked = tuple(effects.coalesce(atoms[name] for name in names) for names in dims)
    return Effect(walked, (0,) * len(axes))


_RULES = {
    "aten.linear": _linear,
    "aten._scaled_mm": _scaled_mm,
    "aten._scaled_mm_v2": _scaled_mm_v2,
    **dict.fromkeys(("aten.einsum", "aten.matmul", "aten.mm", "aten.bmm"), _contracted),
}

# --- bias and pieces ------------------------------------------------------------------------------


def bias_rows(bias: Any, product: Effect, feature: int) -> tuple[View, int] | None:
    """Returns (bias [n], first feature) for a tensor that is added to a product. Returns None if
    the tensor is not a bias, that is, if it varies along other dimensions than the features.

    product: the tensor that the bias is added to, on the axes [tokens..., N]. It may have only a
    run of the features.
    """
    if not isinstance(bias, View) or bias.value.projected:
        return None
    if len(bias.shape) > len(product.dims):
        return None
    wide = effects.expand(bias.effect, product.shape)
    atoms = [a for dim in product.dims for a in dim]
    split = effects.reshape(wide, [a.length for a in atoms])
    along = list(zip(atoms, split.dims, strict=True))
    if not all(effects.repeats(dim) for atom, dim in along if atom.axis != feature):
        return None
    rows = sorted((row for row in along if row[0].axis == feature), key=lambda row: row[0].step)
    step: Size = 1
    for atom, _ in rows:
        if atom.step != step:
            return None
        step = step * atom.length
    dims = effects.coalesce(a for _, dim in reversed(rows) for a in dim)
    start = product.start[feature]
    return (
        (View(bias.value, Effect((dims,), wide.start)), start) if isinstance(start, int) else None
    )


def piece_of(view: View) -> View:
    """Rewrites a view of a concatenation as a view of one operand. Returns the given view if no
    operand has all its elements, or if the dtype of this operand is not the dtype of the result."""
    value = view.value
    if value.op != "aten.cat":
        return view
    pieces, axis = value.args
    low = view.effect.start[axis]
    atoms = [a for dim in view.effect.dims for a in dim if a.axis == axis]
    reach = sum(a.step * (a.length - 1) for a in atoms)
    first: Size = 0
    for piece in pieces:
        length = piece.shape[axis]
        if not all(isinstance(n, int) for n in (low, reach, first, length)):
            return view
        if first <= low and low + reach < first + length:
            if piece.value.dtype != value.dtype:
                return view
            start = list(view.effect.start)
            start[axis] = low - first
            try:
                inside = piece.through(Effect(view.effect.dims, tuple(start)))
            except effects.InexpressibleError:
                return view
            return piece_of(inside)
        first = first + length
    return view
