"""The last pass over an evaluated kernel, so that the output reads well. Every rule is exact.

dead        nothing reads the name of an assignment without side effects, or nothing does
            before the same block assigns it again: the assignment goes.
alias       `x = y`, each assigned once (or y a parameter), y before x: they are one value.
merge       y is not used after `x = y`, x not before it, and y begins in the same block: they
            are one variable.
round trip  `x = y` and, later in the same block, `y = x`: no statement between uses y, and none
            elsewhere x. They are one variable.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Calls that must stay even where nothing uses their result.
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
    """Whether a call writes memory, synchronises or talks to the outside."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    if name in _EFFECTS or "atomic" in name:
        return True
    return any(
        keyword.arg == "volatile"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        for keyword in node.keywords
    )


def has_side_effects(statement: ast.AST) -> bool:
    """Whether a statement does more than assign local names.

    A call that stands alone is there for its effect, whatever it is called.
    """
    return _calls_impure(statement) or any(
        isinstance(node, (ast.Return, ast.Expr)) for node in ast.walk(statement)
    )


def _calls_impure(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) and is_impure_call(part) for part in ast.walk(node))


def tidied(body: list[ast.stmt], parameters: list[str]) -> list[ast.stmt]:
    """The kernel's statements without dead ones and needless copies; nodes change in place."""
    body = _without_dead(body)
    _remove_copies(body, set(parameters))
    return _without_dead(body)


@dataclass(frozen=True)
class _Use:
    """One read or write of a name by a simple statement or a compound one's header."""

    node: ast.Name
    is_store: bool
    statement: ast.stmt

    @property
    def name(self) -> str:
        return self.node.id


def _uses(body: Iterable[ast.stmt]) -> Iterator[_Use]:
    """All uses of names, in the order in which one pass over the text meets them."""
    for statement in body:
        reads, writes = _parts(statement)
        yield from (_Use(node, False, statement) for node in _names(reads))
        yield from (_Use(node, True, statement) for node in _names(writes))
        for inner in _bodies(statement):
            yield from _uses(inner)


def _names(parts: Iterable[ast.AST]) -> Iterator[ast.Name]:
    return (node for part in parts for node in ast.walk(part) if isinstance(node, ast.Name))


def _parts(statement: ast.stmt) -> tuple[list[ast.AST], list[ast.AST]]:
    """What a statement, or a compound one's header, reads and what it writes."""
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


def _bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, (ast.For, ast.While, ast.If)):
        return [statement.body, statement.orelse]
    return []


