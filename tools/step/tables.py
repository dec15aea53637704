"""Renders a step, and a profile of a step, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.codegen.targets import get_target
from tilewright.compiler.report.step import FUSED, INDUCTOR, LIBRARY, Amounts, Step
from tilewright.compiler.scopes import collapse_scope
from tilewright.tools.report.layers import title_of
from tilewright.tools.report.templates import readable_time
from tilewright.tools.step.profile import WORDS, Profile

# The number of rows of a profile that are shown. One line sums up the other rows.
SHOWN = 24
# The width of the column for kernel names.
WIDEST = 60
_LEFT = (LIBRARY, INDUCTOR)


def render_step(step: Step) -> Group:
    """Renders the tables of a step. They show the bytes that each layer moves, the shortest time of
    the step, and the parts left to Inductor."""
    columns = ("layer", "weights\nMB", "caches\nMB", "between\nMB", "floor\nus", "modelled\nus")
    table = step_table(*columns, "fused\n%")
    for layer in step.layers:
        fused, total = layer.of(FUSED), layer.total
        table.add_row(title_of(layer.scopes), *_numbers(total), _percent(fused, total))
    if sum(len(layer.scopes) for layer in step.layers) > 1:
        table.add_row("all", *_numbers(step.total), _percent(step.of(FUSED), step.total))
    parts: list[RenderableType] = [_title(step), table]
    return Group(*parts, *map(Text, _notes(step)))


def _title(step: Step) -> Text:
    chip = get_target(step.target)
    rate = f"{chip.product}: {chip.hbm_bytes_per_s / 1e12:.1f} TB/s"
    said = f"at least {readable_time(step.total.floor_us)} on {step.target} ({rate})"
    if step.total.bound:
        modelled = f"modelled at {with_bar(step.total.modelled_us, step.bar.percent)}"
        said = f"{modelled}, most of it {step.total.bound}; {said}"
    return Text("\nA step: ", style="bold").append(said, style="not bold")


def with_bar(us: float, percent: int) -> str:
    """Returns a modelled time with its error bar, such as `2.6 ms ± 8 %`."""
    return f"{readable_time(us)} ± {percent} %"


def _notes(step: Step) -> Iterator[str]:
    if step.total.bound:
        yield f"± {step.bar.percent} %: {step.bar.why} (docs/predictions.md)"
    total, left = step.total, [step.of(kind) for kind in _LEFT]
    if step.left_share:
        us, launches = (sum(getattr(a, n) for a in left) for n in ("modelled_us", "launches"))
        share = (
            f"{readable_time(us)} in {launches} kernels, {100 * step.left_share:.0f} % as modelled"
        )
        yield f"left to Inductor: {share}: {_largest(step)}"
    unknown = total.cache_capacity - total.caches
    if step.present is None and unknown:
        us = 1e6 * unknown / get_target(step.target).hbm_bytes_per_s
        more = f"{unknown / 1e6:.1f} MB, {readable_time(us)} or more"
        yield (
            f"not included: reading the KV cache ({more}); --present N assumes N cached tokens "
            "per sequence"
        )
    if step.symbols:
        yield (
            "not included: bytes and times that depend on the symbolic sizes "
            f"{', '.join(step.symbols)}"
        )


def _largest(step: Step) -> str:
    """Returns the names of the parts left to Inductor that take longest."""
    times: dict[str, float] = {}
    for part in step.parts:
        if part.kind != FUSED:
            name = f"{part.name} ({collapse_scope(part.scope) or 'outside the layers'})"
            times[name] = times.get(name, 0.0) + part.amounts.modelled_us
    longest = sorted(times.items(), key=lambda item: -item[1])
    more = len(longest) - 3
    said = "; ".join(f"{name} {readable_time(us)}" for name, us in longest[:3])
    return said + (f"; {more} more" if more > 0 else "")


def _numbers(a: Amounts) -> list[str]:
    sizes = [f"{size / 1e6:.1f}" for size in (a.weights, a.caches, a.activations)]
    return [*sizes, f"{a.floor_us:.1f}", f"{a.modelled_us:.1f}"]


def _percent(part: Amounts, whole: Amounts) -> str:
    return f"{100 * part.modelled_us / whole.modelled_us:.0f}" if whole.modelled_us else ""


def render_profile(profile: Profile, step: Step) -> Group:
    """Renders the parts of a measured step. The parts whose times are furthest above their floors
    come first."""
    title = Text(f"A step of {profile.us:.1f} us", style="bold")
    told = f", of which the floor of {profile.floor_us:.1f} us on {step.target} is "
    title.append(
        f"{told}{100 * profile.of_floor:.0f} % (mean of {profile.steps})", style="not bold"
    )
    kinds = step_table("", "us", "%", "floor")
    floors = {"fused": step.of(FUSED).floor_us}
    left = f"{sum(step.of(kind).floor_us for kind in _LEFT):.1f}"
    for kind, word in WORDS.items():
        us = profile.of(kind)
        if us:
            floor = f"{floors[kind]:.1f}" if kind in floors else ""
            kinds.add_row(word, f"{us:.1f}", f"{100 * us / profile.us:.0f}", floor)
    note = Text(f"floor of what is left to Inductor and libraries: {left} us\n")
    return Group(title, kinds, note, _rows(profile))


def _rows(profile: Profile) -> Table:
    table = step_table("furthest from the floor", "where", "x", "us", "floor", "above")
    rows = profile.folded()
    for row in rows[:SHOWN]:
        floor = "" if row.floor_us is None else f"{row.floor_us:.1f}"
        name = row.name if len(row.name) <= WIDEST else f"{row.name[: WIDEST - 1]}…"
        times = f"{row.us:.1f}", floor, f"{row.distance_us:.1f}"
        table.add_row(name, row.scope, f"{row.count:g}", *times)
    rest = rows[SHOWN:]
    if rest:
        us = f"{sum(row.us for row in rest):.1f}"
        table.add_row(f"{len(rest)} more", "", "", us, "", us)
    return table


def step_table(first: str, *columns: str) -> Table:
    """Returns an empty table of numbers.

    `first` is the header of the first column, in which long names fold. `columns` are the headers
    of the other columns.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="left" if column == "where" else "right", no_wrap=True)
    return table
