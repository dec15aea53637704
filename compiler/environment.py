"""Checks the names and values of tilewright's environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tilewright.codegen.build.cache.folder import means_trust
from tilewright.codegen.names import did_you_mean
from tilewright.ops.checks import OFF, is_on

PREFIX = "TILEWRIGHT_"
#: Variables that turn something on. For each, a function that returns whether a text turns it on.
SWITCHES = {
    "TILEWRIGHT_DEBUG": is_on,
    "TILEWRIGHT_EVERYWHERE": is_on,
    "TILEWRIGHT_CACHE_TRUST": means_trust,
}
#: The usual texts that turn a switch on.
ON = ("1", "yes", "on", "true")
#: Variables with other values. The code that reads them checks these values.
OTHERS = (
    "TILEWRIGHT_CACHE_DIR",
    "TILEWRIGHT_CACHE_SIZE",
    "TILEWRIGHT_LOG",
    "TILEWRIGHT_REPRO",
)


def problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields a message for each variable with an unknown name, and for each switch whose value does
    not say whether it turns the switch on or off.

    A wrong variable must not keep a model from compiling, so these messages are warnings.
    """
    known = (*SWITCHES, *OTHERS)
    for name, value in environment.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            near = did_you_mean(name, known)
            yield f"{name}: there is no such variable; expected one of {', '.join(known)}{near}"
        elif name in SWITCHES:
            on = SWITCHES[name](value)
            if value.strip().lower() not in (ON if on else OFF):
                effect = "on" if on else "off"
                yield f"{name}: expected 1 or 0, got {value!r}, which means {effect!r}"
