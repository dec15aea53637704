"""The guide to miss codes (docs/miss-codes.md, installed with the package), by code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# A code, its meaning, and what follows its hint; `patterns/codes.py` reads the rest.
_ENTRY = re.compile(
    r"^### ([A-Z0-9_]+)\n\*([^\n]+)\*[^\n]*\n\n> [^\n]+\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class CodeGuide:
    """One code: its meaning in a line, and what to do about it, as Markdown."""

    code: str
    meaning: str
    text: str


def miss_guide(registered: Mapping[str, str]) -> Mapping[str, CodeGuide]:
    """The codes of the guide and those registered, sorted.

    registered: meanings by code, as `CODES` of `patterns.language`; those of a user's own patterns
    have no text. Without them no torch is needed.
    """
    known = {code: CodeGuide(code, meaning, "") for code, meaning in registered.items()} | _own()
    return {code: known[code] for code in sorted(known)}


@cache
def _own() -> dict[str, CodeGuide]:
    patterns = find_spec("tilewright.patterns")  # which importing would take torch for
    guide = Path(str(patterns and patterns.origin)).with_name("miss-codes.md").read_text("utf-8")
    return {
        found[0]: CodeGuide(found[0], found[1], found[2].strip()) for found in _ENTRY.findall(guide)
    }
