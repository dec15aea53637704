"""Recognises the linears that the patterns of this folder search for: linears of few tokens whose
weight the model stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.targets import Target
from tilewright.ops.checks import HALVES
from tilewright.ops.mlp.linear_residual import OP
from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast, value_before_casts
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.arithmetic.formula import number, tensor
from tilewright.patterns.dataflow import Computed, Value, View, once, upstream
from tilewright.patterns.effects import InexpressibleError, Size
from tilewright.patterns.language import Missed, Stage, miss_at
from tilewright.patterns.quantised.activations import decoded_rows
from tilewright.patterns.quantised.coded_rows import CodedRows, match_coded_rows
from tilewright.patterns.quantised.scales import Names, weight_arguments
from tilewright.patterns.quantised.weights import match_scaled_weight, refuse, repeated
from tilewright.patterns.quantised.words import holds_codes, is_code
from tilewright.patterns.recognise.dtypes import check_dtypes, dtype_name, rows_fact
from tilewright.patterns.recognise.gemm import (
    Gemm,
    match_gemm,
    piece_of,
    unread_product,
)
from tilewright.patterns.recognise.linear import match_columns, unread

# The largest number of steps from a stored tensor to a weight that the graph computes.
_REACH = 64
# The operations whose values the model stores.
STORED = ("constant", "input")
# A product whose weight has fewer columns or rows than this belongs to an adapter, or is a gate.
LEAST_COLUMNS = 64
#: The ops' argument names for their weight, or for the first of two weights.
WEIGHT_NAMES = ("weight", "weight_scale", "weight_zero", "weight_factor")


@dataclass(frozen=True)
class FewTokens:
    """The linear `x @ weight^T + bias`.

    Attributes:
        x: The activation, [T, K].
        weight: The weight, [N, K].
        bias: The bias, [N], or None.
        absorbed: The values that the linear consists of.
        coded: Whether the weight is computed from codes.
        rounded: Whether x is decoded from codes, so that a library's GEMM can multiply these codes
            with the codes of the weight.
        sums_scale: The scale [N] that multiplies a product of codes.
        x_scale: The scale of x, [T or 1, K / block or 1], if the codes of x and of the weight are
            multiplied.
        weight_scale: The scale of the weight, [N, K], if the codes of x and of the weight are
            multiplied.
    """

    x: View
    weight: View
    bias: View | None
    absorbed: tuple[Value, ...]
    coded: bool = False
    rounded: bool = False
    sums_scale: View | None = None
    x_scale: View | None = None
    weight_scale: View | None = None

    @property
    def made(self) -> tuple[Size, Size]:
        """The shape of the product, [T, N]."""
        return self.x.shape[0], self.weight.shape[0]

    @property
    def rows(self) -> View | Computed:
        """x in the form that the op expects. If x has codes, this is the decoded activation."""
        if self.x_scale is None:
            return self.x
        return Computed(decoded_rows, (self.x, self.x_scale), (("dtype", self.product.dtype),))

    def reads_as(self, other: FewTokens) -> bool:
        """Whether the other linear reads the same activation as this one."""
        scales = [one for one in (self.x_scale, other.x_scale) if one is not None]
        same = not scales or (len(scales) == 2 and equal_values(*scales))
        return same and equal_values(self.x, other.x)

    @property
    def product(self) -> Value:
        """The product, whose operand is x."""
        return self.absorbed[-1]

    @property
    def codes(self) -> dict[str, bool]:
        """The arguments with which the op's method `slower` learns which operands are codes."""
        return {"coded": self.coded, "rounded": self.rounded}

    @property
    def float_values(self) -> tuple[Value, ...]:
        """The activation if it is not codes, and the weight if it is not codes."""
        if self.x_scale is not None:
            return ()
        return (self.x.value,) if self.coded else (self.x.value, self.weight.value)


@once
def match_few_tokens(
    view: View, by_head: bool = False, target: Target | None = None
) -> FewTokens | None:
    """Returns the linear whose result is a view [tokens..., N], or has this view as some of its
    columns. Returns None for every other view, and for a linear that certainly has too many tokens
    for the op.

    by_head: whether the columns of the view may be in several dimensions, as in [tokens..., heads,
    width]. target: the chip. Some chips have a kernel for any number of tokens.
    """
    value = value_before_casts(view.value)
    # A sum of two tensors of the result's own shape adds a residual. Neither tensor is a bias, so
    # the sum is not a linear.
    by_column = value.op in ("aten.add", "aten.mul") and any(
        v.shape != value.shape for v in value.operands
    )
    try:
        columns = match_columns(view, bare=not by_column)
        if columns is None or not columns.all_tokens:
            return None
        linear = columns.linear
        if linear.clip or linear.deltas:
            return None
        x, weight, weight_scale = columns.x.matrix, columns.weight, columns.weight_scale
        coded = weight.value.op not in STORED and holds_codes(weight.value)
        coded |= weight_scale is not None
        bias, scale = columns.bias, columns.scale
        if by_head and not coded and scale is None:
            weight = weight.matrix
            bias = bias and bias.reshape(weight.shape[0])
            if len(effects.coalesce(weight.effect.dims[0])) > 1:  # the rows are reordered
                return None
    except InexpressibleError:
        return None
    if len(weight.shape) != 2:
        return None
    if not all(isinstance(n, int) and n >= LEAST_COLUMNS for n in weight.shape):
        return None
    # If x has no codes, the library's GEMM would need dequantised weights.
    rounded = coded and (linear.gemm.x_scale is not None or _is_rounded(x))
    if not _few(x.shape[0], coded, rounded, target):
        return None
    if not coded and (not _is_kept(weight.value) or len(weight.value.shape) != 2):
        return None
    scales = (scale, linear.gemm.x_scale, weight_scale)
    return FewTokens(x, weight, bias, linear.absorbed, coded, rounded, *scales)


