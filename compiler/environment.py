"""Checks the names and values of tilewright's environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tilewright.codegen.names import did_you_mean

PREFIX = "TILEWRIGHT_"
#: Variables that turn something on, each with the values that turn it on.
SWITCHES = {
    "TILEWRIGHT_DEBUG": ("1", "yes", "on", "true"),
    "TILEWRIGHT_EVERYWHERE": ("1", "yes", "on", "true"),
    "TILEWRIGHT_CACHE_TRUST": ("1",),
}
OFF = ("", "0", "no", "off", "false")
#: Variables with other values. The code that reads them checks these values.
OTHERS = (
    "TILEWRIGHT_CACHE_DIR",
    "TILEWRIGHT_CACHE_SIZE",
    "TILEWRIGHT_LOG",
    "TILEWRIGHT_REPRO",
)


def problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields a message for each variable with an unknown name, and for each switch with an unknown
    value.

    A wrong variable must not keep a model from compiling, so these messages are warnings.
    """
    known = (*SWITCHES, *OTHERS)
    for name, value in environment.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            near = did_you_mean(name, known)
            yield f"{name}: there is no such variable; expected one of {', '.join(known)}{near}"
        on = SWITCHES.get(name)
        if on is not None and value.strip().lower() not in (*on, *OFF):
            # `ops.checks.is_on` takes any other text as "on"; the cache takes only "1" as "on".
            effect = "off" if on == ("1",) else "on"
            yield f"{name}: expected 1 or 0, got {value!r}, which means {effect!r}"
