"""Suggestions for unknown names, for use in messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns a suggestion for the end of a message about an unknown name, such as `; did you mean
    'sm90'?`.

    The suggestion is the known name that is nearest to `given`, ignoring case. If no name is near,
    the result is an empty string.
    """
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(given).lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""