def _is_rounded(x: View) -> bool:
    return isinstance(match_coded_rows(x), CodedRows)


# The largest number of casts, biases and numbers between a product and its reader.
_STEPS = 6
_PASSED = frozenset({"cast", "aten.add", "aten.mul", "aten.div", "aten.clamp"})
_ONCE = "compute the weight once, when the model is loaded"
_NUMBERS = (
    "call torch._dynamo.mark_static(weight), or torch._dynamo.reset() before a model of other "
    "sizes is compiled"
)


def weighed(view: View, strip: bool = False) -> tuple[View, float, tuple[Value, ...]]:
    """Returns (x, factor, values) if a view is the product x * factor. Returns (view, 1, ()) for
    every other view.

    strip: whether to remove the casts of x too.
    """
    found = (_STRIPPED if strip else _WEIGHED).match(view)
    if found is None:
        return view, 1.0, ()
    return found.bound["x"], found.bound["factor"], found.absorbed


_STRIPPED = tensor("x") * number("factor")
_WEIGHED = tensor("x", strip=lambda view: (view, ())) * number("factor")


def bare_product(value: Value) -> Value | None:
    """Returns the product that a value is computed from by casts and by arithmetic with numbers,
    stored tensors and inputs only. Returns None if there is no such product."""
    before = _passed(value, lambda other: _is_stored(other) or other.op in STORED)
    return next((passed for passed in before if match_gemm(passed) is not None), None)


def _passed(value: Value, holds: Callable[[Value], bool]) -> Iterator[Value]:
    """Yields a value and the values that it is computed from. Continues from a value to its operand
    as long as two conditions hold: both have the same shape, and the value is computed from the
    operand by a cast, or by arithmetic with numbers and with values for which `holds` returns
    true."""
    for _ in range(_STEPS):
        yield value
        wide = [v.value for v in value.operands if v.shape == value.shape]
        others = [v.value for v in value.operands if v.value not in wide]
        if value.op not in _PASSED or len(wide) != 1 or not all(map(holds, others)):
            return
        (value,) = wide


def match_unlike(view: View) -> Missed | None:
    """Returns the miss for a view that is a product, apart from casts and arithmetic with vectors,
    if :func:`match_few_tokens` refuses this product because of its weight. Returns None for every
    other view."""
    scaled = None
    for value in _passed(view.value, _is_stored):
        gemm = match_gemm(value)
        if gemm is not None:
            return _unlike(gemm, scaled)
        if (product := unread_product(value)) is not None:
            return _unread(value, product[0])
        scaled = value if value.op in ("aten.mul", "aten.div") else scaled
    return None


def _unlike(gemm: Gemm, scaled: Value | None) -> Missed | None:
    """Returns the miss for a product, or None if no miss is reported. scaled: the multiplication or
    division of the product by a number or a vector, if there is one."""
    x, weight = gemm.flat_x, gemm.weight
    rows, columns = weight.shape
    if not _few(x.shape[0]) or weight.value.projected:
        return None
    given = f"{gemm.value}: its weight"
    if not all(isinstance(n, int) for n in (rows, columns)):
        why = f"{given} has symbolic sizes, {rows} x {columns}"
        of_model = _is_kept(weight.value) or _of_codes(weight.value)
        return _missed(gemm.value, why, _NUMBERS) if of_model else None
    if min(rows, columns) < LEAST_COLUMNS:
        return None
    if gemm.x_scale is not None or gemm.weight_scale is not None:
        if match_few_tokens(gemm.value.whole) is not None:
            return None
        return _missed(
            gemm.value,
            f"{gemm.value}: activation and weight are both eight-bit codes",
            "the op reads activations of 16 bits: do not quantise activations where few tokens are "
            "computed",
        )
    if weight.value.op in STORED:
        if len(weight.value.shape) == 2:
            why = f"{gemm.value}: {scaled} scales its result"
            hint = "multiply the weight by this factor once, when the model is loaded"
            return None if scaled is None else _missed(gemm.value, why, hint)
        axes = len(weight.value.shape)
        return _missed(gemm.value, f"{given} has {axes} axes", "store the weight as [N, K]")
    if holds_codes(weight.value) or not (_is_stored(weight.value) or _of_codes(weight.value)):
        return None
    if weight.value.op == "cast" and weight.value.operands[0].value.op in STORED:
        names = [dtype_name(v.dtype) for v in (weight.value.operands[0].value, weight.value)]
        why = f"{given} is cast from {' to '.join(names)} in every call"
        hint = "cast the weight once, when the model is loaded: module.to(dtype)"
        return _missed(gemm.value, why, hint)
    return _missed(gemm.value, f"{given} is computed in every call, by {weight.value}", _ONCE)


