"""Loads the templates of a page from `assets/`, and formats the numbers that the templates show."""

from __future__ import annotations

from functools import cache

import jinja2


@cache
def template(name: str) -> jinja2.Template:
    """Returns the template that a file in `assets/` holds."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tilewright.tools.report", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"bytes": readable_bytes, "us": readable_time, "px": "{:.1f}".format}
    return environment.get_template(name)


def readable_bytes(size: float) -> str:
    """Returns a number of bytes as text, such as `12 KiB` or `1.3 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def readable_time(microseconds: float) -> str:
    """Returns a time as text with three digits, such as `12.3 µs` or `1.23 ms`."""
    if 0 < microseconds < 1:
        return f"{microseconds:.2f} µs"
    for unit in ("µs", "ms"):
        if microseconds < 1000:
            return f"{float(f'{microseconds:.3g}'):g} {unit}"  # avoids 1e+03
        microseconds /= 1000
    return f"{microseconds:.3g} s"
