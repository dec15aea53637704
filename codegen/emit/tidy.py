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

from tilewright.codegen.emit.nodes import nodes_of

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
        isinstance(node, (ast.Return, ast.Expr)) for node in nodes_of(statement)
    )


def _calls_impure(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) and is_impure_call(part) for part in nodes_of(node))


def tidied(body: list[ast.stmt], parameters: list[str]) -> list[ast.stmt]:
    """The kernel's statements without dead ones and needless copies; nodes change in place."""
    known = _Known()
    body = _without_dead(body, known)
    _remove_copies(body, set(parameters), known)
    return _without_dead(body, known)


@dataclass(frozen=True)
class _Use:
    """One read or write of a name by a simple statement or a compound one's header."""

    node: ast.Name
    is_store: bool
    statement: ast.stmt


class _Known:
    """What statements use and do, found once for each: names are changed here, statements not."""

    def __init__(self) -> None:
        self._own: dict[ast.stmt, list[_Use]] = {}
        self._effects: dict[ast.stmt, bool] = {}

    def uses(self, body: Iterable[ast.stmt]) -> Iterator[_Use]:
        """All uses of names, in the order in which one pass over the text meets them."""
        for statement in body:
            yield from self.own_uses(statement)
            for inner in _bodies(statement):
                yield from self.uses(inner)

    def own_uses(self, statement: ast.stmt) -> list[_Use]:
        """Those of a simple statement or of a compound one's header."""
        if statement not in self._own:
            reads, writes = _parts(statement)
            own = [_Use(node, False, statement) for node in _names(reads)]
            own += [_Use(node, True, statement) for node in _names(writes)]
            self._own[statement] = own
        return self._own[statement]

    def has_side_effects(self, statement: ast.stmt) -> bool:
        """Of a simple statement."""
        if statement not in self._effects:
            self._effects[statement] = has_side_effects(statement)
        return self._effects[statement]


def _names(parts: Iterable[ast.AST]) -> Iterator[ast.Name]:
    return (node for part in parts for node in nodes_of(part) if isinstance(node, ast.Name))


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


def _without_dead(body: list[ast.stmt], known: _Known) -> list[ast.stmt]:
    """The statements without dead assignments and the loops and branches that this empties."""
    while True:
        reads = (use for use in known.uses(body) if not use.is_store)
        live = {use.node.id for use in reads if not _only_updates(use, known)}
        kept = _without_overwritten(_without_unread(body, live, known), known)
        if _count(kept) == _count(body):
            return kept
        body = kept


def _count(body: Sequence[ast.stmt]) -> int:
    return sum(1 + sum(map(_count, _bodies(statement))) for statement in body)


def _only_updates(use: _Use, known: _Known) -> bool:
    """Whether a name is read by a pure statement that assigns this very name."""
    return use.node.id == _target(use.statement) and not known.has_side_effects(use.statement)


def _target(statement: ast.stmt) -> str | None:
    """The one name that `x = ...` or `x += ...` assigns."""
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign):
        target = statement.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def _without_unread(body: Iterable[ast.stmt], live: set[str], known: _Known) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            stores = (use for use in known.own_uses(statement) if use.is_store)
            needed = any(use.node.id in live for use in stores)
            kept += [statement] if needed or known.has_side_effects(statement) else []
        elif (pruned := _pruned(statement, live, known)) is not None:
            kept.append(pruned)
    return kept


def _pruned(statement: ast.stmt, live: set[str], known: _Known) -> ast.stmt | None:
    """A loop or branch without what its bodies do not need; None where nothing is left."""
    if isinstance(statement, (ast.For, ast.While)):
        filled = [s for s in statement.body if not isinstance(s, ast.Pass)]
        body = _without_unread(filled, live, known)
        if isinstance(statement, ast.While):
            return ast.While(statement.test, body or [ast.Pass()], [])
        if body:
            return ast.For(statement.target, statement.iter, body, [], None)
        return statement if _calls_impure(statement.iter) else None
    if not isinstance(statement, ast.If):
        return statement
    body = _without_unread(statement.body, live, known)
    orelse = _without_unread(statement.orelse, live, known)
    if body:
        return ast.If(statement.test, body, orelse)
    if orelse:
        return ast.If(ast.UnaryOp(ast.Not(), statement.test), orelse, [])
    return ast.Expr(statement.test) if _calls_impure(statement.test) else None


def _without_overwritten(body: list[ast.stmt], known: _Known) -> list[ast.stmt]:
    """Drop assignments whose value is overwritten in the same block before anything reads it."""
    kept: list[ast.stmt] = []
    overwritten: set[str] = set()  # below the statement at hand
    for statement in reversed(body):
        for inner in _bodies(statement):
            inner[:] = _without_overwritten(inner, known)
        assigns = isinstance(statement, ast.Assign)
        if assigns and _target(statement) in overwritten and not known.has_side_effects(statement):
            continue
        if assigns:
            stores = (use for use in known.own_uses(statement) if use.is_store)
            overwritten.update(use.node.id for use in stores)
        if overwritten:
            reads = (use for use in known.uses([statement]) if not use.is_store)
            overwritten.difference_update(use.node.id for use in reads)
        kept.append(statement)
    return kept[::-1]


