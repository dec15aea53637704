"""Removal of the `x = y` statements that inlining leaves behind, so that the output reads well.

Two rules, both about plain local names, both exact:

    alias   x and y are each assigned once (or y is a parameter), y before x: they are one value.
    merge   y is not used after `x = y`, x not before it, and y begins beside it: they are one
            variable.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class _Use:
    """One read or write of a name by a simple statement or a compound one's header."""

    node: ast.Name
    is_store: bool
    statement: ast.stmt

    @property
    def name(self) -> str:
        return self.node.id


@dataclass(frozen=True)
class _Copy:
    """`target = source`, standing at block[index]."""

    target: str
    source: str
    block: list[ast.stmt]
    index: int


def remove_copies(body: list[ast.stmt], parameters: list[str]) -> list[ast.stmt]:
    """The same statements without needless copies; the nodes are changed in place."""
    fixed = set(parameters)
    uses = list(_uses(body))
    while True:
        needless = next((copy for copy in _copies(body) if _is_needless(uses, copy, fixed)), None)
        if needless is None:
            return body
        uses = _remove(uses, needless, fixed)


def _is_needless(uses: list[_Use], copy: _Copy, parameters: set[str]) -> bool:
    if copy.target in parameters:
        return False
    return _is_alias(uses, copy, parameters) or _is_merge(uses, copy, parameters)


def _remove(uses: list[_Use], copy: _Copy, parameters: set[str]) -> list[_Use]:
    """Take the copy out of its block, one name for both; gives the uses that are left."""
    keep, drop = sorted((copy.target, copy.source), key=_plainness)
    if copy.source in parameters:
        keep, drop = copy.source, copy.target
    removed = copy.block.pop(copy.index)
    left = [use for use in uses if use.statement is not removed]
    for use in left:
        if use.name == drop:
            use.node.id = keep
    return left


def _plainness(name: str) -> tuple[bool, int, str]:
    """Sorts names without the number of a renaming first, then short ones."""
    return re.search(r"_\d+$", name) is not None, len(name), name


def _is_alias(uses: list[_Use], copy: _Copy, parameters: set[str]) -> bool:
    stores = [use for use in uses if use.is_store]
    targets = [use for use in stores if use.name == copy.target]
    sources = [use for use in stores if use.name == copy.source]
    if len(targets) != 1 or len(sources) != (0 if copy.source in parameters else 1):
        return False
    if not sources:
        return True
    before = uses[: _position(uses, copy)]
    if sources[0] not in before:
        return False
    # A copy inside a branch may keep the value of an earlier round of a loop around both.
    later = _inside(copy.block[copy.index :])
    beside = any(sources[0].statement is statement for statement in copy.block)
    return beside or all(
        id(use.statement) in later for use in uses if use.name == copy.target and not use.is_store
    )


def _is_merge(uses: list[_Use], copy: _Copy, parameters: set[str]) -> bool:
    if copy.source in parameters:
        return False
    place = _position(uses, copy)
    before, after = uses[:place], uses[place + 2 :]
    if any(use.name == copy.source for use in after):
        return False
    if any(use.name == copy.target for use in before):
        return False
    first = next((use for use in before if use.name == copy.source), None)
    if first is None or not first.is_store:
        return False
    return any(first.statement is statement for statement in copy.block[: copy.index])


def _position(uses: list[_Use], copy: _Copy) -> int:
    """Where the copy's read stands in the uses; its write is the next one."""
    statement = copy.block[copy.index]
    return next(i for i, use in enumerate(uses) if use.statement is statement)


def _inside(statements: list[ast.stmt]) -> set[int]:
    return {
        id(node)
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.stmt)
    }


def _copies(body: list[ast.stmt]) -> Iterator[_Copy]:
    for index, statement in enumerate(body):
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Name):
                yield _Copy(target.id, value.id, body, index)
        for inner in _bodies(statement):
            yield from _copies(inner)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, (ast.For, ast.While, ast.If)):
        yield statement.body
        yield statement.orelse


def _uses(body: list[ast.stmt]) -> Iterator[_Use]:
    """All uses of names, in the order in which one pass over the text meets them."""
    for statement in body:
        if isinstance(statement, ast.AugAssign):
            yield from _reads(statement.target, statement)
            yield from _reads(statement.value, statement)
            yield from _writes(statement.target, statement)
        elif isinstance(statement, ast.Assign):
            yield from _reads(statement.value, statement)
            for target in statement.targets:
                yield from _writes(target, statement)
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                yield from _reads(statement.value, statement)
            yield from _writes(statement.target, statement)
        elif isinstance(statement, ast.For):
            yield from _reads(statement.iter, statement)
            yield from _writes(statement.target, statement)
        elif isinstance(statement, (ast.If, ast.While)):
            yield from _reads(statement.test, statement)
        else:
            yield from _reads(statement, statement)
        for inner in _bodies(statement):
            yield from _uses(inner)


def _reads(node: ast.AST, statement: ast.stmt) -> Iterator[_Use]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield _Use(part, False, statement)


def _writes(node: ast.AST, statement: ast.stmt) -> Iterator[_Use]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield _Use(part, True, statement)