def _without_dead(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements without dead assignments and the loops and branches that this empties."""
    while True:
        live = {use.name for use in _uses(body) if not use.is_store and not _only_updates(use)}
        kept = _without_overwritten(_without_unread(body, live))
        if _count(kept) == _count(body):
            return kept
        body = kept


def _count(body: Sequence[ast.stmt]) -> int:
    return sum(1 + sum(map(_count, _bodies(statement))) for statement in body)


def _only_updates(use: _Use) -> bool:
    """Whether a name is read by a pure statement that assigns this very name."""
    return use.name == _target(use.statement) and not has_side_effects(use.statement)


def _target(statement: ast.stmt) -> str | None:
    """The one name that `x = ...` or `x += ...` assigns."""
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign):
        target = statement.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def _without_unread(body: Iterable[ast.stmt], live: set[str]) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = {node.id for node in _names(_parts(statement)[1])}
            kept += [statement] if targets & live or has_side_effects(statement) else []
        elif (pruned := _pruned(statement, live)) is not None:
            kept.append(pruned)
    return kept


def _pruned(statement: ast.stmt, live: set[str]) -> ast.stmt | None:
    """A loop or branch without what its bodies do not need; None where nothing is left."""
    if isinstance(statement, (ast.For, ast.While)):
        body = _without_unread([s for s in statement.body if not isinstance(s, ast.Pass)], live)
        if isinstance(statement, ast.While):
            return ast.While(statement.test, body or [ast.Pass()], [])
        if body:
            return ast.For(statement.target, statement.iter, body, [], None)
        return statement if _calls_impure(statement.iter) else None
    if not isinstance(statement, ast.If):
        return statement
    body, orelse = _without_unread(statement.body, live), _without_unread(statement.orelse, live)
    if body:
        return ast.If(statement.test, body, orelse)
    if orelse:
        return ast.If(ast.UnaryOp(ast.Not(), statement.test), orelse, [])
    return ast.Expr(statement.test) if _calls_impure(statement.test) else None


def _without_overwritten(body: list[ast.stmt]) -> list[ast.stmt]:
    """Drop assignments whose value is overwritten in the same block before anything reads it."""
    kept: list[ast.stmt] = []
    overwritten: set[str] = set()  # below the statement at hand
    for statement in reversed(body):
        for inner in _bodies(statement):
            inner[:] = _without_overwritten(inner)
        assigns = isinstance(statement, ast.Assign)
        if assigns and _target(statement) in overwritten and not has_side_effects(statement):
            continue
        uses = list(_uses([statement]))
        if assigns:
            overwritten |= {use.name for use in uses if use.is_store}
        overwritten -= {use.name for use in uses if not use.is_store}
        kept.append(statement)
    return kept[::-1]


@dataclass(frozen=True)
class _Copy:
    """`target = source`, standing at block[index]."""

    target: str
    source: str
    block: list[ast.stmt]
    index: int

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.index]


def _remove_copies(body: list[ast.stmt], fixed: set[str]) -> None:
    """Apply the three rules about copies until none finds more; `fixed` names keep their value."""
    uses = list(_uses(body))
    while copy := next((c for c in _copies(body, fixed) if _is_needless(uses, c, fixed)), None):
        plain = min(copy.target, copy.source, key=_plainness)
        uses = _merge(uses, [copy], copy.source if copy.source in fixed else plain)
    # Last: an alias with what is left of a round trip would take the name of another thing.
    while trip := next(_round_trips(uses, list(_copies(body, fixed))), None):
        uses = _merge(uses, trip, trip[0].source)


def _is_needless(uses: list[_Use], copy: _Copy, fixed: set[str]) -> bool:
    return _is_alias(uses, copy, fixed) or _is_merge(uses, copy, fixed)


def _merge(uses: list[_Use], copies: Sequence[_Copy], keep: str) -> list[_Use]:
    """Take copies out of their block, one name for both sides; gives the uses that are left."""
    names = {copies[0].target, copies[0].source}
    removed = {id(copy.statement) for copy in copies}
    copies[0].block[:] = [s for s in copies[0].block if id(s) not in removed]
    left = [use for use in uses if id(use.statement) not in removed]
    for use in left:
        if use.name in names:
            use.node.id = keep
    return left


def _plainness(name: str) -> tuple[bool, int, str]:
    """Sorts names without the number of a renaming first, then short ones."""
    return re.search(r"_\d+$", name) is not None, len(name), name


def _copies(body: list[ast.stmt], fixed: set[str]) -> Iterator[_Copy]:
    for index, statement in enumerate(body):
        if isinstance(statement, ast.Assign):
            name, value = _target(statement), statement.value
            if name is not None and name not in fixed and isinstance(value, ast.Name):
                yield _Copy(name, value.id, body, index)
        for inner in _bodies(statement):
            yield from _copies(inner, fixed)


def _is_alias(uses: list[_Use], copy: _Copy, fixed: set[str]) -> bool:
    stores = [use for use in uses if use.is_store]
    targets = [use for use in stores if use.name == copy.target]
    sources = [use for use in stores if use.name == copy.source]
    if len(targets) != 1 or len(sources) != (0 if copy.source in fixed else 1):
        return False
    if not sources:
        return True
    if all(use is not sources[0] for use in uses[: _position(uses, copy)]):
        return False
    if _is_beside(sources[0], copy):
        return True
    # A copy inside a branch may keep the value of an earlier round of a loop around both.
    later = {id(use.statement) for use in _uses(copy.block[copy.index :])}
    reads = [use for use in uses if use.name == copy.target and not use.is_store]
    return all(id(use.statement) in later for use in reads)


def _is_merge(uses: list[_Use], copy: _Copy, fixed: set[str]) -> bool:
    if copy.source in fixed:
        return False
    place = _position(uses, copy)
    before, after = uses[:place], uses[place + 2 :]
    if any(use.name == copy.source for use in after):
        return False
    if any(use.name == copy.target for use in before):
        return False
    first = next((use for use in before if use.name == copy.source), None)
    return first is not None and first.is_store and _is_beside(first, copy)


def _round_trips(uses: list[_Use], copies: list[_Copy]) -> Iterator[tuple[_Copy, _Copy]]:
    """(copy, copy back) that the rule of this name takes away."""
    for there in copies:
        for back in copies:
            if (back.target, back.source) != (there.source, there.target):
                continue
            if back.block is not there.block or back.index < there.index:
                continue
            first, last = _position(uses, there), _position(uses, back)
            between, outside = uses[first + 2 : last], uses[:first] + uses[last + 2 :]
            if all(use.name != there.source for use in between) and all(
                use.name != there.target for use in outside
            ):
                yield there, back


def _position(uses: list[_Use], copy: _Copy) -> int:
    """Where the copy's read stands in the uses; its write is the next one."""
    return next(i for i, use in enumerate(uses) if use.statement is copy.statement)


def _is_beside(use: _Use, copy: _Copy) -> bool:
    """Whether a use is in an earlier statement of the copy's own block, not within a compound."""
    return any(use.statement is statement for statement in copy.block[: copy.index])
