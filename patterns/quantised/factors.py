"""Separates decoded weights into codes and factors.

A weight of experts may have one scale for each block, and factors for each expert. A factor that is
constant within an expert stays in the form in which the graph computes it. At most one factor may
vary within an expert. This factor consists of floats of any kind, or of stored e4m3 or e8m0 bytes.
Such bytes are recognised by the numbers that the graph computes from each possible byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Generic, TypeVar

import torch

from tilewright.patterns.arithmetic.casts import is_float_cast
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Effect
from tilewright.patterns.quantised.byte_functions import ByteFunction, byte_function
from tilewright.patterns.quantised.words import follow

Code = TypeVar("Code")
# The steps that the rewriter applies to a view: ("to", dtype), ("bitcast", dtype) or
# ("bitwise_and", number).
Steps = tuple[tuple[str, torch.dtype | int], ...]
#: The steps that remove the signs of e4m3 numbers.
MAGNITUDE: Steps = (
    ("bitcast", torch.uint8), ("bitwise_and", 0x7F), ("bitcast", torch.float8_e4m3fn),
)  # fmt: skip

E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
_BYTES = torch.arange(256).double()
_E8M0 = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)


@dataclass(frozen=True)
class Factor:
    """A factor of a decoded weight, with one number for each element.

    Attributes:
        view: The view of the factor.
        kind: "times" (multiply), "over" (divide), "exponent" (multiply by two to this power), or
            "nan_where" (a condition under which the product is NaN).
        casts: The casts that the graph applies to the factor.
    """

    view: View
    kind: str = "times"
    casts: Steps = ()


@dataclass(frozen=True, eq=False)
class Coded(Generic[Code]):
    """Numbers that are the product of a code, a number and factors. The factors are in the order in
    which the graph applies them."""

    code: Code
    factors: tuple[Factor, ...] = ()
    number: float = 1.0


def match_coded(view: View, match_code: Callable[[View], Code | None]) -> Coded[Code] | None:
    """Returns the codes and factors whose product is a view. Returns None if the view has no codes.

    match_code: a function that returns the codes of a view that has no factors, or None.
    """
    view = follow(view)
    code = match_code(view)
    if code is not None:
        return Coded(code)
    value = view.value
    if not value.dtype.is_floating_point or value.dtype.itemsize == 1:
        return None
    if is_float_cast(value):
        return match_coded(view.of_operand(value.operands[0]), match_code)
    for kind, coded, factor in _products(view):
        inner = match_coded(coded, match_code)
        if inner is None:
            continue
        if isinstance(factor, View):
            part = Factor(view.of_operand(factor), kind)
            return replace(inner, factors=(*inner.factors, part))
        return replace(inner, number=inner.number * (factor if kind == "times" else 1 / factor))
    return None


_QUOTIENTS = {"aten.div": "over", "aten.ldexp": "exponent"}


def _products(view: View) -> list[tuple[str, View, Any]]:
    """Returns (kind, multiplied view, factor) for each way to read a view as a product. The ways in
    which the multiplied view repeats no element come first."""
    op, args = view.value.op, () if view.value.kwargs else view.value.args
    ways: list[tuple[str, Any, Any]] = []
    if op == "aten.where" and len(args) == 3 and args[1] != args[1]:
        ways = [("nan_where", args[2], args[0])]
    elif op == "aten.mul" and len(args) == 2:
        ways = [("times", *args), ("times", *args[::-1])]
    elif op in _QUOTIENTS and len(args) == 2:
        ways = [(_QUOTIENTS[op], *args)]
    found = [
        (kind, view.of_operand(coded), factor)
        for kind, coded, factor in ways
        if isinstance(coded, View) and is_factor(factor, tensor=kind not in ("times", "over"))
    ]
    return sorted(found, key=lambda way: repeats(way[1].effect))


def repeats(effect: Effect) -> bool:
    """Whether an effect selects some element of the value more than once."""
    return any(atom.axis is None for dim in effect.dims for atom in dim)


def product_of(
    factors: Sequence[View],
    divisors: Sequence[View],
    number: float,
    shape: Sequence[Any],
    device: torch.device,
) -> Computed:
    """Returns the product of the factors, the reciprocals of the divisors, and a number, in float32
    and with this shape."""
    items = [fp32(view) for view in factors]
    items += [Computed("reciprocal", (fp32(view),)) for view in divisors]
    if number != 1 or not items:
        options = (("dtype", torch.float32), ("device", device))
        items.append(Computed("full", (list(shape), float(number)), options))
    return reduce(lambda one, other: Computed("mul", (one, other)), items)


def fp32(item: View | Computed) -> Computed:
    """Returns the cast of a tensor to float32."""
    return Computed("to", (item, torch.float32))


# --- experts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockScale:
    """The only factor of a product that varies within an expert.

    Attributes:
        view: The view of the factor.
        kind: "e4m3", "e8m0" or "float".
        steps: The steps that are applied to the view.
        unsigned: Whether the graph removes the sign of e4m3.
    """

    view: View
    kind: str
    steps: Steps = ()
    unsigned: bool = False


@dataclass(frozen=True)
class Factors:
    """The parts of a product.

    Attributes:
        block: The factor that varies within an expert, or None.
        factors: Factors with one number for each expert [E]. For activations there is one number
            for each row [M].
        divisors: Views like `factors`, whose numbers divide the product.
        number: One more factor, which is the same for all elements.
        guard: Bytes that make the product NaN where they are 255, or None.
    """

    block: BlockScale | None = None
    factors: tuple[View, ...] = ()
    divisors: tuple[View, ...] = ()
    number: float = 1.0
    guard: View | None = None


def is_factor(item: Any, tensor: bool = False) -> bool:
    """Whether an argument can be a factor. It can be a tensor or, unless `tensor` is true, a
    positive number."""
    number = not tensor and isinstance(item, (int, float)) and item > 0
    return number or isinstance(item, View)


def with_factor(found: Factors, factor: Factor) -> Factors | None:
    """Returns `found` with one more factor, which is separated into its own factors as far as
    possible. Returns None for an unknown factor."""
    view = follow(factor.view)
    value = view.value
    if factor.kind == "nan_where":
        return _with_guard(found, view)
    if factor.kind != "exponent" and _is_constant_within(view.effect):
        return _with_constant(found, view, factor)
    stored = _stored_scale(view, factor.kind)
    if stored is not None:
        block, unit = stored
        return _with_block(found, block, unit)
    if factor.kind != "times":
        return None
    if is_float_cast(value):
        return with_factor(found, _before_cast(view, factor))
    if value.op in ("aten.mul", "aten.div") and not factor.casts and not value.kwargs:
        return _with_product(found, view)
    if not value.dtype.is_floating_point or value.dtype.itemsize == 1:
        return None
    return _with_block(found, BlockScale(view, "float", factor.casts))


def _with_guard(found: Factors, view: View) -> Factors | None:
    condition = byte_function(view)
    known = condition is not None and torch.equal(condition.table, (_BYTES == 255).double())
    if condition is None or not known or found.guard is not None:
        return None
    return replace(found, guard=condition.leaf)


def _is_constant_within(effect: Effect) -> bool:
    """Whether a factor has one number for all elements of an expert, or of a row of activations."""
    return all(a.axis is None for dim in effect.dims[1:] for a in dim)


def _with_constant(found: Factors, view: View, factor: Factor) -> Factors | None:
    """Returns `found` with a constant factor, in the form in which the graph computes it."""
    if not view.value.dtype.is_floating_point or view.value.dtype.itemsize == 1:
        return None
    if factor.casts:
        return None
    lead = view.with_dims(*view.effect.dims[:1])
    if factor.kind == "over":
        return replace(found, divisors=(*found.divisors, lead))
    return replace(found, factors=(*found.factors, lead))


def _with_block(found: Factors, block: BlockScale, unit: float = 1.0) -> Factors | None:
    if found.block is not None:
        return None
    return replace(found, block=block, number=found.number * unit)


def _before_cast(view: View, factor: Factor) -> Factor:
    """Returns the factor before a cast. A cast that rounds is added to `casts`."""
    (operand,) = view.value.operands
    to = view.value.dtype
    rounds = torch.promote_types(operand.value.dtype, to) != to
    steps: Steps = (("to", to),) if rounds else ()
    return replace(factor, view=view.of_operand(operand), casts=(*steps, *factor.casts))


def _with_product(found: Factors, view: View) -> Factors | None:
    """Returns `found` with each part of a product or quotient as a separate factor. Rounding the
    parts together would be less exact."""
    value: Value = view.value
    kinds = ("times", "over" if value.op == "aten.div" else "times")
    more: Factors | None = found
    for item, kind in zip(value.args, kinds, strict=True):
        if more is None or not is_factor(item):
            return None
        if isinstance(item, View):
            more = with_factor(more, Factor(view.of_operand(item), kind))
        else:
            more = replace(
                more, number=more.number * item if kind == "times" else more.number / item
            )
    return more


def _stored_scale(view: View, kind: str) -> tuple[BlockScale, float] | None:
    """Returns (block scale, unit) if a scale is a function of a stored byte; else None."""
    found = byte_function(view) if kind in ("times", "exponent") else None
    if found is None:
        return None
    if kind == "exponent" and torch.equal(found.table, _BYTES - 127):
        return _exponents(found.leaf), 1.0
    if kind == "times" and _are_powers(found):
        return _exponents(found.leaf), 1.0
    for unsigned in (False, True) if kind == "times" else ():
        unit = multiple(found.table, E4M3.abs() if unsigned else E4M3)
        if unit is not None:
            steps = _stored_as(found.leaf, torch.float8_e4m3fn)
            return BlockScale(found.leaf, "e4m3", steps, unsigned), unit
    return None


def stored_exponents(scale: View) -> BlockScale | None:
    """Returns the e8m0 bytes of which a scale is the power of two; else None. The first and last
    byte have the meaning of e8m0."""
    found = byte_function(scale)
    return None if found is None or not _are_powers(found) else _exponents(found.leaf)


def _are_powers(found: ByteFunction) -> bool:
    return torch.equal(found.table[1:255], _E8M0[1:255])


def _exponents(leaf: View) -> BlockScale:
    return BlockScale(leaf, "e8m0", _stored_as(leaf, torch.uint8))


def _stored_as(leaf: View, dtype: torch.dtype) -> Steps:
    return () if leaf.value.dtype == dtype else (("bitcast", dtype),)


def multiple(table: torch.Tensor, numbers: torch.Tensor) -> float | None:
    """Returns the positive unit such that a table exactly equals `numbers` multiplied by the unit;
    else None."""
    if table.shape != numbers.shape:
        return None
    at = int(torch.where(numbers.isnan() | (numbers < 0), 0, numbers).argmax())
    unit = float(table[at] / numbers[at])
    same = unit > 0 and unit < float("inf")
    equal = same and torch.equal(
        table.nan_to_num(nan=-1e30), (numbers * unit).nan_to_num(nan=-1e30)
    )
    return unit if equal else None
