"""The codes of misses, read from docs/miss-codes.md, which is installed beside this file: what each
code means, whether something is lost by it, and what to do about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

#: `lost`: what the model is written for was not fused. `advice`: nothing was lost by it.
Weight = Literal["lost", "advice"]

# A code, its meaning, its marks, its hint.
_ENTRY = re.compile(r"^### ([A-Z0-9_]+)\n\*(.+)\*(?: \((.+)\))?\n\n> (.+)\n", re.MULTILINE)
_ENTRIES = _ENTRY.findall(Path(__file__).with_name("miss-codes.md").read_text("utf-8"))

#: What each code means.
CODES: dict[str, str] = {code: meaning for code, meaning, _, _ in _ENTRIES}
#: Codes whose misses are `advice` unless the miss says otherwise; all others are `lost`.
WEIGHTS: dict[str, Weight] = {code: "advice" for code, _, marks, _ in _ENTRIES if "advice" in marks}
#: Codes of sites at which an operator may stand that is not known.
OF_OPERATORS = frozenset(code for code, _, marks, _ in _ENTRIES if "operator" in marks)
#: What to do about a miss of a code.
HINTS: dict[str, str] = {code: hint for code, _, _, hint in _ENTRIES}


def register_code(code: str, meaning: str, weight: Weight | None = None) -> None:
    """Adds a miss code of a user's pattern; ValueError where it already means something else.

    weight: of its misses, `lost` (also where none is given) or `advice`, see :class:`Miss`.
    """
    if CODES.setdefault(code, meaning) != meaning:
        raise ValueError(f"code: {code!r} already means {CODES[code]!r}, got {meaning!r}")
    if weight is None:
        return
    if weight not in get_args(Weight):
        raise ValueError(f"weight: expected one of {get_args(Weight)}, got {weight!r}")
    if WEIGHTS.setdefault(code, weight) != weight:
        raise ValueError(f"weight: {code!r} already is {WEIGHTS[code]!r}, got {weight!r}")
