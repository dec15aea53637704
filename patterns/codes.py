"""The codes of misses, read from docs/miss-codes.md, which is installed beside this file: the
meaning of each code, whether something is lost, and what to do about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

#: `lost`: a fusion that the model is written for is missing. `advice`: nothing is lost.
Weight = Literal["lost", "advice"]

# One entry of the page: a code, its meaning, its marks, its hint.
_ENTRY = re.compile(r"^### ([A-Z0-9_]+)\n\*(.+)\*(?: \((.+)\))?\n\n> (.+)\n", re.MULTILINE)
_ENTRIES = _ENTRY.findall(Path(__file__).with_name("miss-codes.md").read_text("utf-8"))

#: The meaning of each code.
CODES: dict[str, str] = {code: meaning for code, meaning, _, _ in _ENTRIES}
#: Codes whose misses are `advice` unless the miss says otherwise; all others are `lost`.
WEIGHTS: dict[str, Weight] = {code: "advice" for code, _, marks, _ in _ENTRIES if "advice" in marks}
#: Codes of sites at which an unknown operator may stand.
OF_OPERATORS = frozenset(code for code, _, marks, _ in _ENTRIES if "operator" in marks)
#: What to do about a miss, by code.
HINTS: dict[str, str] = {code: hint for code, _, _, hint in _ENTRIES}


def register_code(code: str, meaning: str, weight: Weight | None = None) -> None:
    """Adds a miss code of a user's pattern. Raises ValueError if the code already has another
    meaning or weight.

    weight: the weight of its misses, `lost` (the default) or `advice`; see :class:`Miss`.
    """
    if CODES.setdefault(code, meaning) != meaning:
        raise ValueError(f"code: {code!r} already means {CODES[code]!r}, got {meaning!r}")
    if weight is None:
        return
    if weight not in get_args(Weight):
        raise ValueError(f"weight: expected one of {get_args(Weight)}, got {weight!r}")
    if WEIGHTS.setdefault(code, weight) != weight:
        raise ValueError(f"weight: {code!r} already is {WEIGHTS[code]!r}, got {weight!r}")
