"""What the emitter knows of an expression: constant, type, shape and index, and how operators act.

The rules are Triton's. A literal or constexpr (`weak`) takes the type of what it meets; a constant
that was assigned to a variable is an int32 tensor, with that type's arithmetic.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy

from tilewright.codegen.emit.index_math import INT_RANGES, IndexMath
from tilewright.codegen.emit.source import External, JitFunction


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()

Shape = tuple[int, ...]

# Triton's names in signatures, and those of tl.*, to the names used here.
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
        const: the value where it is known; for a block, what every element equals.
        weak: a Python number or constexpr rather than a tensor.
        dtype: element type ("int32", "pointer<bfloat16>"), None where unknown.
        shape: () for a scalar, None where unknown.
        index: integers only: the value as a polynomial of IndexMath's symbols.
        items: the elements where this is a tuple.
        runtime: certainly a tensor, so that it is not None.
    """

    const: Any = UNKNOWN
    weak: bool = False
    dtype: str | None = None
    shape: Shape | None = None
    index: sympy.Expr | None = None
    items: tuple[Value, ...] | None = None
    runtime: bool = False

    @property
    def known(self) -> bool:
        return self.const is not UNKNOWN

    @property
    def literal(self) -> bool:
        """Known, and a Python value: folding it is what Triton does itself."""
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
        """Element type behind a pointer."""
        if not self.is_pointer or self.dtype is None:
            return None
        return self.dtype.removeprefix("pointer<").removesuffix(">")


NOTHING = Value()


def constant(value: Any) -> Value:
    """A literal or constexpr."""
    index = sympy.Integer(value) if isinstance(value, int) else None
    return Value(value, weak=True, shape=(), index=index)


def integer(index: sympy.Expr, dtype: str, shape: Shape | None) -> Value:
    """An integer tensor; constant where its index is a number."""
    const = int(index) if index.is_Integer else UNKNOWN
    if dtype == "int1" and const is not UNKNOWN:
        const = bool(const)
    return Value(const, dtype=dtype, shape=shape, index=index, runtime=True)


def tensor_of(value: Value) -> Value:
    """What an assignment makes of a value: Python numbers become tensors."""
    if value.items is not None:
        return Value(items=tuple(map(tensor_of, value.items)))
    if value.weak and isinstance(value.const, tuple):
        return Value(items=tuple(tensor_of(constant(item)) for item in value.const))
    if not value.weak or not isinstance(value.const, (bool, int, float)):
        return value
    if isinstance(value.const, bool):
        return integer(sympy.Integer(int(value.const)), "int1", ())
    if isinstance(value.const, int):
        for dtype in ("int32", "uint32", "int64"):
            low, high = INT_RANGES[dtype]
            if low <= value.const <= high:
                return integer(sympy.Integer(value.const), dtype, ())
        return Value(dtype="uint64", shape=(), runtime=True)
    return Value(dtype=None, shape=(), runtime=True)  # fp32 or fp64 arithmetic: not folded


def broadcast(left: Shape | None, right: Shape | None) -> Shape | None:
    """The common shape of two operands; None where it cannot be told."""
    if left is None or right is None:
        return None
    rank = max(len(left), len(right))
    padded = [(1,) * (rank - len(shape)) + shape for shape in (left, right)]
    if any(x != y and 1 not in (x, y) for x, y in zip(*padded, strict=True)):
        return None
    return tuple(max(x, y) for x, y in zip(*padded, strict=True))


BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
    ast.LShift: ("<<", operator.lshift),
    ast.RShift: (">>", operator.rshift),
    ast.BitAnd: ("&", operator.and_),
    ast.BitOr: ("|", operator.or_),
    ast.BitXor: ("^", operator.xor),
}
COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.In: ("in", lambda item, items: item in items),
    ast.NotIn: ("not in", lambda item, items: item not in items),
}


def result_dtype(left: Value, right: Value) -> str | None:
    """Element type of integer or pointer arithmetic; None where this module does not know it."""
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


