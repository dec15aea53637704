"""Folds expressions: constants, identities, comparisons whose result is known, and masks that are
always true."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tilewright.codegen.emit import values
from tilewright.codegen.emit.nodes import copy_of
from tilewright.codegen.emit.ranges import Range
from tilewright.codegen.emit.rules import (
    FUNCTIONS,
    METHODS,
    Call,
    Folded,
    as_operand,
    cast,
    descriptor_block,
    replaces,
)
from tilewright.codegen.emit.source import (
    EmitError,
    External,
    JitFunction,
    Library,
    ModuleConstant,
    TemplateModule,
)
from tilewright.codegen.emit.values import NOTHING, TL, Value, constant, literal
from tilewright.codegen.spec import KernelSpec

_BUILTINS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "len": len,
    "int": int,
    "float": float,
    "bool": bool,
}
BUILTIN_NAMES = frozenset({*_BUILTINS, "range", "print", "isinstance", "getattr", "hasattr"})
RESERVED_NAMES = BUILTIN_NAMES | {"tl", "triton", "math", "libdevice"}

_IDENTITY_RIGHT = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.FloorDiv: 1, ast.LShift: 0}
_IDENTITY_RIGHT |= {ast.RShift: 0, ast.BitAnd: True, ast.BitOr: False}
_COMMUTES = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)


@cache
def _rule_of(kind: str) -> str:
    """Returns the name of the method that folds expressions of a kind."""
    return f"_fold_{kind.lower()}"


@dataclass
class Scope:
    """The names of one function while the function is evaluated.

    Attributes:
        function: The jit function that is evaluated.
        bindings: The current expression and value of each of the function's names.
        renamed: The printed name of each of the function's local variables.
        runtime_depth: How many run-time `if`s and loops enclose the current statement.
    """

    function: JitFunction
    bindings: dict[str, Folded] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    runtime_depth: int = 0

    @property
    def module(self) -> TemplateModule:
        return self.function.module


class Expressions:
    """The part of the evaluator that evaluates expressions, and the state of all its parts.

    The evaluator is one class in four files: Expressions, Statements, ControlFlow and
    PartialEvaluator (kernels and the inlining of called functions). Each class derives from the
    previous one.

    Attributes:
        spec, library: The kernel's spec, and the templates that it may read.
        facts: The known values of the expressions that have been printed.
        externals: The paths in triton that the emitted file has to import.
        kept: The jit functions that the emitted file has to define.
        scope: The names of the function that is being evaluated.
        stack: The functions that are being evaluated. Callers come first, and the current function
            is last.
        body: The statements of the current block that have been printed.
        used: The names that a new local variable must not use.
        returned: The return value of the function that is being inlined.
        root: The expression of the current statement. The statements of inlined functions are put
            before it.
        conditional: The name of a construct, such as "a conditional expression", if functions
            called in the current expression must not add statements before it; else None.
    """

    def __init__(self, spec: KernelSpec, library: Library) -> None:
        self.spec = spec
        self.library = library
        self.grid = spec.grid
        self.facts: dict[ast.expr, Value] = {}
        self.externals: set[str] = set()
        self.kept: dict[str, JitFunction] = {}
        self.scope: Scope
        self.stack: list[JitFunction] = []
        self.body: list[ast.stmt] = []
        self.used: set[str] = set(RESERVED_NAMES)
        self.returned: Folded | None = None
        self.root: ast.expr | None = None
        self.conditional: str | None = None

    def inline(self, function: JitFunction, call: ast.Call) -> Folded:
        raise NotImplementedError  # PartialEvaluator overrides this

    def error(self, node: ast.AST, message: str) -> EmitError:
        """Returns the error to raise if `node` cannot be translated."""
        line = getattr(node, "lineno", "?")
        return EmitError(f"{self.scope.module.name}:{line}: {message}")

    def fold(self, node: ast.expr) -> Folded:
        """Evaluates one expression. Raises EmitError if the expression is not supported."""
        rule = getattr(self, _rule_of(type(node).__name__), None)
        if rule is None:
            raise self.error(node, f"{type(node).__name__} is not supported: {ast.unparse(node)}")
        folded: Folded = rule(node)
        if folded.value.literal and not isinstance(folded.node, ast.List):
            folded = self._literal(folded.value)
        self.facts[folded.node] = folded.value
        return folded

    def _literal(self, value: Value) -> Folded:
        if isinstance(value.const, External):
            self.externals.add(value.const.path)
        return Folded(literal(value.const), value)

    def _fold_constant(self, node: ast.Constant) -> Folded:
        return Folded(node, constant(node.value))

    def _fold_joinedstr(self, node: ast.JoinedStr) -> Folded:
        return Folded(node, NOTHING)

    def _fold_name(self, node: ast.Name) -> Folded:
        bound = self.scope.bindings.get(node.id)
        if bound is not None:
            return Folded(copy_of(bound.node), bound.value)
        found = self.library.lookup(self.scope.module, node.id)
        if isinstance(found, (External, JitFunction)):
            return Folded(node, constant(found))
        if found is not None:
            return self._module_constant(node.id, found)
        if node.id in BUILTIN_NAMES:
            return Folded(ast.Name(node.id, ast.Load()), NOTHING)
        raise self.error(node, f"{node.id} is neither a local name nor a constant or function here")

    def _module_constant(self, name: str, found: ModuleConstant) -> Folded:
        caller = self.scope
        self.scope = Scope(JitFunction(found.module, caller.function.node))
        folded = self.fold(found.expression)
        if not folded.value.literal:
            raise self.error(
                found.expression, f"{name} is read by a kernel, so it must be a constant"
            )
        self.scope = caller
        return folded

    def _fold_attribute(self, node: ast.Attribute) -> Folded:
        base = self.fold(node.value)
        if isinstance(base.value.const, External):
            path = f"{base.value.const.path}.{node.attr}"
            if path.startswith("math.") and isinstance(getattr(math, node.attr, None), float):
                return Folded(node, constant(getattr(math, node.attr)))
            return Folded(node, constant(External(path)))
        if node.attr == "value" and base.value.weak:
            return base
        rebuilt = Folded(ast.Attribute(base.node, node.attr, ast.Load()), NOTHING)
        if node.attr == "element_ty" and isinstance(base.node, ast.Attribute):
            pointer = self.facts.get(base.node.value, NOTHING)
            if base.node.attr == "dtype" and pointer.pointee is not None:
                return Folded(node, constant(External(f"{TL}.{pointer.pointee}")))
        if node.attr == "shape" and base.value.shape is None:
            return Folded(rebuilt.node, Value(weak=True))
        if not base.value.runtime:
            return rebuilt
        if node.attr == "dtype" and base.value.dtype in values.DTYPE_NAMES:
            return Folded(node, constant(External(f"{TL}.{base.value.dtype}")))
        if node.attr == "shape" and base.value.shape is not None:
            return Folded(node, constant(base.value.shape))
        if node.attr == "T" and base.value.shape is not None:
            facts = Value(dtype=base.value.dtype, shape=base.value.shape[::-1], runtime=True)
            return Folded(rebuilt.node, facts)
        return rebuilt

    def _fold_tuple(self, node: ast.Tuple | ast.List) -> Folded:
        items = [self.fold(item) for item in node.elts]
        rebuilt = type(node)([item.node for item in items], ast.Load())
        if items and all(item.value.literal for item in items):
            return Folded(rebuilt, constant(tuple(item.value.const for item in items)))
        return Folded(rebuilt, Value(items=tuple(item.value for item in items)))

    _fold_list = _fold_tuple

    def _fold_subscript(self, node: ast.Subscript) -> Folded:
        base = self.fold(node.value)
        if base.value.literal or base.value.items is not None:
            index = self.fold(node.slice)
            if not index.value.literal or not isinstance(index.value.const, int):
                raise self.error(node, f"a tuple needs a constant index: {ast.unparse(node)}")
            if base.value.literal:
                return Folded(node, constant(base.value.const[index.value.const]))
            assert base.value.items is not None
            item = base.value.items[index.value.const]
            if isinstance(base.node, (ast.Tuple, ast.List)):
                return Folded(base.node.elts[index.value.const], item)
            return Folded(ast.Subscript(base.node, index.node, ast.Load()), item)
        rebuilt = ast.Subscript(base.node, node.slice, ast.Load())
        if base.value.weak:  # an element of a shape that only Triton knows
            return Folded(rebuilt, Value(weak=True, shape=()))
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not all(_is_new_axis(part) or _is_full_slice(part) for part in parts):
            raise self.error(node, f"only None and : may index a tensor: {ast.unparse(node)}")
        return Folded(rebuilt, self._with_axes(base.value, parts))

    def _with_axes(self, value: Value, parts: Sequence[ast.expr]) -> Value:
        if value.shape is None or sum(map(_is_full_slice, parts)) != len(value.shape):
            return Value(dtype=value.dtype, runtime=True)
        extents = iter(value.shape)
        shape = tuple(1 if _is_new_axis(part) else next(extents) for part in parts)
        # Expressions that share a Range object are treated as equal. The elements are now along
        # another axis, so they are not equal to the elements of the old block. Therefore the new
        # block gets a copy of the range.
        known = replace(value.range) if value.range is not None else None
        return replace(value, shape=shape, range=known, runtime=True)

    def _fold_unaryop(self, node: ast.UnaryOp) -> Folded:
        operand = self.fold(node.operand)
        value = operand.value
        if value.literal:
            if isinstance(node.op, ast.Not):
                return Folded(node, constant(not value.const))
            apply = {ast.USub: lambda x: -x, ast.UAdd: lambda x: +x, ast.Invert: lambda x: ~x}
            return Folded(node, constant(apply[type(node.op)](value.const)))
        rebuilt = ast.UnaryOp(node.op, operand.node)
        if isinstance(node.op, ast.Not) or value.dtype == "int1":
            known = Range.constant(int(not value.const)) if value.known else None
            return Folded(rebuilt, values.tensor("int1", value.shape, known))
        if isinstance(node.op, ast.USub) and value.range is not None and not value.weak:
            negated = Range.constant(0) - value.range
            return Folded(rebuilt, values.tensor(value.dtype, value.shape, negated))
        if value.weak:
            return Folded(rebuilt, Value(weak=True, shape=value.shape))
        return Folded(rebuilt, values.tensor(value.dtype, value.shape))

    def _fold_binop(self, node: ast.BinOp) -> Folded:
        left, right = self.fold(node.left), self.fold(node.right)
        try:
            value = values.binary(node.op, left.value, right.value)
        except (ArithmeticError, TypeError, KeyError) as error:
            raise self.error(node, f"{ast.unparse(node)}: {error}") from error
        if value.literal:
            return Folded(node, value)
        return self.simplify(node.op, left, right, value)

    def simplify(self, op: ast.operator, left: Folded, right: Folded, value: Value) -> Folded:
        """Returns the shortest exact form of `left op right`. value: the facts about the result."""
        if type(op) in _IDENTITY_RIGHT:
            neutral = _IDENTITY_RIGHT[type(op)]
            if _equals(right.value, neutral) and replaces(left.value, value):
                return left
            commutes = isinstance(op, _COMMUTES)
            if commutes and _equals(left.value, neutral) and replaces(right.value, value):
                return right
        smaller = isinstance(op, ast.Mod) and value.range is left.value.range
        if smaller and replaces(left.value, value):
            return left
        operands = as_operand(left, right), as_operand(right, left)
        return Folded(ast.BinOp(operands[0], op, operands[1]), value)

    def _fold_compare(self, node: ast.Compare) -> Folded:
        operands = [self.fold(item) for item in (node.left, *node.comparators)]
        if len(operands) > 2 and not all(item.value.literal for item in operands):
            raise self.error(node, f"Triton has no chained comparison: {ast.unparse(node)}")
        pairs = list(zip(node.ops, operands, operands[1:], strict=False))
        facts = [values.compare(op, x.value, y.value) for op, x, y in pairs]
        if all(value.literal for value in facts):
            return Folded(node, constant(all(value.const for value in facts)))
        left, right = operands
        rebuilt = ast.Compare(as_operand(left, right), node.ops, [as_operand(right, left)])
        return Folded(rebuilt, facts[0])

    def _fold_boolop(self, node: ast.BoolOp) -> Folded:
        stops = isinstance(node.op, ast.Or)
        rest: list[Folded] = []
        for item in node.values:
            folded = self.fold(item)
            if not folded.value.known:
                rest.append(folded)
            elif bool(folded.value.const) == stops:
                return folded if folded.value.literal else Folded(node, constant(stops))
        if not rest:
            return folded
        if len(rest) == 1:
            return rest[0]
        operands = [item.node for item in rest]
        return Folded(ast.BoolOp(node.op, operands), values.tensor("int1", ()))

    def _fold_ifexp(self, node: ast.IfExp) -> Folded:
        test = self.fold(node.test)
        if test.value.literal:
            return self.fold(node.body if test.value.const else node.orelse)
        outer, self.conditional = self.conditional, "a conditional expression"
        body, orelse = self.fold(node.body), self.fold(node.orelse)
        self.conditional = outer
        same = body.value.dtype == orelse.value.dtype and body.value.shape == orelse.value.shape
        known = Value(dtype=body.value.dtype, shape=body.value.shape) if same else NOTHING
        if body.value.range is not None and orelse.value.range is not None and same:
            either = body.value.range.joined(orelse.value.range)
            known = values.tensor(known.dtype, known.shape, either)
        return Folded(ast.IfExp(test.node, body.node, orelse.node), known)

    def _fold_call(self, node: ast.Call) -> Folded:
        callee = self.fold(node.func)
        target = callee.value.const
        if isinstance(target, JitFunction):
            return self.inline(target, node)
        if any(isinstance(arg, ast.Starred) for arg in node.args):
            raise self.error(node, f"starred arguments are not supported: {ast.unparse(node)}")
        args = [self.fold(arg) for arg in node.args]
        keywords = {kw.arg: self.fold(kw.value) for kw in node.keywords if kw.arg}
        if len(keywords) != len(node.keywords):
            raise self.error(node, f"** arguments are not supported: {ast.unparse(node)}")
        for item in (*args, *keywords.values()):
            if isinstance(item.value.const, JitFunction):
                self._keep(node, item.value.const)
        call = Call(node, callee, args, keywords)
        if isinstance(target, External):
            return self._call_external(call, target.path)
        if isinstance(callee.node, ast.Name) and callee.node.id in BUILTIN_NAMES:
            return self._call_builtin(call, callee.node.id)
        if isinstance(callee.node, ast.Attribute):
            return self._call_method(call, callee.node)
        raise self.error(node, f"cannot determine which function is called: {ast.unparse(node)}")

    def _keep(self, node: ast.AST, function: JitFunction) -> None:
        if self.kept.setdefault(function.name, function) != function:
            raise self.error(node, f"two different functions are called {function.name}")

    def _call_external(self, call: Call, path: str) -> Folded:
        root, _, name = path.rpartition(".")
        if root == "math":
            return self._call_math(call, name)
        if not path.startswith("triton."):
            raise self.error(call.node, f"only functions of triton may be called, not {path}")
        rule = FUNCTIONS.get(name) if root in (TL, "triton") else None
        return rule(call, self) if rule is not None else call.unknown()

    def _call_math(self, call: Call, name: str) -> Folded:
        if call.keywords or not all(arg.value.literal for arg in call.args):
            raise self.error(call.node, f"math.{name} needs constants: {ast.unparse(call.node)}")
        return Folded(
            call.node, constant(getattr(math, name)(*(arg.value.const for arg in call.args)))
        )

    def _call_builtin(self, call: Call, name: str) -> Folded:
        function = _BUILTINS.get(name)
        if function and call.args and all(arg.value.literal for arg in call.args):
            return Folded(call.node, constant(function(*(arg.value.const for arg in call.args))))
        if name == "len" and call.args[0].value.items is not None:
            return Folded(call.node, constant(len(call.args[0].value.items)))
        if name in ("min", "max"):
            return FUNCTIONS[f"{name}imum"](call, self)
        raise self.error(call.node, f"{name} needs constants here: {ast.unparse(call.node)}")

    def _call_method(self, call: Call, method: ast.Attribute) -> Folded:
        operand = Folded(method.value, self.facts.get(method.value, NOTHING))
        if not operand.value.runtime:
            return call.unknown()
        if method.attr == "load" and operand.value.is_descriptor:
            return Folded(call.rebuild(), descriptor_block(operand.value))
        if method.attr == "to":
            return cast(call, self, operand, call.argument(0, "dtype"))
        rule = METHODS.get(method.attr)
        if rule is None:
            return call.unknown()
        # A method call has the same rule as the function that takes the tensor as its first
        # argument. The method call itself is printed unchanged.
        as_function = Call(call.node, call.callee, [operand, *call.args], call.keywords)
        folded = rule(as_function, self)
        return Folded(call.rebuild(), folded.value)


def _equals(value: Value, number: int | bool) -> bool:
    if not value.known or isinstance(value.const, (External, JitFunction, str, float)):
        return False
    if isinstance(number, bool):
        return value.const is number
    return value.const == number and not isinstance(value.const, bool)


def _is_new_axis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_full_slice(node: ast.expr) -> bool:
    return isinstance(node, ast.Slice) and node.lower is node.upper is node.step is None
