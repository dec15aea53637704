"""The codes of misses: the meaning of each code, whether a fusion is lost, and what to do about it.
This module reads the codes from docs/miss-codes.md, which is installed together with this file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

#: `lost`: a fusion is missing that the model should have. `advice`: nothing is lost.
Weight = Literal["lost", "advice"]

# Matches an entry of `miss-codes.md`. An entry has a code, and the meaning, the marks and the hint
# of the code.
_ENTRY = re.compile(r"^### ([A-Z0-9_]+)\n\*(.+)\*(?: \((.+)\))?\n\n> (.+)\n", re.MULTILINE)
_ENTRIES = _ENTRY.findall(Path(__file__).with_name("miss-codes.md").read_text("utf-8"))

#: The meaning of each code.
CODES: dict[str, str] = {code: meaning for code, meaning, _, _ in _ENTRIES}
#: Codes whose misses are `advice`, unless a miss says otherwise. The misses of all other codes are
#: `lost`.
WEIGHTS: dict[str, Weight] = {code: "advice" for code, _, marks, _ in _ENTRIES if "advice" in marks}
#: Codes of misses that an unknown operator at the site may cause.
OF_OPERATORS = frozenset(code for code, _, marks, _ in _ENTRIES if "operator" in marks)
#: The hint for each code, which says what to do about a miss.
HINTS: dict[str, str] = {code: hint for code, _, _, hint in _ENTRIES}


def register_code(code: str, meaning: str, weight: Weight | None = None) -> None:
    """Adds a miss code for a user's pattern. Raises ValueError if the code already has another
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
        raise ValueError(f"weight: {code!r} is already {WEIGHTS[code]!r}, got {weight!r}")
