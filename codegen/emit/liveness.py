"""Side effects of statements, and removal of assignments that nothing reads."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

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


def remove_dead(body: list[ast.stmt]) -> list[ast.stmt]:
    """Drop pure statements whose names are never read, until nothing more can go."""
    while True:
        live = _read_names(body)
        kept = _without_overwritten(_prune(body, live))
        if _count(kept) == _count(body):
            return kept
        body = kept


def _count(body: Sequence[ast.stmt]) -> int:
    return sum(1 + sum(map(_count, _bodies(statement))) for statement in body)


def _bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, (ast.For, ast.While, ast.If)):
        return [statement.body, statement.orelse]
    return []


def _read_names(body: Sequence[ast.stmt]) -> set[str]:
    """Names read anywhere, except by a statement that does nothing but update that very name."""
    live: set[str] = set()
    for statement in body:
        for node in _simple_parts(statement):
            names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            reads = {n.id for n in names if isinstance(n.ctx, ast.Load)}
            if isinstance(node, ast.stmt) and not has_side_effects(node):
                reads -= _only_target(node)
            live |= reads
    return live


def _simple_parts(statement: ast.stmt) -> list[ast.AST]:
    """A statement, or a compound one's header and the parts of its bodies."""
    if isinstance(statement, ast.For):
        header: ast.expr = statement.iter
    elif isinstance(statement, (ast.If, ast.While)):
        header = statement.test
    else:
        return [statement]
    inner = [*statement.body, *statement.orelse]
    return [header, *(part for item in inner for part in _simple_parts(item))]


def _only_target(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return {statement.targets[0].id}
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def _targets(statement: ast.stmt) -> set[str] | None:
    """Names an assignment binds; None for other statements."""
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        return None
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _prune(body: Sequence[ast.stmt], live: set[str]) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for statement in body:
        targets = _targets(statement)
        if targets is not None and not targets & live and not has_side_effects(statement):
            continue
        pruned = _prune_compound(statement, live)
        if pruned is not None:
            kept.append(pruned)
    return kept


def _prune_compound(statement: ast.stmt, live: set[str]) -> ast.stmt | None:
    if isinstance(statement, (ast.For, ast.While)):
        body = _prune([s for s in statement.body if not isinstance(s, ast.Pass)], live)
        if not body and not isinstance(statement, ast.While):
            return statement if _calls_impure(statement.iter) else None
        if isinstance(statement, ast.While):
            return ast.While(statement.test, body or [ast.Pass()], [])
        return ast.For(statement.target, statement.iter, body, [], None)
    if not isinstance(statement, ast.If):
        return statement
    body, orelse = _prune(statement.body, live), _prune(statement.orelse, live)
    if body:
        return ast.If(statement.test, body, orelse)
    if orelse:
        return ast.If(ast.UnaryOp(ast.Not(), statement.test), orelse, [])
    return ast.Expr(statement.test) if _calls_impure(statement.test) else None


def _without_overwritten(body: list[ast.stmt]) -> list[ast.stmt]:
    """Drop assignments whose value is overwritten in the same block before anything reads it."""
    kept = []
    uses = [_name_uses(statement) for statement in body]
    for index, statement in enumerate(body):
        if isinstance(statement, (ast.For, ast.While, ast.If)):
            statement.body = _without_overwritten(statement.body)
            statement.orelse = _without_overwritten(statement.orelse)
        name = _plain_target(statement)
        following = zip(body[index + 1 :], uses[index + 1 :], strict=True)
        if name is None or has_side_effects(statement) or not _overwritten(name, following):
            kept.append(statement)
    return kept


def _plain_target(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _name_uses(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """(names read, names written) anywhere in a statement; `x += 1` does both."""
    reads: set[str] = set()
    writes: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            (reads if isinstance(node.ctx, ast.Load) else writes).add(node.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            reads.add(node.target.id)
    return reads, writes


def _overwritten(
    name: str, following: Iterable[tuple[ast.stmt, tuple[set[str], set[str]]]]
) -> bool:
    for statement, (reads, writes) in following:
        if name in reads:
            return False
        if isinstance(statement, ast.Assign) and name in writes:
            return True
    return False