def binary(op: ast.operator, left: Value, right: Value, math_: IndexMath) -> Value:
    """Facts about `left op right`."""
    symbol, function = BINARY[type(op)]
    if left.literal and right.literal:
        return constant(function(left.const, right.const))
    if left.weak and right.weak:
        return Value(weak=True, shape=())
    shape = broadcast(left.shape, right.shape)
    dtype = result_dtype(left, right)
    if dtype is None or symbol in ("/", "**"):
        return Value(shape=shape, runtime=True)
    if dtype == "int1":
        return _boolean(symbol, left, right, shape)
    if dtype not in INT_RANGES or left.index is None or right.index is None:
        index = math_.unknown(dtype) if dtype in INT_RANGES else None
        return Value(dtype=dtype, shape=shape, index=index, runtime=True)
    return integer(_index(symbol, left.index, right.index, dtype, math_), dtype, shape)


def _boolean(symbol: str, left: Value, right: Value, shape: Shape | None) -> Value:
    const: Any = UNKNOWN
    if symbol == "&":
        if left.known and right.known:
            const = bool(left.const and right.const)
        elif False in (left.const, right.const):
            const = False
    elif symbol == "|":
        if left.known and right.known:
            const = bool(left.const or right.const)
        elif True in (left.const, right.const):
            const = True
    return Value(const, dtype="int1", shape=shape, runtime=True)


def _index(
    symbol: str, left: sympy.Expr, right: sympy.Expr, dtype: str, math_: IndexMath
) -> sympy.Expr:
    if symbol == "+":
        return math_.fit(left + right, dtype)
    if symbol == "-":
        return math_.fit(left - right, dtype)
    if symbol == "*":
        return math_.fit(left * right, dtype)
    if symbol == "//":
        return math_.floordiv(left, right, dtype)
    if symbol == "%":
        return math_.mod(left, right, dtype)
    if symbol == "<<" and right.is_Integer and 0 <= int(right) < 31:
        return math_.fit(left * 2 ** int(right), dtype)
    if symbol == ">>" and right.is_Integer and 0 <= int(right) < 31:
        return math_.floordiv(left, sympy.Integer(2 ** int(right)), dtype)
    if symbol == "&" and right.is_Integer and (int(right) & (int(right) + 1)) == 0:
        return math_.mod(left, right + 1, dtype) if int(right) >= 0 else math_.unknown(dtype)
    return math_.unknown(dtype)


def compare(op: ast.cmpop, left: Value, right: Value, math_: IndexMath) -> Value:
    """Facts about `left op right`; known also where the operands' ranges decide it."""
    symbol, function = COMPARE.get(type(op), ("is", None))
    if symbol == "is":
        return _identity(left, right, isinstance(op, ast.IsNot))
    if left.literal and right.literal and function is not None:
        return constant(bool(function(_comparable(left), _comparable(right))))
    if left.weak and right.weak:
        return Value(weak=True, shape=())
    shape = broadcast(left.shape, right.shape)
    if left.index is None or right.index is None or result_dtype(left, right) is None:
        return Value(dtype="int1", shape=shape, runtime=True)
    decided = math_.decide(symbol, left.index, right.index)
    return Value(UNKNOWN if decided is None else decided, dtype="int1", shape=shape, runtime=True)


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
    """ "pointer<bfloat16>" for the signature type "*bf16"."""
    return f"pointer<{DTYPES[type_name[1:]]}>" if type_name[1:] in DTYPES else None


def dtype_of(value: Value) -> str | None:
    """ "float32" for the constant tl.float32."""
    if isinstance(value.const, External) and value.const.path.startswith(f"{TL}."):
        name = value.const.path[len(TL) + 1 :]
        return name if name in DTYPE_NAMES else None
    return None


def literal(value: Any) -> ast.expr:
    """The expression that spells a constant."""
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
    """A dotted path as the emitted file imports it: triton.language is `tl`."""
    if path == TL or (path.startswith(f"{TL}.") and not path.startswith(f"{TL}.extra.")):
        path = f"tl{path[len(TL) :]}"
    elif path.startswith(f"{TL}.extra."):
        path = path.rsplit(".", 2)[1] + "." + path.rsplit(".", 1)[1]
    first, *rest = path.split(".")
    node: ast.expr = ast.Name(first, ast.Load())
    for part in rest:
        node = ast.Attribute(node, part, ast.Load())
    return node
