"""Tidies an evaluated kernel in a last pass, so that the output is easy to read. Every rule is
exact.

dead: An assignment without side effects is dropped if no needed statement after it reads its
variable. Loops and branches that become empty are dropped too.

copy: If `x = y` is the first use of x, x and y become one variable in two cases. In the first case,
neither variable is assigned afterwards. In the second case, y is not used afterwards and is first
assigned in the same block.

round trip: If `x = y` is followed by `y = x` in the same block, x and y become one variable. This
requires that y is not used between the two statements, and that x is used only between them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tilewright.codegen.emit.nodes import nodes_of

# Calls that must remain even if nothing uses their result.
_EFFECTS = frozenset(
    {
        "store",
        "scatter",
        "debug_barrier",
        "device_assert",
        "device_print",
        "assume",
        "inline_asm_elementwise",
        "print",
    }
)


def is_impure_call(node: ast.Call) -> bool:
    """Whether a call writes memory, synchronises threads or has another effect, such as
    printing."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    if name in _EFFECTS or "atomic" in name:
        return True
    return any(
        keyword.arg == "volatile"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        for keyword in node.keywords
    )


def has_side_effects(statement: ast.AST) -> bool:
    """Whether a statement does more than assign local variables.

    If a call is a statement of its own, it counts as having an effect, whatever its name is.
    """
    return any(map(_is_effect, nodes_of(statement)))


