"""Lists the modelled steps of a model at several batch sizes and on several chips, as a table for a
terminal, and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.codegen.targets import get_target
from tilewright.compiler import _compat
from tilewright.compiler.report.step import Step
from tilewright.tools.report.templates import readable_bytes, readable_time
from tilewright.tools.step.tables import step_table, with_bar


@dataclass(frozen=True)
class BatchRow:
    """A step of `batch` sequences on a chip.

    modelled_us, floor_us: the modelled time and the floor of the step, as in `Amounts`.
    bar_percent, bar_why: the size of the modelled time's error bar, and the reason for that size.
    kind: the kind of step.
    bound: the kind of work that takes most of the modelled time.
    memory: the bytes of the weights and of full caches.
    hides_caches: whether both times leave out reading the caches, because the number of tokens in
        the caches is not known.
    """

    target: str
    batch: int
    modelled_us: float
    bar_percent: int
    bar_why: str
    kind: str
    floor_us: float
    bound: str
    memory: int
    hides_caches: bool

    @classmethod
    def of(cls, step: Step, batch: int, weights: int) -> BatchRow:
        """Makes the row of a step. `weights` is the number of bytes of all weights of the model."""
        total, bar = step.total, step.bar
        return cls(
            target=step.target,
            batch=batch,
            modelled_us=total.modelled_us,
            bar_percent=bar.percent,
            bar_why=bar.why,
            kind=step.kind,
            floor_us=total.floor_us,
            bound=total.bound,
            memory=weights + total.cache_capacity,
            hides_caches=step.present is None and total.cache_capacity > total.caches,
        )

    @property
    def steps_per_s(self) -> float:
        """Returns the number of steps per second, or 0 if no part takes any time."""
        return 1e6 / self.modelled_us if self.modelled_us else 0.0

    @property
    def sequences_per_s(self) -> float:
        """Returns the number of steps per second times the batch size. For a decode step, this is
        the number of tokens per second."""
        return self.batch * self.steps_per_s

    @property
    def ends(self) -> tuple[float, float]:
        """Returns the ends of the error bar, in microseconds."""
        width = self.modelled_us * self.bar_percent / 100
        return self.modelled_us - width, self.modelled_us + width

    def as_dict(self) -> dict[str, Any]:
        """Returns the object as JSON-ready data."""
        low, high = self.ends
        rates = {"steps_per_s": self.steps_per_s, "sequences_per_s": self.sequences_per_s}
        data = asdict(self) | rates | {"low_us": low, "high_us": high}
        return data | {"class": data.pop("kind")}


def weight_bytes(model: Any) -> int:
    """Returns the number of bytes of the parameters and buffers of a model. Each storage counts
    once. Returns 0 for a plain function."""
    if not isinstance(model, torch.nn.Module):
        return 0
    sizes = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in _compat.parts_of(tensor):
            for key in _compat.storage_keys(part):
                sizes[key] = part.untyped_storage().nbytes()
    return sum(sizes.values())


def render_batches(model: str, rows: Sequence[BatchRow]) -> Group:
    """Renders the table of a model's steps, and notes on their error bars."""
    columns = ("batch", "a step", "steps/s", "sequences/s", "floor", "memory", "largest part")
    table = step_table("target", *columns)
    for row in rows:
        table.add_row(
            row.target,
            str(row.batch),
            with_bar(row.modelled_us, row.bar_percent),
            f"{row.steps_per_s:.0f}",
            f"{row.sequences_per_s:.0f}",
            readable_time(row.floor_us),
            readable_bytes(row.memory),
            row.bound,
        )
    title = Text(f"{model}: modelled steps, nothing measured", style="bold")
    parts: list[RenderableType] = [title, table]
    return Group(*parts, *map(Text, notes_of(rows)))


def notes_of(rows: Sequence[BatchRow]) -> Iterator[str]:
    """Yields notes on the sources of the error bars in a table, and on the amounts that its times
    leave out."""
    for why, percent in dict.fromkeys((row.bar_why, row.bar_percent) for row in rows):
        yield f"± {percent} %: {why} (docs/predictions.md)"
    if any(row.hides_caches for row in rows):
        yield "not counted: the tokens in the caches; --present N counts N tokens"
    chips = {row.target: get_target(row.target) for row in rows}
    rates = (
        f"{name} ({one.product}) {one.hbm_bytes_per_s / 1e12:.1f} TB/s"
        for name, one in chips.items()
    )
    yield f"memory rates: {', '.join(rates)}"
