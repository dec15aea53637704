"""Evaluates branches and loops. Branches and loops that can be decided when the kernel is emitted
disappear. All others remain in the emitted source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeGuard

from tilewright.codegen.emit import values
from tilewright.codegen.emit.nodes import copy_of, nodes_of
from tilewright.codegen.emit.ranges import loop_range
from tilewright.codegen.emit.rules import Folded
from tilewright.codegen.emit.source import External
from tilewright.codegen.emit.statements import Statements, is_constexpr
from tilewright.codegen.emit.values import TL, Value

# A tl.static_range is unrolled if the result has at most this many statements. If not, it remains a
# loop.
UNROLL_STATEMENTS = 256

# The default values of the options of tl.range. An option with its default value is not printed.
_IDLE_LOOP_OPTIONS = {
    "num_stages": (None,),
    "loop_unroll_factor": (None,),
    "flatten": (False,),
    "warp_specialize": (False,),
    "disallow_acc_multi_buffer": (False,),
}


class ControlFlow(Statements):
    """The part of the evaluator for `if`, `for` and `while`."""

    def _do_if(self, node: ast.If) -> bool:
        test = self._root(node.test)
        if test.value.known:
            return self._block(node.body if test.value.const else node.orelse)
        names = assigned_names([*node.body, *node.orelse])
        self._check_variables(node, names)
        before = dict(self.scope.bindings)
        ended_yes, body, yes = self._branch(node.body, test, True)
        self.scope.bindings = dict(before)
        ended_no, orelse, no = self._branch(node.orelse, test, False)
        self.body.append(ast.If(test.node, body, orelse))
        if ended_yes and ended_no:
            return True
        if ended_yes or ended_no:
            self.scope.bindings = no if ended_yes else yes
        else:
            self.scope.bindings = _joined(yes, no)
        return False

    def _branch(
        self, statements: Sequence[ast.stmt], test: Folded, truth: bool
    ) -> tuple[bool, list[ast.stmt], dict[str, Folded]]:
        with self._runtime() as body:
            self._learn(test.node, truth)
            ended = self._block(statements)
        return ended, body, self.scope.bindings

    @contextmanager
    def _runtime(self) -> Iterator[list[ast.stmt]]:
        """Collects the statements of the body of a run-time branch or loop."""
        outer, self.body = self.body, []
        self.scope.runtime_depth += 1
        try:
            yield self.body
        finally:
            self.scope.runtime_depth -= 1
            self.body = outer

    @contextmanager
    def _loop(self, names: set[str]) -> Iterator[list[ast.stmt]]:
        """Collects the body of a loop that assigns `names`. At the end of the loop, the facts that
        hold only inside it are forgotten."""
        self._forget(names)
        before = dict(self.scope.bindings)
        with self._runtime() as body:
            yield body
        self.scope.bindings |= before
        self._forget(names)

    def _check_variables(self, node: ast.stmt, names: set[str]) -> None:
        """Checks the names that a run-time branch or loop assigns. Before the branch or loop, each
        name must be unbound or a printed variable. Raises EmitError if a name has a compile-time
        value."""
        for name in sorted(names):
            bound = self.scope.bindings.get(name)
            if bound is not None and not (
                isinstance(bound.node, ast.Name) and bound.node.id == self.scope.renamed.get(name)
            ):
                raise self.error(
                    node, f"{name} is a compile-time value and is assigned under run-time control"
                )

    def _forget(self, names: set[str]) -> None:
        for name in names & self.scope.bindings.keys():
            bound = self.scope.bindings[name]
            self.scope.bindings[name] = Folded(bound.node, type_only(bound.value))

    def _do_while(self, node: ast.While) -> bool:
        names = assigned_names(node.body)
        self._check_variables(node, names)
        if node.orelse:
            raise self.error(node, "while ... else is not supported")
        with self._loop(names) as body:
            outer, self.conditional = self.conditional, "the condition of a while loop"
            test = self._root(node.test)
            self.conditional = outer
            if test.value.literal and test.value.const:
                raise self.error(node, "a while loop that never ends")
            if not (test.value.known and not test.value.const):
                self._learn(test.node, True)
                self._block(node.body)
        if body:
            self.body.append(ast.While(test.node, body, []))
        return False

    def _do_for(self, node: ast.For) -> bool:
        if node.orelse or not isinstance(node.target, ast.Name):
            raise self.error(node, "a for loop takes one name and no else")
        if not isinstance(node.iter, ast.Call):
            raise self.error(
                node, f"loops run over range or tl.range, not {ast.unparse(node.iter)}"
            )
        callee = self.fold(node.iter.func)
        path = callee.value.const.path if isinstance(callee.value.const, External) else ""
        is_range = isinstance(callee.node, ast.Name) and callee.node.id == "range"
        if not is_range and path not in (f"{TL}.range", f"{TL}.static_range"):
            raise self.error(
                node, f"loops run over range or tl.range, not {ast.unparse(node.iter)}"
            )
        bounds, options = self._range(node.iter)
        if path == f"{TL}.static_range":
            return self._static_loop(node, callee, bounds)
        return self._runtime_loop(node, callee, bounds, options)

    def _range(self, call: ast.Call) -> tuple[list[Folded], dict[str, Folded]]:
        """Returns (start, stop, step) and the options of a range."""
        outer, self.root = self.root, call
        args = [self.fold(arg) for arg in call.args]
        options = {kw.arg: self.fold(kw.value) for kw in call.keywords if kw.arg}
        self.root = outer
        step = options.pop("step", None)
        if len(args) == 1:
            args.insert(0, self._constant(0))
        if len(args) == 2:
            args.append(step or self._constant(1))
        if len(args) != 3:
            raise self.error(call, f"range takes one to three numbers: {ast.unparse(call)}")
        return args, options

    def _static_loop(self, node: ast.For, callee: Folded, bounds: list[Folded]) -> bool:
        if not all(bound.value.literal for bound in bounds):
            raise self.error(node, f"static_range needs constants: {ast.unparse(node.iter)}")
        assert isinstance(node.target, ast.Name)
        steps = range(*(bound.value.const for bound in bounds))
        size = sum(isinstance(part, ast.stmt) for part in nodes_of(node)) - 1
        if len(steps) * size > UNROLL_STATEMENTS:
            return self._runtime_loop(node, callee, bounds, {}, constexpr=True)
        for step in steps:
            self.scope.bindings[node.target.id] = self._constant(step)
            if self._block(node.body):
                raise self.error(node, "return inside a loop is not supported")
        self.scope.bindings.pop(node.target.id, None)
        return False

    def _runtime_loop(
        self,
        node: ast.For,
        callee: Folded,
        bounds: list[Folded],
        options: dict[str, Folded],
        constexpr: bool = False,
    ) -> bool:
        names = assigned_names(node.body)
        self._check_variables(node, names)
        start, _, step = bounds
        known = [bound.value.const for bound in bounds if bound.value.known]
        if len(known) == 3 and not range(*known):
            return False
        assert isinstance(node.target, ast.Name)
        variable = node.target.id
        printed = self._local(variable)
        with self._loop(names) as body:
            value = Value(weak=True, shape=()) if constexpr else self._loop_value(bounds)
            self.scope.bindings[variable] = Folded(ast.Name(printed, ast.Load()), value)
            if variable in names:
                self._forget({variable})
            if self._block(node.body):
                raise self.error(node, "return inside a loop is not supported")
        self.scope.bindings.pop(variable)
        args = [copy_of(bound.node) for bound in bounds]
        if step.value.literal and step.value.const == 1:
            args.pop()
        if len(args) == 2 and start.value.literal and start.value.const == 0:
            args.pop(0)
        keywords = [
            ast.keyword(name, item.node)
            for name, item in options.items()
            if not (item.value.literal and item.value.const in _IDLE_LOOP_OPTIONS.get(name, ()))
        ]
        iterator = ast.Call(callee.node, args, keywords)
        target = ast.Name(printed, ast.Store())
        self.body.append(ast.For(target, iterator, body or [ast.Pass()], [], None))
        return False

    def _loop_value(self, bounds: list[Folded]) -> Value:
        dtypes = {bound.value.dtype for bound in bounds if not bound.value.weak}
        if not dtypes <= {"int32", "int64"}:
            return Value(shape=(), runtime=True)
        dtype = "int64" if "int64" in dtypes else "int32"
        start, stop, step = (bound.value.range for bound in bounds)
        known = None
        if start is not None and stop is not None and step is not None and step.is_constant:
            known = loop_range(start, stop, step.low) if step.low > 0 else None
        return values.tensor(dtype, (), known)


def type_only(value: Value) -> Value:
    if value.items is not None:
        return Value(items=tuple(map(type_only, value.items)))
    return replace(values.tensor(value.dtype, value.shape), runtime=value.runtime)


def _joined(yes: dict[str, Folded], no: dict[str, Folded]) -> dict[str, Folded]:
    """Returns the bindings that hold after a branch, whichever of its two sides ran."""
    joined = {}
    for name in sorted(yes.keys() | no.keys()):
        one, other = yes.get(name), no.get(name)
        if one is None or other is None:
            survivor = one or other
            if survivor is not None and isinstance(survivor.node, ast.Name):
                joined[name] = Folded(survivor.node, type_only(survivor.value))
        elif one is other:
            joined[name] = one
        elif ast.dump(one.node) != ast.dump(other.node):
            continue  # reading a name with two compile-time values is an error
        elif one.value.literal or one.value == other.value:
            joined[name] = one
        else:
            joined[name] = Folded(one.node, _either(one.value, other.value))
    return joined


def _either(one: Value, other: Value) -> Value:
    if one.dtype != other.dtype or one.shape != other.shape:
        return Value(runtime=one.runtime and other.runtime)
    if one.range is None or other.range is None:
        return type_only(one)
    return values.tensor(one.dtype, one.shape, one.range.joined(other.range))


def assigned_names(statements: Sequence[ast.stmt]) -> set[str]:
    """Returns the run-time variables that the statements store to."""
    parts = [part for statement in statements for part in nodes_of(statement)]
    names = {p.id for p in parts if isinstance(p, ast.Name) and isinstance(p.ctx, ast.Store)}
    return names - {ast.unparse(part.target) for part in parts if _binds_constant(part)}


def _binds_constant(node: ast.AST) -> TypeGuard[ast.AnnAssign | ast.For]:
    if isinstance(node, ast.For):
        return "static_range" in ast.unparse(node.iter)
    return isinstance(node, ast.AnnAssign) and is_constexpr(node.annotation)