def _missed(product: Value, why: str, hint: str) -> Missed:
    """Returns the miss for a product of few tokens with a weight of the model, in a form that no op
    supports."""
    return Missed(
        miss_at("LINEAR_FORM", Stage.GUARDS, why, product, hint=hint), products=(product,)
    )


def _unread(value: Value, x: View) -> Missed | None:
    """Returns the miss for a product by an unknown operator. Returns None if the product is too
    small, or has many tokens."""
    if not _few(effects.product(x.shape[:-1])):
        return None
    wide = (value.shape[-1], x.shape[-1])
    if not all(isinstance(n, int) and n >= LEAST_COLUMNS for n in wide):
        return None
    return _missed(value, *unread(value, "linear"))


def _is_kept(weight: Value) -> bool:
    """Whether a weight is a stored tensor, or a stored tensor that is cast to the dtype of the
    activation. The cast stays in the graph."""
    return (weight.operands[0].value if is_float_cast(weight) else weight).op in STORED


def _of_codes(weight: Value) -> bool:
    """Whether a weight is computed from stored codes."""
    return any(not v.operands and is_code(v.dtype) for v in upstream(weight, _REACH))


def _is_stored(value: Value) -> bool:
    """Whether a value is computed only from stored tensors."""
    before = list(upstream(value, _REACH))
    leaves = [v for v in before if not v.operands]
    return len(before) < _REACH and bool(leaves) and all(v.op == "constant" for v in leaves)


def match_codes(linears: Sequence[FewTokens], names: Sequence[Names]) -> dict[str, Any]:
    """Returns the op's arguments for the weights of linears. `names` gives the names of the
    arguments for each weight.

    Raises Reject (WEIGHT_FORMAT, SCALE_BLOCK) if the op does not know the codes, or if the weights
    have different formats.
    """
    if not any(linear.coded for linear in linears):
        return {codes: one.weight for (codes, *_), one in zip(names, linears, strict=False)}
    weights = []
    for linear in linears:
        weight, scale = piece_of(linear.weight), linear.sums_scale
        wide = None if scale is None else repeated(scale, weight.shape[1])
        found = match_scaled_weight(weight, wide, linear.weight_scale)
        if found is None:
            refuse(weight, "the other weight is not")
        if not is_stored_as_is(found.codes.value):
            refuse(weight, "the model does not store these codes as they are")
        weights.append(found)
    return weight_arguments(weights, names)


def is_stored_as_is(codes: Value) -> bool:
    """Whether codes are a stored tensor, or a view of one as bytes."""
    return (codes.operands[0].value if codes.op == "bitcast" else codes).op in STORED


def _few(
    tokens: Any, coded: bool = False, rounded: bool = False, target: Target | None = None
) -> bool:
    """Whether the number of tokens is small enough for the op. A number that depends on data is
    never small enough, because it belongs to a mixture of experts."""
    slow = OP.slower(tokens=tokens, coded=coded, rounded=rounded, target=target)
    return slow is None and not effects.only_data_tell(tokens)


def check_linears(linears: Iterable[FewTokens], others: Iterable[View], end: Value) -> None:
    """Raises Reject (DTYPE, UNSUPPORTED) for dtypes that have no kernel."""
    linears = list(linears)
    given = [value.dtype for one in linears for value in one.float_values]
    # The op computes the values between a product and the reader of the product in float32.
    made = [v.dtype for one in linears for v in one.absorbed if v.dtype != torch.float32]
    more = [view.value.dtype for view in others]
    check_dtypes([*given, *made, *more, end.dtype], "activations and weights", end, HALVES)


def linear_facts(linear: FewTokens, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that reports show about a linear. arguments: the arguments of the op."""
    tokens, columns = linear.x.shape
    return {
        "x": rows_fact(linear.x.value.dtype, tokens, columns),
        "n": linear.weight.shape[0],
        **({"weights": arguments["weight_format"]} if linear.coded else _cast_fact(linear)),
    }


def _cast_fact(linear: FewTokens) -> dict[str, Any]:
    """Returns a fact that names the dtype from which every call casts a weight. If the weight were
    stored in the dtype of the activation, each call would read and write less memory."""
    weight = linear.weight.value
    if not is_float_cast(weight):
        return {}
    return {"weights": f"cast from {dtype_name(weight.operands[0].value.dtype)}"}
