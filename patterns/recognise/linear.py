"""Recognises linears with a bias, a clamp and adapters, and the columns that a view selects from
the result of a linear.

    y    = clamp(x @ weight^T * scale + bias + deltas)     x [tokens..., K], weight [N, K], bias [N]
    view = some columns of y, in dimensions of their own

:func:`match_linear` finds y. :func:`match_columns` finds the view, the rows of the weight and of
the bias that compute the view, and the activation that these rows multiply. Dimension letters: N
output features, K hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast, strip_casts
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.arithmetic.steps import clamp_bounds
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Dim, Effect, Size
from tilewright.patterns.language import Miss, Reject, Stage, reject
from tilewright.patterns.quantised.words import holds_codes
from tilewright.patterns.recognise.dtypes import dtype_name
from tilewright.patterns.recognise.gemm import (
    Gemm,
    bias_rows,
    match_gemm,
    operator_of,
    unread_product,
)
from tilewright.patterns.recognise.ranks import collective_of


@dataclass(frozen=True)
class Path:
    """The codes of a pattern's misses about the path from a linear to the value that reads it, and
    the words of their messages.

    Attributes:
        code: The code for a path without a linear.
        stage: The stage of the misses.
        reader: What messages call the value that reads the linear's result.
        masked: The code for a boolean mask on the path that selects rows. If it is "", `code` is
            used.
        hint: The hint for misses that have no other hint.
    """

    code: str
    stage: Stage
    reader: str
    masked: str = ""
    hint: str = ""


#: The first of some columns, the number of columns, and the distance between two neighbouring
#: columns.
Columns = tuple[Size, Size, int]
#: Reads a view as the delta of an adapter (a `LoraDelta` of `patterns/lora/delta.py`). Returns None
#: if the view is not a delta. A pattern passes such a function if its op supports adapters.
MatchDelta = Callable[[View], Any]


@dataclass(frozen=True)
class Linear:
    """The value clamp(x @ weight^T * scale + bias + deltas, -clip, clip). Only the product is
    required.

    Attributes:
        gemm: The product x @ weight^T.
        value: The tensor of the graph after the last of these steps.
        layout: The dimensions of `value`, expressed on the axes [tokens..., N] of the GEMM.
        bias: A tensor [n] for the n columns that start at `bias_first`, or None.
        scale: A tensor [n] for the n columns that start at `scale_first`, or None.
        clip: The limit of the clamp, or 0 if there is no clamp.
        absorbed: The values that the op replaces.
        deltas: The deltas of adapters.
    """

    gemm: Gemm
    value: Value
    layout: Effect
    bias: View | None
    bias_first: int
    clip: float
    absorbed: tuple[Value, ...]
    scale: View | None = None
    scale_first: int = 0
    deltas: tuple[Any, ...] = ()

    @property
    def product(self) -> Linear:
        """The product without the later steps, except the bias of `F.linear`."""
        return _of_gemm(self.gemm)


def match_linear(value: Value, path: Path, match_delta: MatchDelta | None = None) -> Linear:
    """Returns the linear that ends at `value`. Raises Reject and names the obstacle if there is no
    such linear.

    match_delta: a function that recognises the deltas of adapters. If it is None, no delta may be
    added.
    """
    return _Search(path, match_delta).run(value)


# --- which columns --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearColumns:
    """The columns of a linear that a view [tokens..., columns...] of its result selects.

    Attributes:
        linear: The linear that computes the columns.
        layout: The dimensions of the view, expressed on the axes [tokens..., N] of the GEMM.
        rank: How many of these dimensions are tokens.
    """

    linear: Linear
    layout: Effect
    rank: int

    @property
    def x(self) -> View:
        """The activation, with the tokens of the view: [tokens..., K]."""
        x = self.linear.gemm.x
        hidden = effects.identity(x.shape).dims[-1]
        start = (*self.layout.start[:-1], 0)
        return x.through(Effect((*self.layout.dims[: self.rank], hidden), start))

    @property
    def weight(self) -> View:
        """The rows of the weight that compute these columns, [columns..., K]."""
        return self._rows(self.linear.gemm.weight, 0)

    @property
    def weight_scale(self) -> View | None:
        """The scale of the codes in these rows, [columns..., K]. None if there is no scale."""
        scale = self.linear.gemm.weight_scale
        return None if scale is None else self._rows(scale, 0)

    @property
    def bias(self) -> View | None:
        """The bias of these columns, [columns...]. None if there is no bias."""
        bias = self.linear.bias
        return None if bias is None else self._rows(bias, self.linear.bias_first)

    @property
    def scale(self) -> View | None:
        """The scale of these columns of a product of codes, [columns...]. None if there is no
        scale."""
        scale = self.linear.scale
        return None if scale is None else self._rows(scale, self.linear.scale_first)

    def _rows(self, tensor: View, first: int) -> View:
        feature = self.linear.gemm.feature
        dims = [
            tuple(a._replace(axis=0 if a.axis == feature else a.axis) for a in dim)
            for dim in self.layout.dims[self.rank :]
        ]
        return rows_of(tensor, dims, self.layout.start[feature] - first)

    @property
    def all_tokens(self) -> bool:
        """Whether the view has every token once and in order."""
        return holds_all_tokens(self.layout, self.rank, self.linear.gemm.shape[:-1])


def match_columns(view: View, bare: bool = False) -> LinearColumns | None:
    """Returns a view [tokens..., columns...] as columns of one linear. Returns None if the view is
    anything else.

    bare: whether to accept only a product without further steps, except the bias of `F.linear`.
    Raises InexpressibleError if an intermediate view has no normal form.
    """
    gemm = match_gemm(view.value)
    if gemm is not None:
        linear = _of_gemm(gemm)
    elif bare:
        return None
    else:
        try:
            linear = match_linear(view.value, _UNNAMED)
        except Reject:
            return None
    layout = effects.compose(view.effect, linear.layout)
    axes = [{a.axis for a in dim} for dim in layout.dims]
    feature = linear.gemm.feature
    walks = [feature in some for some in axes]
    rank = walks.index(True) if True in walks else len(walks)
    if any(some not in ({feature}, set()) for some in axes[rank:]):
        return None
    return LinearColumns(linear, layout, rank)


_READABLE = (
    "load the model with weights that PyTorch multiplies, or decodes in the graph "
    "(tilewright.compiler.prepare(model) when the model is loaded; transformers: dequantize=True)"
)


def unread(value: Value, what: str) -> tuple[str, str]:
    """Returns the reason and the hint for an :func:`unread_product` that computes `what`."""
    named = f"{operator_of(value)} computes the {what}"
    if value.op.startswith("aten."):
        return f"{named}, with scales or operands of an unknown form", (
            "use scales of e4m3 codes by tensor, by row, or by 128 columns with K a multiple of 512"
        )
    return f"{named}, and it is not known what this operator computes", _READABLE


# The path of a linear that need not be found. The misses of this path are never shown.
_UNNAMED = Path("UNSUPPORTED", Stage.ANCHORED, "its reader")
_UNSAID = Miss("", _UNNAMED.code, _UNNAMED.stage, "no linear")


def rows_of(tensor: View, dims: Sequence[Dim], first: int) -> View:
    """Returns rows of a weight [N, ...] or bias [N]. The dimensions `dims` select along axis 0,
    which starts at row `first`."""
    rest = effects.identity(tensor.shape).dims[1:]
    return tensor.through(Effect((*dims, *rest), (first, *(0 for _ in tensor.shape[1:]))))


def holds_all_tokens(layout: Effect, rank: int, tokens: Sequence[Size]) -> bool:
    """Whether the first `rank` dimensions on the axes [tokens..., N] select every token in
    order."""
    walked = effects.coalesce(a for dim in layout.dims[:rank] for a in dim)
    whole = effects.coalesce(a for dim in effects.identity(tokens).dims for a in dim)
    return walked == whole and all(s == 0 for s in layout.start[: len(tokens)])


def columns_along(part: View, axis: int) -> Columns | None:
    """Returns (first, number, step) of the columns that a view selects along `axis` of its value,
    in every row. Returns None unless the rows are in order and the columns are in one dimension."""
    place = [i for i, dim in enumerate(part.effect.dims) if any(a.axis == axis for a in dim)]
    if len(place) != 1 or len(part.effect.dims[place[0]]) != 1:
        return None
    (atom,) = part.effect.dims[place[0]]
    whole = effects.identity(part.value.shape).dims
    taken, rows = (
        effects.coalesce(a for i, dim in enumerate(dims) if i != at for a in dim)
        for dims, at in ((part.effect.dims, place[0]), (whole, axis))
    )
    if taken != rows or any(s != 0 for a, s in enumerate(part.effect.start) if a != axis):
        return None
    return part.effect.start[axis], atom.length, atom.step


# --- the linear -----------------------------------------------------------------------------------

_CLAMPS = ("aten.clamp", "aten.hardtanh")
_ONE_CLAMP = "use one clamp, from -c to c with one number c"
_NORM_LAST = "bias and clamp are fused directly after the projection, and a norm after them"
_HINTS = {
    "aten.clamp_min": _ONE_CLAMP,
    "aten.clamp_max": _ONE_CLAMP,
    "aten.layer_norm": _NORM_LAST,
    "aten.rms_norm": _NORM_LAST,
}


@dataclass(frozen=True)
class _Search:
    """The arguments of :func:`match_linear`, which each step of its search reads."""

    path: Path
    match_delta: MatchDelta | None

    def run(self, value: Value) -> Linear:
        gemm = match_gemm(value)
        if gemm is not None:
            return _of_gemm(gemm)
        if is_float_cast(value):
            return _through(self.run(value.args[0].value), value.args[0], value)
        if value.op in _CLAMPS:
            return self.clamped(value)
        if value.op == "aten.add" and value.kwargs.get("alpha", 1) == 1:
            # With one row, a delta has the shape of a bias, too.
            rules = [self.adapted, self.biased]
        else:
            rules = [self.scaled] if value.op == "aten.mul" else []
        for product, other in value.either_way:
            for rule in rules:
                found = rule(value, product, other)
                if found is not None:
                    return found
        self.refuse(value)

    def inner(self, value: Value, product: View) -> Linear | None:
        """Returns the linear of an operand that has the shape of the result; else None."""
        if value.shape != product.shape:
            return None
        try:
            found = _Search(_UNNAMED, self.match_delta).run(product.value)
            return _through(found, product, value)
        except (Reject, effects.InexpressibleError):
            return None

    def biased(self, value: Value, product: View, bias: View) -> Linear | None:
        linear = self.inner(value, product)
        if linear is None or linear.bias is not None or linear.clip:
            return None
        found = _by_column(bias, linear)
        return found and replace(linear, bias=found[0], bias_first=found[1])

    def scaled(self, value: Value, product: View, scale: View) -> Linear | None:
        """Reads a product of codes whose sums are multiplied by one scale for each output
        feature."""
        linear = self.inner(value, product)
        if linear is None or linear.scale is not None or linear.bias is not None:
            return None
        if linear.deltas or linear.clip or not holds_codes(linear.gemm.weight.value):
            return None
        found = _by_column(scale, linear)
        return found and replace(linear, scale=found[0], scale_first=found[1])

    def adapted(self, value: Value, product: View, other: View) -> Linear | None:
        """Reads the addition of the delta of a low-rank adapter that reads the same activation."""
        delta = None if self.match_delta is None else self.match_delta(other)
        if delta is None or product.shape != other.shape:
            return None
        linear = self.inner(value, product)
        if linear is None or linear.clip or linear.gemm.x_scale is not None:
            return None
        *lead, width = product.shape
        if linear.layout != effects.identity(linear.gemm.shape) or width != delta.expand.shape[1]:
            return None
        if effects.product(lead) != delta.x.shape[0]:
            return None
        if not same_floats(linear.gemm.flat_x, delta.x):
            return None
        absorbed = (*linear.absorbed, *delta.absorbed)
        return replace(linear, deltas=(*linear.deltas, delta), absorbed=absorbed)

    def clamped(self, value: Value) -> Linear:
        stage = self.path.stage
        if str(value.node.target).endswith("_"):
            reject(
                "UNSUPPORTED",
                stage,
                "the projection is clamped in place",
                value,
                hint="use clamp instead of clamp_",
            )
        inner = _through(self.run(value.operands[0].value), value.operands[0], value)
        low, high = clamp_bounds(value) or (None, None)
        bounds = " .. ".join(str(b.value if isinstance(b, View) else b) for b in (low, high))
        if not (isinstance(low, (int, float)) and isinstance(high, (int, float))):
            low = high = 0  # a bound is not a number, so the clamp is refused below
        if low != -high or high <= 0 or inner.clip:
            reject(
                "UNSUPPORTED",
                stage,
                f"the projection is clamped to {bounds}; one clamp to -c .. c can be fused",
                value,
                hint=_ONE_CLAMP,
            )
        return replace(inner, clip=float(high))

    def refuse(self, value: Value) -> NoReturn:
        if self.path is _UNNAMED:
            raise Reject(_UNSAID)
        path, way = self.path, f"between the projection and {self.path.reader}"
        code, what = path.code, f"expected a linear, a norm or a rotation, found {value}"
        if (moved := collective_of(value)) is not None:
            code, what = "COLLECTIVE", f"{moved} lies {way}"
        elif value.op == "cast":
            steps = (value.operands[0].value.dtype, value.dtype)
            code, what = "CAST", f"there is a cast from {' to '.join(map(dtype_name, steps))} {way}"
        elif value.op == "aten.index" and any(v.value.dtype == torch.bool for v in value.operands):
            code, what = path.masked or code, "a boolean mask selects the tokens that are written"
        hint = _HINTS.get(value.op, path.hint if code == path.code else "")
        if code == path.code and _is_taken_by_input(value):
            what += ", which selects at positions that a tensor gives"
            hint = (
                "if the positions are constant, use a slice, x[:, :, 2:3], or compile the "
                "model itself, because torch.export makes a list, x[:, :, [2]], an input"
            )
        if code == path.code and unread_product(value) is not None:
            what, hint = unread(value, "projection")
        if _is_scaled_by_constant(value):
            what += ", which applies a constant factor"
            hint = "multiply the projection's weight by the factor once, when the model is loaded"
        reject(code, path.stage, what, value, hint=hint)


def _is_taken_by_input(value: Value) -> bool:
    """Whether a value selects from a projection by an input of the graph, along a dimension other
    than the first."""
    if value.op != "aten.index" or not value.args[0].value.projected:
        return False
    return any(
        dim > 0 and isinstance(at, View) and at.value.op == "input" for dim, at in value.args[1]
    )


def _is_scaled_by_constant(value: Value) -> bool:
    """Whether a value is a projection that is multiplied or divided by one number, if this number
    depends on no input."""
    if value.op not in ("aten.mul", "aten.div"):
        return False
    scaled = [v for v in value.operands if v.value.projected]
    others = [v.value for v in value.operands if v not in scaled]
    single = all(v.op == "constant" and effects.product(v.shape) == 1 for v in others)
    over = value.op == "aten.mul" or value.args[0] in scaled
    return len(scaled) == 1 and single and over


def _of_gemm(gemm: Gemm) -> Linear:
    return Linear(gemm, gemm.value, gemm.layout, gemm.bias, 0, 0.0, (gemm.value,))


def _through(inner: Linear, operand: View, value: Value) -> Linear:
    layout = effects.compose(operand.effect, inner.layout)
    return replace(inner, value=value, layout=layout, absorbed=(value, *inner.absorbed))


def _by_column(vector: View, linear: Linear) -> tuple[View, int] | None:
    """Returns (numbers [n], first feature) if a vector has one number for each output feature; else
    None."""
    try:
        return bias_rows(vector, linear.layout, linear.gemm.feature)
    except effects.InexpressibleError:
        return None


def same_floats(one: View, other: View) -> bool:
    """Whether two tensors are equal apart from casts between floating-point types."""
    return equal_values(strip_casts(one)[0], strip_casts(other)[0])
