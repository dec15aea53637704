"""Evaluates a kernel partially: fills in the constants of the spec and inlines the functions that
the kernel calls.

Expressions that depend only on the spec are computed here and disappear. All other expressions are
printed in the template's order, so every load, store and barrier keeps its place. If something
cannot be translated exactly, EmitError is raised.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tilewright.codegen.emit import values
from tilewright.codegen.emit.control_flow import ControlFlow, assigned_names
from tilewright.codegen.emit.expressions import Scope
from tilewright.codegen.emit.nodes import copy_of, nodes_of
from tilewright.codegen.emit.ranges import INT_RANGES, Range
from tilewright.codegen.emit.rules import Folded
from tilewright.codegen.emit.source import EmitError, JitFunction
from tilewright.codegen.emit.statements import is_constexpr
from tilewright.codegen.emit.tidy import has_side_effects, is_impure_call
from tilewright.codegen.emit.values import Value
from tilewright.codegen.spec import is_integer, is_pointer


class PartialEvaluator(ControlFlow):
    """Evaluates one kernel of a template for one spec."""

    def kernel(self, function: JitFunction) -> tuple[list[str], list[ast.stmt]]:
        """Returns (run-time parameters, body) of the kernel, with the spec's constants filled
        in."""
        self.scope = Scope(function)
        self.used |= {node.id for node in nodes_of(function.node) if isinstance(node, ast.Name)}
        self.used |= {arg.arg for arg in function.node.args.args}
        parameters = self._bind_spec(function)
        self.stack.append(function)
        self._block(function.node.body)
        self.stack.pop()
        return parameters, self.body

    def _bind_spec(self, function: JitFunction) -> list[str]:
        constants, types = dict(self.spec.constants), dict(self.spec.signature)
        names = [arg.arg for arg in _parameters(function)]
        for name in [*constants, *types]:
            if name not in names:
                raise EmitError(f"{function}: the spec has {name!r}, which is not a parameter")
        defaults = _defaults(function)
        for arg in _parameters(function):
            if arg.arg in constants:
                self.scope.bindings[arg.arg] = self._constant(constants[arg.arg])
            elif arg.arg in types:
                if is_constexpr(arg.annotation):
                    raise EmitError(f"{function}: {arg.arg} is constexpr: give it a constant")
                node = ast.Name(arg.arg, ast.Load())
                self.scope.bindings[arg.arg] = Folded(node, self._argument(arg.arg))
                self.scope.renamed[arg.arg] = arg.arg
            elif arg.arg in defaults:
                self.scope.bindings[arg.arg] = self.fold(defaults[arg.arg])
            else:
                raise EmitError(f"{function}: the spec gives no value or type for {arg.arg}")
        expected = [name for name in names if name in types]
        if expected != list(types):
            raise EmitError(f"{function}: signature order: expected {expected}, got {list(types)}")
        return expected

    def _argument(self, name: str) -> Value:
        type_name = dict(self.spec.signature)[name]
        if is_pointer(type_name):
            return Value(dtype=values.as_pointer(type_name), shape=(), runtime=True)
        dtype = values.DTYPES.get(type_name)
        if dtype is None or not is_integer(type_name):
            return Value(dtype=dtype, shape=(), runtime=True)
        low, high = INT_RANGES[dtype]
        for ranged, least, greatest in self.spec.ranges:
            if ranged == name:
                low, high = max(low, least), min(high, greatest)
        known = Range(low, high, 16 if name in self.spec.divisible16 else 1)
        # The parameter keeps its name, even if its promised range has only one value.
        return replace(values.tensor(dtype, (), known), const=values.UNKNOWN)

    def inline(self, function: JitFunction, call: ast.Call) -> Folded:
        """Evaluates the body of a called function in place, with unique names for its variables.
        Returns the function's return value."""
        if function in self.stack:
            raise self.error(call, f"{function} calls itself")
        is_root = call is self.root
        first = len(self.body)
        scope = Scope(function, runtime_depth=0)
        outer = self.scope
        assigned = _assigned(function.node)
        for name, folded, annotation in self._arguments(function, call):
            if folded.value.literal or (_is_simple(folded.node) and name not in assigned):
                scope.bindings[name] = folded
            else:
                self._bind_parameter(scope, name, folded, is_constexpr(annotation))
        self.scope = scope
        self.stack.append(function)
        saved, self.returned = self.returned, None
        self._block(function.node.body)
        result = self.returned or self._constant(None)
        self.returned = saved
        self.stack.pop()
        self.scope = outer
        self._check_order(call, function, self.body[first:], is_root)
        return result

    def _check_order(
        self, call: ast.Call, function: JitFunction, emitted: list[ast.stmt], is_root: bool
    ) -> None:
        """Checks that the statements of an inlined function may be moved before the expression that
        calls it. The move must change neither the result of the statements nor the result of the
        expression. Raises EmitError if the move might change a result."""
        if emitted and self.conditional:
            raise self.error(call, f"{function} has statements: not allowed in {self.conditional}")
        if is_root or not emitted:
            return
        if any(map(has_side_effects, emitted)):
            raise self.error(call, f"{function} writes memory: call it as a statement of its own")
        calls = [n for n in nodes_of(self.root) if isinstance(n, ast.Call)] if self.root else []
        if any(is_impure_call(other) for other in calls if other is not self.root):
            raise self.error(call, f"{function} is called beside a call that writes memory")

    def _arguments(
        self, function: JitFunction, call: ast.Call
    ) -> Iterator[tuple[str, Folded, ast.expr | None]]:
        parameters, defaults = _parameters(function), _defaults(function)
        given = dict(zip((arg.arg for arg in parameters), call.args, strict=False))
        if len(call.args) > len(parameters):
            raise self.error(
                call, f"{function} takes {len(parameters)} arguments, got {len(call.args)}"
            )
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in given:
                raise self.error(
                    call, f"{function}: argument {keyword.arg} is given twice or by **"
                )
            given[keyword.arg] = keyword.value
        unknown = given.keys() - {arg.arg for arg in parameters}
        if unknown:
            raise self.error(call, f"{function} has no parameter {', '.join(sorted(unknown))}")
        for arg in parameters:
            if arg.arg in given:
                yield arg.arg, self.fold(given[arg.arg]), arg.annotation
            elif arg.arg in defaults:
                yield arg.arg, self._default(function, defaults[arg.arg]), arg.annotation
            else:
                raise self.error(call, f"{function}: no value for parameter {arg.arg}")

    def _default(self, function: JitFunction, node: ast.expr) -> Folded:
        outer, self.scope = self.scope, Scope(function)
        folded = self.fold(node)
        self.scope = outer
        return folded

    def _bind_parameter(self, scope: Scope, name: str, folded: Folded, constexpr: bool) -> None:
        """Evaluates an argument once, before the body of the called function."""
        printed = self._fresh(name)
        scope.renamed[name] = printed
        if constexpr and folded.value.weak:
            scope.bindings[name] = self._kept_constexpr(printed, folded)
            return
        self.body.append(ast.Assign([ast.Name(printed, ast.Store())], copy_of(folded.node)))
        value = values.tensor_of(folded.value)
        scope.bindings[name] = Folded(ast.Name(printed, ast.Load()), value)


@lru_cache(maxsize=1024)  # a function is inlined many times, and its tree never changes
def _assigned(function: ast.FunctionDef) -> set[str]:
    return assigned_names(function.body)


def _is_simple(node: ast.expr) -> bool:
    """Whether an argument may be printed several times: a name, a constant, or a tuple of names and
    constants."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(_is_simple, node.elts))
    return isinstance(node, (ast.Name, ast.Constant))


def _parameters(function: JitFunction) -> list[ast.arg]:
    arguments = function.node.args
    if arguments.vararg or arguments.kwarg or arguments.posonlyargs:
        raise EmitError(f"{function}: only plain parameters are supported")
    return [*arguments.args, *arguments.kwonlyargs]


def _defaults(function: JitFunction) -> dict[str, ast.expr]:
    arguments = function.node.args
    positional = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [*zip(positional, arguments.defaults, strict=True)]
    pairs += [
        (arg, default)
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    ]
    return {arg.arg: default for arg, default in pairs}
