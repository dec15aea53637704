"""Reads the text about each code from the guide to miss codes. The guide is docs/miss-codes.md,
which is installed with the package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# An entry of the guide: a code, its meaning, and the text after its hint. `patterns/codes.py` reads
# the other parts of an entry.
_ENTRY = re.compile(
    r"^### ([A-Z0-9_]+)\n\*([^\n]+)\*[^\n]*\n\n> [^\n]+\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class CodeGuide:
    """A miss code, with its meaning in one line, and with the guide's text on what to do about it,
    as Markdown."""

    code: str
    meaning: str
    text: str


def miss_guide(registered: Mapping[str, str]) -> Mapping[str, CodeGuide]:
    """Returns the codes of the guide and the registered codes, sorted.

    `registered` maps codes to their meanings, as `CODES` of `patterns.language` does. Codes of a
    user's own patterns have no text in the guide. Without `registered`, the function does not need
    torch.
    """
    known = {code: CodeGuide(code, meaning, "") for code, meaning in registered.items()} | _own()
    return {code: known[code] for code in sorted(known)}


@cache
def _own() -> dict[str, CodeGuide]:
    patterns = find_spec("tilewright.patterns")  # importing it would import torch
    guide = Path(str(patterns and patterns.origin)).with_name("miss-codes.md").read_text("utf-8")
    return {
        found[0]: CodeGuide(found[0], found[1], found[2].strip()) for found in _ENTRY.findall(guide)
    }