def _is_effect(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return is_impure_call(node)
    return isinstance(node, (ast.Return, ast.Expr))


def tidied(body: list[ast.stmt], parameters: list[str]) -> list[ast.stmt]:
    """Returns the kernel's statements without dead statements and needless copies. Changes nodes in
    place."""
    body = _Liveness().needed(body, set())[0]
    _Places(body, set(parameters)).remove_copies()
    return _Liveness().needed(body, set())[0]


def _nodes(parts: Iterable[ast.AST]) -> list[ast.AST]:
    return [node for part in parts for node in nodes_of(part)]


def _names(nodes: Iterable[ast.AST]) -> list[ast.Name]:
    return [node for node in nodes if isinstance(node, ast.Name)]


def _parts(statement: ast.stmt) -> tuple[list[ast.AST], list[ast.AST]]:
    """Returns (nodes that are read, nodes that are written) for a statement. For a compound
    statement, only the header counts."""
    match statement:
        case ast.AugAssign(target, _, value):
            return [target, value], [target]
        case ast.Assign([target], value) | ast.AnnAssign(target, _, value):
            return [value] if value else [], [target]
        case ast.For(target, iterator):
            return [iterator], [target]
        case ast.If(test) | ast.While(test):
            return [test], []
    return [statement], []


class _Liveness:
    """Drops assignments that no later statement needs. It walks backwards through the
    statements."""

    def __init__(self) -> None:
        # Maps a statement to (names that the statement reads, names that it writes, whether it has
        # no other effect).
        self._known: dict[ast.stmt, tuple[set[str], set[str], bool]] = {}

    def needed(self, body: Iterable[ast.stmt], live: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Returns (the needed statements, the names that are live before them).

        live: the names that are read after the statements.
        """
        kept = []
        for statement in reversed(list(body)):
            needed, live = self._step(statement, live)
            kept += [needed] if needed is not None else []
        return kept[::-1], live

    def _step(self, statement: ast.stmt, live: set[str]) -> tuple[ast.stmt | None, set[str]]:
        reads, writes, is_pure = self._header(statement)
        if isinstance(statement, ast.If):
            body, before = self.needed(statement.body, live)
            orelse, instead = self.needed(statement.orelse, live)
            if body or orelse:
                test = statement.test if body else ast.UnaryOp(ast.Not(), statement.test)
                kept: ast.stmt = ast.If(test, body or orelse, orelse if body else [])
                return kept, before | instead | reads
            return (None, live) if is_pure else (ast.Expr(statement.test), live | reads)
        if isinstance(statement, (ast.For, ast.While)):
            again = live | (reads if isinstance(statement, ast.While) else set())
            body, before = self.needed(statement.body, again)
            while not before - writes <= again:
                again = again | (before - writes)
                body, before = self.needed(statement.body, again)
            if isinstance(statement, ast.While):
                return ast.While(statement.test, body or [ast.Pass()], []), again
            if body:
                return ast.For(statement.target, statement.iter, body, [], None), again | reads
            return (None, live) if is_pure else (statement, live | reads)
        if isinstance(statement, ast.Return):
            return statement, reads
        if is_pure and not writes & live:
            return None, live
        return statement, (live - writes) | reads

    def _header(self, statement: ast.stmt) -> tuple[set[str], set[str], bool]:
        if statement not in self._known:
            parts, targets = _parts(statement)
            read = _nodes(parts)
            reads, writes = ({node.id for node in _names(of)} for of in (read, _nodes(targets)))
            self._known[statement] = reads, writes, not any(map(_is_effect, read))
        return self._known[statement]


@dataclass(frozen=True)
class _Use:
    """One read or write of a name in a block, by a statement or by the header of a compound
    statement."""

    node: ast.Name
    is_store: bool
    statement: ast.stmt
    block: list[ast.stmt]


def _uses(block: list[ast.stmt]) -> Iterator[_Use]:
    """Yields all uses of names, in the order of the text."""
    for statement in block:
        reads, writes = _parts(statement)
        yield from (_Use(node, False, statement, block) for node in _names(_nodes(reads)))
        yield from (_Use(node, True, statement, block) for node in _names(_nodes(writes)))
        if isinstance(statement, (ast.For, ast.While, ast.If)):
            yield from _uses(statement.body)
            yield from _uses(statement.orelse)


class _Places:
    """The places where names are used, numbered in the order of the text.

    A copy `x = y` is identified by the place where it reads y. The place where it writes x is the
    next one.
    """

    def __init__(self, body: list[ast.stmt], fixed: set[str]) -> None:
        self.uses = list(_uses(body))
        self.fixed = fixed  # parameters, which are never assigned
        self.places: dict[str, list[int]] = {}
        for place, use in enumerate(self.uses):
            self.places.setdefault(use.node.id, []).append(place)
        self.copies = [
            place
            for place, use in enumerate(self.uses)
            if not use.is_store and self._is_copy(use.statement)
        ]

    def _is_copy(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Assign([ast.Name(target)], ast.Name()):
                return target not in self.fixed
        return False

    def remove_copies(self) -> None:
        """Applies the rules "copy" and "round trip" until neither rule finds anything more."""
        while (copy := next(filter(self._is_needless, self.copies), None)) is not None:
            source, target = self._sides(copy)
            plain = min(source, target, key=_plainness)
            self._merge((copy,), source if source in self.fixed else plain)
        # Round trips come last. If one were merged first, a variable could get the name of another
        # variable.
        while (trip := next(self._round_trips(), None)) is not None:
            self._merge(trip, self._sides(trip[0])[0])

    def _sides(self, copy: int) -> tuple[str, str]:
        return self.uses[copy].node.id, self.uses[copy + 1].node.id

    def _is_needless(self, copy: int) -> bool:
        source, target = (self.places[name] for name in self._sides(copy))
        if target[0] != copy + 1:
            return False
        later = (place for places in (source, target[1:]) for place in places if place > copy)
        if not any(self.uses[place].is_store for place in later):
            return True
        first = self.uses[source[0]]
        begins = first.is_store and first.block is self.uses[copy].block and source[0] < copy
        return begins and source[-1] == copy and self._sides(copy)[0] not in self.fixed

    def _round_trips(self) -> Iterator[tuple[int, int]]:
        """Yields the pairs (copy, copy back) that the rule "round trip" removes."""
        for there in self.copies:
            for back in self.copies:
                beside = self.uses[there].block is self.uses[back].block
                if back < there or not beside or self._sides(back) != self._sides(there)[::-1]:
                    continue
                source, target = (self.places[name] for name in self._sides(there))
                between = any(there < place < back + 1 for place in source)
                if not between and there < target[0] and target[-1] <= back:
                    yield there, back

    def _merge(self, copies: tuple[int, ...], keep: str) -> None:
        """Removes copies from their blocks, and gives both variables the name `keep`."""
        removed = {self.uses[copy].statement for copy in copies}
        block = self.uses[copies[0]].block
        block[:] = [statement for statement in block if statement not in removed]
        self.copies = [copy for copy in self.copies if copy not in copies]
        places = sorted(place for name in self._sides(copies[0]) for place in self.places.pop(name))
        self.places[keep] = [p for p in places if self.uses[p].statement not in removed]
        for place in self.places[keep]:
            self.uses[place].node.id = keep


def _plainness(name: str) -> tuple[bool, int, str]:
    """Returns a sort key: names without a number from renaming come first, then short names."""
    return re.search(r"_\d+$", name) is not None, len(name), name
