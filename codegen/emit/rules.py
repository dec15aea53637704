"""Rules for the types, shapes and ranges of the results of `tl` functions. With these rules, the
emitter can fold expressions that contain calls of these functions.

If a function has no rule, the call is printed unchanged, and its result is unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tilewright.codegen.emit import values
from tilewright.codegen.emit.ranges import INT_RANGES, Range
from tilewright.codegen.emit.source import EmitError
from tilewright.codegen.emit.values import UNKNOWN, Shape, Value, constant, literal


@dataclass(frozen=True)
class Folded:
    """An expression as it will be printed, together with the facts about its value."""

    node: ast.expr
    value: Value


class Context(Protocol):
    """The part of the evaluator that a rule may use.

    Attributes:
        facts: The values of the expressions that have been printed.
        grid: The launch grid; None if it is not static.
    """

    facts: dict[ast.expr, Value]
    grid: tuple[int, ...] | None

    def error(self, node: ast.AST, message: str) -> EmitError: ...


@dataclass(frozen=True)
class Call:
    """A call with folded arguments."""

    node: ast.Call
    callee: Folded
    args: list[Folded]
    keywords: dict[str, Folded]

    def argument(self, position: int, name: str) -> Folded | None:
        if position < len(self.args):
            return self.args[position]
        return self.keywords.get(name)

    def constant(self, position: int, name: str) -> Any:
        """Returns the compile-time value of an argument. Returns UNKNOWN if the argument has no
        such value."""
        found = self.argument(position, name)
        return found.value.const if found is not None and found.value.literal else UNKNOWN

    def rebuild(self) -> ast.Call:
        keywords = [ast.keyword(name, item.node) for name, item in self.keywords.items()]
        return ast.Call(self.callee.node, [item.node for item in self.args], keywords)

    def unknown(self) -> Folded:
        return Folded(self.rebuild(), Value(runtime=True))

    def gives(self, dtype: str | None, shape: Shape | None, known: Range | None = None) -> Folded:
        """Returns the call with these facts about its result."""
        return Folded(self.rebuild(), values.tensor(dtype, shape, known))

    def without_true_mask(
        self, position: int, positions: tuple[int, ...], names: tuple[str, ...], context: Context
    ) -> Call:
        """Drops a mask that is None or true everywhere. Also drops the arguments that only a mask
        needs.

        In a mask `a & b`, a side that is always true is dropped if the other side alone broadcasts
        to the shape of the pointers.
        """
        mask = self.argument(position, "mask")
        if mask is None or len(self.args) > 3:  # the mask has positional arguments after it
            return self
        if mask.value.known and mask.value.const in (True, None):
            args = [arg for i, arg in enumerate(self.args) if i not in positions]
            keywords = {k: v for k, v in self.keywords.items() if k not in names}
            return Call(self.node, self.callee, args, keywords)
        shorter = Folded(_undecided(mask.node, context, self.args[0].value.shape), mask.value)
        if position < len(self.args):
            args = [*self.args[:position], shorter, *self.args[position + 1 :]]
            return Call(self.node, self.callee, args, self.keywords)
        return Call(self.node, self.callee, self.args, {**self.keywords, "mask": shorter})


Rule = Callable[[Call, Context], Folded]


def _undecided(mask: ast.expr, context: Context, pointers: Shape | None) -> ast.expr:
    """Returns `mask` without the operands of `&` that are true everywhere."""
    if not (isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.BitAnd)) or not pointers:
        return mask
    for drop, keep in ((mask.left, mask.right), (mask.right, mask.left)):
        shape = context.facts.get(keep, Value()).shape
        fits = shape is not None and len(shape) in (0, len(pointers))
        if fits and context.facts.get(drop, Value()).const is True:
            return _undecided(keep, context, pointers)
    return mask


def as_operand(item: Folded, other: Folded) -> ast.expr:
    """Returns `item` as it is printed next to `other`. A known int32 is printed as a literal if the
    types allow it."""
    value = item.value
    plain = value.known and not value.weak and value.shape == () and value.dtype == "int32"
    if plain and (other.value.dtype in ("int32", "int64") or other.value.is_pointer):
        return literal(int(value.const))
    return item.node


def replaces(candidate: Value, value: Value) -> bool:
    """Whether an operand may replace the whole expression, because both have the same known type
    and shape."""
    return (
        not candidate.weak
        and candidate.dtype is not None
        and (candidate.is_int or candidate.is_pointer)
        and candidate.dtype == value.dtype
        and candidate.shape is not None
        and candidate.shape == value.shape
    )


def _extreme(call: Call, pick: Callable[[Range, Range], Range]) -> Folded:
    if len(call.args) != 2:
        return call.unknown()
    left, right = (arg.value for arg in call.args)
    dtype = values.result_dtype(left, right)
    shape = values.broadcast(left.shape, right.shape)
    if dtype not in INT_RANGES or left.range is None or right.range is None:
        return call.gives(dtype, shape)
    known = pick(left.range, right.range)
    for operand in call.args:
        if operand.value.range is known and replaces(operand.value, values.tensor(dtype, shape)):
            return operand
    if pick is Range.minimum and shape == ():
        known = known.limited(left.range).limited(right.range)
    return call.gives(dtype, shape, known)


def _cdiv(call: Call, context: Context) -> Folded:
    left, right = call.args
    if left.value.literal and right.value.literal:
        return Folded(call.node, constant(-(-left.value.const // right.value.const)))
    less = values.binary(ast.Sub(), right.value, constant(1))
    total = values.binary(ast.Add(), left.value, less)
    return Folded(call.rebuild(), values.binary(ast.FloorDiv(), total, right.value))


def _next_power_of_2(call: Call, context: Context) -> Folded:
    number = call.constant(0, "n")
    if not isinstance(number, int):
        return call.unknown()
    return Folded(call.node, constant(1 << max(number - 1, 0).bit_length()))


def _axis(call: Call, context: Context) -> int:
    axis = call.constant(0, "axis")
    if not isinstance(axis, int):
        raise context.error(call.node, f"the axis must be a constant: {ast.unparse(call.node)}")
    return axis


def _program_id(call: Call, context: Context) -> Folded:
    axis = _axis(call, context)
    limit = 2**31 - 1 if axis == 0 else 65535
    if context.grid is not None:
        limit = context.grid[axis] if axis < len(context.grid) else 1
    return call.gives("int32", (), Range(0, limit - 1))


def _num_programs(call: Call, context: Context) -> Folded:
    axis = _axis(call, context)
    if context.grid is None:
        return call.gives("int32", (), Range(1, 2**31 - 1))
    number = context.grid[axis] if axis < len(context.grid) else 1
    return call.gives("int32", (), Range.constant(number))


def _arange(call: Call, context: Context) -> Folded:
    low, high = call.constant(0, "start"), call.constant(1, "end")
    if not (isinstance(low, int) and isinstance(high, int)):
        return call.gives("int32", None)
    # A block that has one element is still a block.
    return call.gives("int32", (high - low,), Range(low, high - 1))


def _block(call: Call, context: Context, dtype: Folded | None) -> Folded:
    shape = call.constant(0, "shape")
    name = values.dtype_of(dtype.value) if dtype is not None else None
    return call.gives(name, shape if isinstance(shape, tuple) else None)


def _pointee(call: Call, context: Context) -> Folded:
    """Folds a call whose first argument is a pointer. The result has the element type and the shape
    of the data at the pointer."""
    return call.gives(call.args[0].value.pointee, call.args[0].value.shape)


def _load(call: Call, context: Context) -> Folded:
    return _pointee(call.without_true_mask(1, (1, 2), ("mask", "other"), context), context)


def _store(call: Call, context: Context) -> Folded:
    return call.without_true_mask(2, (2,), ("mask",), context).unknown()


def _where(call: Call, context: Context) -> Folded:
    if len(call.args) != 3:
        return call.unknown()
    condition = call.args[0]
    yes, no = (Folded(arg.node, values.tensor_of(arg.value)) for arg in call.args[1:])
    branches = values.broadcast(yes.value.shape, no.value.shape)
    shape = values.broadcast(condition.value.shape, branches)
    dtype = values.result_dtype(yes.value, no.value)
    known = None
    if yes.value.range is not None and no.value.range is not None:
        known = yes.value.range.joined(no.value.range)
    folded = call.gives(dtype, shape, known)
    if condition.value.known:
        chosen = yes if condition.value.const else no
        if replaces(chosen.value, folded.value):
            return chosen
    return folded


def cast(call: Call, context: Context, operand: Folded, dtype: Folded | None) -> Folded:
    """Folds `x.to(dtype)` or `tl.cast(x, dtype)`: drops the cast if x already has that type."""
    name = values.dtype_of(dtype.value) if dtype is not None else None
    if name is not None and operand.value.dtype == name and not operand.value.weak:
        return operand
    exact = operand.value.is_int and "bitcast" not in call.keywords
    return call.gives(name, operand.value.shape, operand.value.range if exact else None)


def _same(call: Call, context: Context) -> Folded:
    """Folds a call that returns its first argument unchanged, such as a compiler hint."""
    return Folded(call.rebuild(), call.args[0].value)


def _elementwise(call: Call, context: Context) -> Folded:
    value = call.args[0].value
    return call.gives(value.dtype if not value.weak else None, value.shape)


def _clamp(call: Call, context: Context) -> Folded:
    """Folds a clamp between two numbers. Triton widens narrow floats, so the type of the result is
    unknown for them."""
    value, bounds = call.args[0].value, call.args[1:3]
    if len(bounds) < 2 or not all(bound.value.literal for bound in bounds):
        return call.unknown()
    return call.gives("float32" if value.dtype == "float32" else None, value.shape)


def _reshape(call: Call, context: Context) -> Folded:
    """Folds a call that returns its first argument in the shape that another argument gives."""
    return call.gives(call.args[0].value.dtype, _shape_arguments(call))


def _shape_arguments(call: Call) -> Shape | None:
    """Returns the shape that a call gives as one tuple or as separate numbers."""
    whole = call.constant(1, "shape")
    parts = whole if isinstance(whole, tuple) else tuple(arg.value.const for arg in call.args[1:])
    return parts if parts and all(type(part) is int for part in parts) else None


def _split(call: Call, context: Context) -> Folded:
    value = call.args[0].value
    shape = value.shape[:-1] if value.shape else None
    half = Value(dtype=value.dtype, shape=shape, runtime=True)
    return Folded(call.rebuild(), Value(items=(half, half), runtime=True))


def _reduce(call: Call, context: Context) -> Folded:
    """Folds a reduction. The result has the operand's element type, unless Triton widens that
    type."""
    value, axis = call.args[0].value, call.constant(1, "axis")
    dtype = value.dtype if value.dtype in ("float32", "int32", "int64") else None
    keeps = call.keywords.get("keep_dims")
    shape = value.shape
    if shape is None or not isinstance(axis, int) or keeps is not None or len(call.keywords) > 1:
        return call.gives(dtype, None)
    axis %= len(shape)
    return call.gives(dtype, shape[:axis] + shape[axis + 1 :])


def _dot(call: Call, context: Context) -> Folded:
    left, right = call.args[0].value.shape, call.args[1].value.shape
    accumulator = call.argument(2, "acc")
    dtype = accumulator.value.dtype if accumulator is not None else None
    if left is None or right is None:
        return call.gives(dtype, accumulator.value.shape if accumulator is not None else None)
    return call.gives(dtype, (*left[:-1], right[-1]))


def _descriptor(call: Call, context: Context) -> Folded:
    shape = call.constant(3, "block_shape")
    name = call.args[0].value.pointee if call.args else None
    known = shape if isinstance(shape, tuple) and name is not None else None
    return call.gives(f"descriptor<{name}>", known)


def descriptor_block(value: Value) -> Value:
    """Returns the facts about a block that is loaded through a descriptor."""
    assert value.dtype is not None
    name = value.dtype.removeprefix("descriptor<").removesuffix(">")
    return Value(
        dtype=name if name in values.DTYPE_NAMES else None, shape=value.shape, runtime=True
    )


METHODS: dict[str, Rule] = {
    "reshape": _reshape,
    "split": _split,
    "sum": _reduce,
    "broadcast_to": _reshape,
}
FUNCTIONS: dict[str, Rule] = {
    **METHODS,
    "max": _reduce,
    "min": _reduce,
    "minimum": lambda call, context: _extreme(call, Range.minimum),
    "maximum": lambda call, context: _extreme(call, Range.maximum),
    "constexpr": lambda call, context: call.args[0],
    "cdiv": _cdiv,
    "next_power_of_2": _next_power_of_2,
    "program_id": _program_id,
    "num_programs": _num_programs,
    "arange": _arange,
    "zeros": lambda call, context: _block(call, context, call.argument(1, "dtype")),
    "full": lambda call, context: _block(call, context, call.argument(2, "dtype")),
    "load": _load,
    "store": _store,
    "where": _where,
    "cast": lambda call, context: cast(call, context, call.args[0], call.argument(1, "dtype")),
    "clamp": _clamp,
    "dot": _dot,
    "make_tensor_descriptor": _descriptor,
    "atomic_add": _pointee,
    **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), _same),
    **dict.fromkeys(
        ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "abs", "sigmoid"), _elementwise
    ),
}
