"""Names that a user gave and that nothing has: the nearest of those that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name, `; did you mean 'sm90'?`, or an empty
    string where no name is near. Case does not count."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(given).lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""
