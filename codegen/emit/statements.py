"""Evaluates straight-line statements: assignments, assertions, assumptions, returns."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from tilewright.codegen.emit import values
from tilewright.codegen.emit.expressions import Expressions
from tilewright.codegen.emit.nodes import copy_of, nodes_of
from tilewright.codegen.emit.ranges import MIRRORED, Range
from tilewright.codegen.emit.rules import Folded
from tilewright.codegen.emit.source import External
from tilewright.codegen.emit.values import NOTHING, TL, Value, constant, literal


class Statements(Expressions):
    """The part of the evaluator for straight-line statements. It appends each statement that
    remains at run time to `body`."""

    def _block(self, statements: Sequence[ast.stmt]) -> bool:
        """Evaluates statements in order. Returns True if a `return` ended them."""
        for index, statement in enumerate(statements):
            if index == 0 and _is_docstring(statement):
                continue
            if self._statement(statement):
                return True
        return False

    def _statement(self, node: ast.stmt) -> bool:
        rule = getattr(self, f"_do_{type(node).__name__.lower()}", None)
        if rule is None:
            raise self.error(node, f"{type(node).__name__} is not supported in a kernel")
        ended: bool = rule(node)
        return ended

    def _root(self, node: ast.expr) -> Folded:
        """Folds the expression of a statement. Function calls in the expression may put statements
        before it."""
        outer, self.root = self.root, node
        folded = self.fold(node)
        self.root = outer
        return folded

    def _do_pass(self, node: ast.Pass) -> bool:
        return False

    def _do_expr(self, node: ast.Expr) -> bool:
        if isinstance(node.value, ast.Call):
            callee = self.fold(node.value.func).value.const
            if isinstance(callee, External) and callee.path == f"{TL}.static_assert":
                self._require(node.value, node.value.args[0], node.value.args[1:])
                return False
            if isinstance(callee, External) and callee.path == f"{TL}.static_print":
                return False
            if isinstance(callee, External) and callee.path == f"{TL}.assume":
                return self._assume(node.value)
        folded = self._root(node.value)
        if any(isinstance(part, ast.Call) for part in nodes_of(folded.node)):
            self.body.append(ast.Expr(folded.node))
        return False

    def _require(self, node: ast.AST, test: ast.expr, message: Sequence[ast.expr]) -> None:
        condition = self.fold(test).value
        if not condition.known:
            raise self.error(
                node,
                f"the condition cannot be decided when the kernel is emitted: {ast.unparse(test)}",
            )
        if not condition.const:
            detail = f": {ast.unparse(message[0])}" if message else ""
            raise self.error(node, f"static assertion failed: {ast.unparse(test)}{detail}")

    def _assume(self, call: ast.Call) -> bool:
        condition = self._root(call.args[0])
        if not condition.value.known:
            self.body.append(ast.Expr(ast.Call(self.fold(call.func).node, [condition.node], [])))
            self._learn(condition.node, True)
        return False

    def _do_assert(self, node: ast.Assert) -> bool:
        self._require(node, node.test, [node.msg] if node.msg else [])
        return False

    def _do_assign(self, node: ast.Assign) -> bool:
        if len(node.targets) != 1:
            raise self.error(node, "Triton has no chained assignment")
        folded = self._root(node.value)
        self._assign(node.targets[0], folded)
        return False

    def _do_annassign(self, node: ast.AnnAssign) -> bool:
        if node.value is None or not isinstance(node.target, ast.Name):
            raise self.error(node, f"not supported: {ast.unparse(node)}")
        folded = self._root(node.value)
        if not is_constexpr(node.annotation):
            self._assign(node.target, folded)
        elif folded.value.literal:
            self.scope.bindings[node.target.id] = folded
        else:
            printed = self._local(node.target.id)
            self.scope.bindings[node.target.id] = self._kept_constexpr(printed, folded)
        return False

    def _kept_constexpr(self, printed: str, folded: Folded) -> Folded:
        """Prints the assignment of a constexpr whose value only Triton knows, such as a dtype."""
        annotation = literal(External(f"{TL}.constexpr"))
        target = ast.Name(printed, ast.Store())
        self.body.append(ast.AnnAssign(target, annotation, folded.node, simple=1))
        return Folded(ast.Name(printed, ast.Load()), folded.value)

    def _assign(self, target: ast.expr, folded: Folded) -> None:
        if isinstance(target, ast.Name):
            self._assign_name(target.id, folded)
        elif isinstance(target, ast.Tuple):
            self._assign_tuple(target, folded)
        else:
            raise self.error(target, f"only names may be assigned: {ast.unparse(target)}")

    def _assign_name(self, name: str, folded: Folded) -> None:
        value = values.tensor_of(folded.value)
        if value.literal:  # None, a dtype or a string is no tensor: it stays a compile-time value
            self.scope.bindings[name] = folded
            return
        printed = self._local(name)
        if not (isinstance(folded.node, ast.Name) and folded.node.id == printed):
            self.body.append(ast.Assign([ast.Name(printed, ast.Store())], copy_of(folded.node)))
        self.scope.bindings[name] = Folded(ast.Name(printed, ast.Load()), value)

    def _assign_tuple(self, target: ast.Tuple, folded: Folded) -> None:
        names = [item.id for item in target.elts if isinstance(item, ast.Name)]
        if len(names) != len(target.elts):
            raise self.error(target, f"only names may be assigned: {ast.unparse(target)}")
        items = self._items(folded)
        if items is not None and len(items) != len(names):
            raise self.error(target, f"{len(items)} values for {len(names)} names")
        if items is not None and not self._reads_own_targets(names, items):
            for name, item in zip(names, items, strict=True):
                self._assign_name(name, item)
            return
        printed: list[ast.expr] = [ast.Name(self._local(name), ast.Store()) for name in names]
        self.body.append(ast.Assign([ast.Tuple(printed, ast.Store())], folded.node))
        known = folded.value.items or (NOTHING,) * len(names)
        for name, value in zip(names, known, strict=True):
            node = ast.Name(self._local(name), ast.Load())
            self.scope.bindings[name] = Folded(node, values.tensor_of(value))

    def _items(self, folded: Folded) -> list[Folded] | None:
        if isinstance(folded.value.const, tuple):
            return [self._constant(item) for item in folded.value.const]
        if not isinstance(folded.node, (ast.Tuple, ast.List)):
            return None
        return [Folded(item, self.facts.get(item, NOTHING)) for item in folded.node.elts]

    def _reads_own_targets(self, names: list[str], items: list[Folded]) -> bool:
        """Whether a later value of a tuple assignment reads a name that an earlier target
        assigns."""
        earlier: set[str] = set()
        for name, item in zip(names, items, strict=True):
            if earlier & {part.id for part in nodes_of(item.node) if isinstance(part, ast.Name)}:
                return True
            earlier.add(self._local(name))
        return False

    def _do_augassign(self, node: ast.AugAssign) -> bool:
        if not isinstance(node.target, ast.Name):
            raise self.error(node, f"only names may be assigned: {ast.unparse(node)}")
        name = node.target.id
        load = ast.copy_location(ast.Name(name, ast.Load()), node)
        sum_ = ast.copy_location(ast.BinOp(load, node.op, node.value), node)
        folded = self._root(sum_)
        printed = self._local(name)
        shortens = (
            isinstance(folded.node, ast.BinOp)
            and type(folded.node.op) is type(node.op)
            and isinstance(folded.node.left, ast.Name)
            and folded.node.left.id == printed
            and not folded.value.known
        )
        if not shortens:
            self._assign_name(name, folded)
            return False
        assert isinstance(folded.node, ast.BinOp)
        target = ast.Name(printed, ast.Store())
        self.body.append(ast.AugAssign(target, node.op, folded.node.right))
        self.scope.bindings[name] = Folded(ast.Name(printed, ast.Load()), folded.value)
        return False

    def _do_return(self, node: ast.Return) -> bool:
        if len(self.stack) > 1:
            if self.scope.runtime_depth:
                raise self.error(
                    node, f"{self.scope.function}: a helper may only return at its end"
                )
            self.returned = self._constant(None) if node.value is None else self._root(node.value)
            return True
        if node.value is not None:
            raise self.error(node, "a kernel must not return a value")
        if self.scope.runtime_depth:
            self.body.append(ast.Return())
        return True

    def _learn(self, test: ast.expr, truth: bool) -> None:
        """Narrows the ranges of variables, given that a run-time condition holds from here on. If
        `truth` is False, the condition does not hold from here on."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and truth:
            for item in test.values:
                self._learn(item, truth)
        if not isinstance(test, ast.Compare) or type(test.ops[0]) not in values.COMPARE:
            return
        comparison = values.COMPARE[type(test.ops[0])]
        sides = test.left, test.comparators[0]
        one, other = map(self._scalar, sides)
        if comparison not in MIRRORED or values.result_dtype(one, other) is None:
            return
        if one.range is not None and other.range is not None:
            self._narrow(sides[0], one.range.given(comparison, other.range, truth))
            self._narrow(sides[1], other.range.given(MIRRORED[comparison], one.range, truth))

    def _scalar(self, node: ast.expr) -> Value:
        """Returns the facts about a printed scalar. Returns NOTHING for any other expression."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return constant(node.value)
        value = self.facts.get(node, NOTHING)
        return value if value.shape == () else NOTHING

    def _narrow(self, node: ast.expr, known: Range) -> None:
        """Gives a variable this range in all statements that follow."""
        for name, bound in self.scope.bindings.items():
            if isinstance(node, ast.Name) and ast.dump(bound.node) == ast.dump(node):
                narrowed = Folded(bound.node, replace(bound.value, range=known))
                self.scope.bindings[name] = narrowed

    def _local(self, name: str) -> str:
        """Returns the printed name of a local variable of the current scope."""
        renamed = self.scope.renamed
        if name not in renamed:
            renamed[name] = name if len(self.stack) == 1 else self._fresh(name)
            self.used.add(renamed[name])
        return renamed[name]

    def _fresh(self, name: str) -> str:
        number, candidate = 0, name
        while candidate in self.used:
            number += 1
            candidate = f"{name}_{number}"
        self.used.add(candidate)
        return candidate

    def _constant(self, value: object) -> Folded:
        return Folded(literal(value), constant(value))


def is_constexpr(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).split(".")[-1] == "constexpr"


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
