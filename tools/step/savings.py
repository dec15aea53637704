"""Describes how much a weight format saves in a step, as sentences and as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.compiler.report.savings import Savings, SavingsRow, Times, Unread
from tilewright.tools.report.templates import readable_bytes
from tilewright.tools.step.tables import step_table

TITLE = "Weights as codes"


def said_of(savings: Savings) -> tuple[str, ...]:
    """Returns sentences that say how much a format saves, for a terminal and for a page."""
    read, times = savings.read, savings.times
    if not savings.rows:
        return ("a step reads no weights as codes, so this format saves nothing",)
    forms = "; ".join(savings.forms)
    size = f"{readable_bytes(read.bytes)} as {forms} ({readable_bytes(read.bfloat16)} in bfloat16)"
    modelled = f"{_us(times.modelled_us)} ({_us(times.bfloat16_modelled_us)} in bfloat16)"
    least = f"{_us(times.floor_us)} ({_us(times.bfloat16_floor_us)})"
    return (
        f"weights read per step: {size}",
        f"the step is modelled at {modelled}, at least {least}{_rows_of(savings)}",
    )


def unread_said(one: Unread) -> str:
    """Returns a line about a weight that is not read as codes, with the reason."""
    place = one.scope or "graph"
    count = f" x{one.count}" if one.count > 1 else ""
    size = f", {readable_bytes(one.bytes)}" if one.bytes else ""
    return f"{place}{count}{size}: {one.reason}"


def remarks(savings: Savings) -> Iterator[str]:
    """Yields sentences about effects that the numbers do not include."""
    if savings.rounds:
        yield (
            "both steps round activations; a model in bfloat16 does not need these kernels and "
            "takes less time"
        )
    if savings.breaks:
        yield (
            "the graph breaks: no sum includes the code that runs between its parts, and this "
            "code may read codes, too"
        )


def render_savings(savings: Savings) -> Group:
    """Renders the savings of quantised weights for each fused op, and the weights that are not read
    as codes."""
    parts: list[RenderableType] = [Text(f"\n{TITLE}", style="bold")]
    parts += [Text(line) for line in said_of(savings)]
    if savings.rows:
        parts.append(_rows(savings.rows))
    parts += [Text(line) for line in _unread(savings)]
    return Group(*parts)


def _rows(rows: tuple[SavingsRow, ...]) -> Table:
    columns = ("x", "codes\nMB", "scales\nMB", "bf16\nMB", "modelled\nus", "bf16\nus")
    table = step_table("read by", *columns, "saved\nus")
    for row in rows:
        read = row.read
        sizes = (read.codes, read.scales + read.zeros, read.bfloat16)
        megabytes = (f"{size / 1e6:.1f}" for size in sizes)
        times = (f"{us:.1f}" for us in _modelled(row.times))
        table.add_row(f"{row.by}, {row.form}", str(row.count), *megabytes, *times)
    return table


def _modelled(times: Times) -> tuple[float, float, float]:
    """Returns three times in microseconds: modelled with codes, modelled with bfloat16, and their
    difference, the time saved."""
    now, then = times.modelled_us, times.bfloat16_modelled_us
    return now, then, then - now


def _unread(savings: Savings) -> Iterator[str]:
    yield from remarks(savings)
    if savings.unread:
        yield "not read as codes:"
    for one in savings.unread:
        yield f"  {unread_said(one)}"


def _us(us: float) -> str:
    return f"{us:.0f} us" if us >= 10 else f"{us:.2g} us"


def _rows_of(savings: Savings) -> str:
    if savings.tokens is None:
        return ""
    return f", for {savings.tokens} {'token' if savings.tokens == 1 else 'tokens'}"
