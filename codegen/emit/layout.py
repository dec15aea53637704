"""Prints a syntax tree with lines of at most 100 columns. Long lines are broken at brackets, as
formatters do."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from itertools import pairwise

from tilewright.codegen.emit.nodes import nodes_of

WIDTH = 100
_INDENT = " " * 4
_OPEN, _CLOSE = "([{", ")]}"
# Matches strings that have no quotes or escapes inside. ast.unparse prints them in single quotes.
_PLAIN_QUOTES = re.compile(r"'([^'\"\\]*)'")


def unparse(node: ast.AST) -> str:
    """Returns the text of `ast.unparse` with long lines broken. The text parses to the same syntax
    tree."""
    lines = []
    inside_docstring = False
    for part in nodes_of(node):
        if "lineno" not in part.__dict__:
            part.lineno = 0  # type: ignore[attr-defined]  # ast.unparse looks up type comments by it
    for line in ast.unparse(node).split("\n"):
        quotes = line.count('"""')
        if inside_docstring or quotes:
            inside_docstring ^= quotes % 2 == 1
            lines.append(line.rstrip())
        else:
            lines.extend(_break(_PLAIN_QUOTES.sub(r'"\1"', line)))
    return "\n".join(lines)


def _break(line: str) -> list[str]:
    """Splits a logical line at its longest outermost pair of brackets. If a resulting line is still
    too long, splits that line in the same way."""
    if len(line) <= WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    span = _widest_bracket(line)
    if span is None:
        return [line]
    start, stop, commas = span
    inner = indent + _INDENT
    pieces = _pieces(line, start, stop, commas)
    one_line = inner + ", ".join(pieces)
    if len(one_line) <= WIDTH:
        body = [one_line]
    else:
        trailing = "," if commas else ""
        body = [part for piece in pieces for part in _break(f"{inner}{piece}{trailing}")]
    return [line[: start + 1], *body, f"{indent}{line[stop:]}"]


def _pieces(line: str, start: int, stop: int, commas: list[int]) -> list[str]:
    cuts = [start, *commas, stop]
    pieces = [line[a + 1 : b].strip() for a, b in pairwise(cuts)]
    return [piece for piece in pieces if piece]


def _widest_bracket(line: str) -> tuple[int, int, list[int]] | None:
    """Returns (open, close, commas) of the longest outermost pair of brackets, as columns, with the
    commas at the level of the pair. Returns None if there are no brackets."""
    best: tuple[int, int, list[int]] | None = None
    stack: list[tuple[int, list[int]]] = []
    for column, text in _operators(line):
        if text in _OPEN:
            stack.append((column, []))
        elif text in _CLOSE:
            start, commas = stack.pop()
            wider = best is None or column - start > best[1] - best[0]
            if not stack and wider and column - start > 1:
                best = (start, column, commas)
        elif text == "," and stack:
            stack[-1][1].append(column)
    return best


def _operators(line: str) -> list[tuple[int, str]]:
    """Returns (column, text) of the brackets and commas of a line. Returns nothing for an
    unfinished line."""
    stripped = line.strip()
    offset = len(line) - len(line.lstrip())
    header = stripped.endswith(":")
    readable = stripped[:-1] if header else stripped
    readable = readable.removesuffix(",")
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(readable).readline):
            if token.type == tokenize.OP and token.string in "()[]{},":
                found.append((offset + token.start[1], token.string))
    except tokenize.TokenError:
        return []
    return found
