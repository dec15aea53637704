"""Suggestions for unknown names in messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns a suggestion that ends a message about an unknown name, `; did you mean 'sm90'?`.

    It is the known name nearest to `given`, ignoring case, or an empty string if no name is near.
    """
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(given).lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""
