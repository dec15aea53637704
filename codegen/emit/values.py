"""Facts that the emitter knows about expressions (constant, type, shape and range), and how
operators change them.

The rules are Triton's rules. A literal or constexpr (`weak`) takes the type of the other operand.
An integer constant that was assigned to a variable is an int32 tensor, with the arithmetic of that
type.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.emit.ranges import INT_RANGES, Range
from tilewright.codegen.emit.source import External, JitFunction


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()

Shape = tuple[int, ...]

# Maps type names in Triton's signatures to type names in triton.language.
DTYPES = {
    "i1": "int1",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8e4nv": "float8e4nv",
    "fp8e5": "float8e5",
}
DTYPE_NAMES = frozenset(DTYPES.values())
FLOATS = frozenset(name for name in DTYPE_NAMES if "float" in name)
TL = "triton.language"


@dataclass(frozen=True)
class Value:
    """Facts about the value of one expression.

    Attributes:
        const: The value if it is known, else UNKNOWN. For a block, the value of every element.
        weak: Whether the value is a Python number or constexpr, and not a tensor.
        dtype: The element type ("int32", "pointer<bfloat16>"); None if it is unknown.
        shape: The shape; () for a scalar, and None if it is unknown.
        range: For integers, the range of the value or of each element of a block.
        items: The elements of a tuple; None for any other value.
        runtime: Whether the value is certainly a tensor, and therefore not None.
    """

    const: Any = UNKNOWN
    weak: bool = False
    dtype: str | None = None
    shape: Shape | None = None
    range: Range | None = None
    items: tuple[Value, ...] | None = None
    runtime: bool = False

    @property
    def known(self) -> bool:
        return self.const is not UNKNOWN

    @property
    def literal(self) -> bool:
        """Whether the value is a known Python value, which Triton itself would fold."""
        return self.known and self.weak

    @property
    def is_int(self) -> bool:
        return self.dtype in INT_RANGES

    @property
    def is_pointer(self) -> bool:
        return self.dtype is not None and self.dtype.startswith("pointer<")

    @property
    def is_descriptor(self) -> bool:
        return self.dtype is not None and self.dtype.startswith("descriptor<")

    @property
    def pointee(self) -> str | None:
        """The element type of the data at a pointer; None for other values."""
        if not self.is_pointer or self.dtype is None:
            return None
        return self.dtype.removeprefix("pointer<").removesuffix(">")


NOTHING = Value()


def constant(value: Any) -> Value:
    """Returns the facts about a literal or constexpr."""
    known = Range.constant(value) if isinstance(value, int) else None
    return Value(value, weak=True, shape=(), range=known)


def tensor(dtype: str | None, shape: Shape | None, known: Range | None = None) -> Value:
    """Returns the facts about a tensor. The tensor is a constant if its range is one number.
    Without a range, an integer may have any value of its type."""
    if dtype not in INT_RANGES or dtype is None:
        return Value(dtype=dtype, shape=shape, runtime=True)
    known = Range.of(dtype) if known is None else known.fit(dtype)
    const: Any = known.low if known.is_constant else UNKNOWN
    if dtype == "int1" and const is not UNKNOWN:
        const = bool(const)
    return Value(const, dtype=dtype, shape=shape, range=known, runtime=True)


def tensor_of(value: Value) -> Value:
    """Returns the facts about a variable after `value` was assigned to it. If the value was a
    Python number, it has become a tensor."""
    if value.items is not None:
        return Value(items=tuple(map(tensor_of, value.items)))
    if value.weak and isinstance(value.const, tuple):
        return Value(items=tuple(tensor_of(constant(item)) for item in value.const))
    if not value.weak or not isinstance(value.const, (bool, int, float)):
        return value
    if isinstance(value.const, bool):
        return tensor("int1", (), Range.constant(int(value.const)))
    if isinstance(value.const, int):
        for dtype in ("int32", "uint32", "int64"):
            low, high = INT_RANGES[dtype]
            if low <= value.const <= high:
                return tensor(dtype, (), Range.constant(value.const))
        return Value(dtype="uint64", shape=(), runtime=True)
    return Value(dtype=None, shape=(), runtime=True)  # fp32 and fp64 arithmetic is not folded


def broadcast(left: Shape | None, right: Shape | None) -> Shape | None:
    """Returns the common shape of two operands; None if it is unknown."""
    if left is None or right is None:
        return None
    rank = max(len(left), len(right))
    padded = [(1,) * (rank - len(shape)) + shape for shape in (left, right)]
    if any(x != y and 1 not in (x, y) for x, y in zip(*padded, strict=True)):
        return None
    return tuple(max(x, y) for x, y in zip(*padded, strict=True))


BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
# Maps an operator to its rule for the range of the result.
_RANGES: dict[type[ast.operator], Callable[[Range, Range], Range]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# The same for int1, for which "and" is the minimum and "or" is the maximum.
_FLAG_RANGES: dict[type[ast.operator], Callable[[Range, Range], Range]] = {
    ast.BitAnd: Range.minimum,
    ast.BitOr: Range.maximum,
}


def result_dtype(left: Value, right: Value) -> str | None:
    """Returns the element type of integer or pointer arithmetic; None if it is unknown here."""
    if left.is_pointer:
        return left.dtype
    if right.is_pointer:
        return right.dtype
    if left.weak != right.weak:
        number, other = (left, right) if left.weak else (right, left)
        if not isinstance(number.const, int) or isinstance(number.const, bool):
            return other.dtype if isinstance(number.const, bool) else None
        if other.dtype in INT_RANGES and other.dtype != "int1":
            low, high = INT_RANGES[other.dtype]
            return other.dtype if low <= number.const <= high else None
        return other.dtype if other.dtype in FLOATS else None
    if left.dtype == right.dtype:
        return left.dtype
    if {left.dtype, right.dtype} == {"int32", "int64"}:
        return "int64"
    return None


def binary(op: ast.operator, left: Value, right: Value) -> Value:
    """Returns the facts about `left op right`."""
    if left.literal and right.literal:
        return constant(BINARY[type(op)](left.const, right.const))
    if left.weak and right.weak:
        return Value(weak=True, shape=())
    shape = broadcast(left.shape, right.shape)
    dtype = result_dtype(left, right)
    if dtype is None or isinstance(op, (ast.Div, ast.Pow)):
        return Value(shape=shape, runtime=True)
    rule = (_FLAG_RANGES if dtype == "int1" else _RANGES).get(type(op))
    if rule is None or left.range is None or right.range is None:
        return tensor(dtype, shape)
    return tensor(dtype, shape, rule(left.range, right.range))


def compare(op: ast.cmpop, left: Value, right: Value) -> Value:
    """Returns the facts about the comparison `left op right`. The ranges of the operands may decide
    the result."""
    function = COMPARE.get(type(op))
    if function is None:
        return _identity(left, right, isinstance(op, ast.IsNot))
    if left.literal and right.literal:
        return constant(bool(function(_comparable(left), _comparable(right))))
    if left.weak and right.weak:
        return Value(weak=True, shape=())
    shape = broadcast(left.shape, right.shape)
    if left.range is None or right.range is None or result_dtype(left, right) is None:
        return tensor("int1", shape)
    decided = left.range.compares(function, right.range)
    return tensor("int1", shape, None if decided is None else Range.constant(int(decided)))


def _comparable(value: Value) -> Any:
    if isinstance(value.const, tuple):
        return tuple(item.const if isinstance(item, Value) else item for item in value.const)
    return value.const


def _identity(left: Value, right: Value, negated: bool) -> Value:
    if left.literal and right.literal:
        return constant((left.const is right.const) != negated)
    if (left.runtime and right.const is None) or (right.runtime and left.const is None):
        return constant(negated)
    return NOTHING


def as_pointer(type_name: str) -> str | None:
    """Returns "pointer<bfloat16>" for the signature type "*bf16"; None for an unknown type."""
    return f"pointer<{DTYPES[type_name[1:]]}>" if type_name[1:] in DTYPES else None


def dtype_of(value: Value) -> str | None:
    """Returns "float32" for the constant tl.float32; None for a value that is not a dtype."""
    if isinstance(value.const, External) and value.const.path.startswith(f"{TL}."):
        name = value.const.path[len(TL) + 1 :]
        return name if name in DTYPE_NAMES else None
    return None


def literal(value: Any) -> ast.expr:
    """Returns an expression whose value is a constant."""
    if isinstance(value, External):
        return _dotted(value.path)
    if isinstance(value, JitFunction):
        return ast.Name(value.name, ast.Load())
    if isinstance(value, tuple):
        return ast.Tuple([literal(item) for item in value], ast.Load())
    if isinstance(value, float) and not math.isfinite(value):
        return ast.Call(ast.Name("float", ast.Load()), [ast.Constant(str(value))], [])
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def _dotted(path: str) -> ast.expr:
    """Returns a dotted path as it is written in the emitted file, where triton.language is `tl`."""
    if path == TL or (path.startswith(f"{TL}.") and not path.startswith(f"{TL}.extra.")):
        path = f"tl{path[len(TL) :]}"
    elif path.startswith(f"{TL}.extra."):
        path = path.rsplit(".", 2)[1] + "." + path.rsplit(".", 1)[1]
    first, *rest = path.split(".")
    node: ast.expr = ast.Name(first, ast.Load())
    for part in rest:
        node = ast.Attribute(node, part, ast.Load())
    return node