@dataclass(frozen=True)
class _Copy:
    """`target = source` in a block; their names change."""

    statement: ast.stmt
    to: ast.Name
    of: ast.Name
    block: list[ast.stmt]

    @property
    def target(self) -> str:
        return self.to.id

    @property
    def source(self) -> str:
        return self.of.id


class _Index:
    """Where names are used, as numbers that grow with the order of the text."""

    def __init__(self, body: list[ast.stmt], known: _Known) -> None:
        self.uses = list(known.uses(body))
        self.places: dict[str, list[int]] = {}
        # A statement's first use; a copy's read, which its write follows.
        self.first: dict[ast.stmt, int] = {}
        self.blocks = {s: block for block in _blocks(body) for s in block}
        for place, use in enumerate(self.uses):
            self.places.setdefault(use.node.id, []).append(place)
            self.first.setdefault(use.statement, place)

    def of(self, name: str, stores: bool | None = None) -> list[int]:
        """All places of a name; only its stores or its reads, where asked for."""
        places = self.places.get(name, [])
        return [p for p in places if stores is None or self.uses[p].is_store == stores]

    def is_beside(self, place: int, copy: _Copy) -> bool:
        """Whether a use is in an earlier statement of the copy's own block, not within a
        compound."""
        statement = self.uses[place].statement
        earlier = self.first[statement] < self.first[copy.statement]
        return earlier and self.blocks[statement] is copy.block

    def merge(self, copies: Sequence[_Copy], keep: str) -> None:
        """Take copies out of their block, one name for both sides."""
        removed = {copy.statement for copy in copies}
        copies[0].block[:] = [s for s in copies[0].block if s not in removed]
        names = {copies[0].target, copies[0].source}
        places = sorted(p for n in names for p in self.places.pop(n))
        self.places[keep] = [p for p in places if self.uses[p].statement not in removed]
        for place in self.places[keep]:
            self.uses[place].node.id = keep


def _blocks(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    yield body
    for statement in body:
        for inner in _bodies(statement):
            yield from _blocks(inner)


def _remove_copies(body: list[ast.stmt], fixed: set[str], known: _Known) -> None:
    """Apply the three rules about copies until none finds more; `fixed` names keep their value."""
    index, copies = _Index(body, known), list(_copies(body, fixed))
    while copy := next((c for c in copies if _is_needless(index, c, fixed, known)), None):
        plain = min(copy.target, copy.source, key=_plainness)
        copies.remove(copy)
        index.merge([copy], copy.source if copy.source in fixed else plain)
    # Last: an alias with what is left of a round trip would take the name of another thing.
    while trip := next(_round_trips(index, copies), None):
        copies = [copy for copy in copies if copy not in trip]
        index.merge(trip, trip[0].source)


def _is_needless(index: _Index, copy: _Copy, fixed: set[str], known: _Known) -> bool:
    return _is_alias(index, copy, fixed, known) or _is_merge(index, copy, fixed)


def _plainness(name: str) -> tuple[bool, int, str]:
    """Sorts names without the number of a renaming first, then short ones."""
    return re.search(r"_\d+$", name) is not None, len(name), name


def _copies(body: list[ast.stmt], fixed: set[str]) -> Iterator[_Copy]:
    for statement in body:
        match statement:
            case ast.Assign([ast.Name() as target], ast.Name() as source) if target.id not in fixed:
                yield _Copy(statement, target, source, body)
        for inner in _bodies(statement):
            yield from _copies(inner, fixed)


def _is_alias(index: _Index, copy: _Copy, fixed: set[str], known: _Known) -> bool:
    sources = index.of(copy.source, stores=True)
    if len(sources) != (0 if copy.source in fixed else 1):
        return False
    if len(index.of(copy.target, stores=True)) != 1:
        return False
    if not sources:
        return True
    if sources[0] > index.first[copy.statement]:
        return False
    if index.is_beside(sources[0], copy):
        return True
    # A copy inside a branch may keep the value of an earlier round of a loop around both.
    start = next(i for i, s in enumerate(copy.block) if s is copy.statement)
    later = {use.statement for use in known.uses(copy.block[start:])}
    return all(index.uses[p].statement in later for p in index.of(copy.target, stores=False))


def _is_merge(index: _Index, copy: _Copy, fixed: set[str]) -> bool:
    if copy.source in fixed:
        return False
    place = index.first[copy.statement]
    sources, targets = index.places[copy.source], index.places[copy.target]
    if sources[-1] > place + 1 or targets[0] < place or sources[0] >= place:
        return False
    return index.uses[sources[0]].is_store and index.is_beside(sources[0], copy)


def _round_trips(index: _Index, copies: list[_Copy]) -> Iterator[tuple[_Copy, _Copy]]:
    """(copy, copy back) that the rule of this name takes away."""
    for there in copies:
        for back in copies:
            if (back.target, back.source) != (there.source, there.target):
                continue
            first, last = index.first[there.statement], index.first[back.statement]
            if back.block is not there.block or last < first:
                continue
            read_between = any(first + 1 < p < last for p in index.places[there.source])
            targets = index.places[there.target]
            if not read_between and first <= targets[0] and targets[-1] <= last + 1:
                yield there, back
