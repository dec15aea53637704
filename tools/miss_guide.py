"""The guide to miss codes (docs/miss-codes.md, installed with the package), by code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from tilewright.patterns.language import CODES

_ENTRY = re.compile(r"^### ([A-Z0-9_]+)\n\*(.+?)\*\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CodeGuide:
    """One code: its meaning in a line, and what to do about it, as Markdown."""

    code: str
    meaning: str
    text: str


def miss_guide() -> Mapping[str, CodeGuide]:
    """All registered codes; those of a user's own patterns have a meaning but no text."""
    texts = _texts()
    return {code: CodeGuide(code, CODES[code], texts.get(code, "")) for code in sorted(CODES)}


@cache
def _texts() -> Mapping[str, str]:
    guide = files("tilewright.patterns").joinpath("miss-codes.md").read_text("utf-8")
    return {code: text.strip() for code, _, text in _ENTRY.findall(guide)}
