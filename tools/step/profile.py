"""Compares a recorded step, kernel by kernel, with the floor of each part.

The recording is a trace that torch.profiler exported (Chrome's format): one dictionary with
`traceEvents`. Only events on the GPU are read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tilewright.compiler.report.step import FUSED, Part, Step
from tilewright.compiler.scopes import collapse_scope

Kind = Literal["fused", "inductor", "library", "torch", "copy", "gap"]
#: For each kind of launch, the name that tables show. Tables list the kinds in this order.
WORDS: Mapping[Kind, str] = {
    "fused": "fused ops",
    "inductor": "Inductor's kernels",
    "library": "libraries' kernels",
    "torch": "torch's own kernels",
    "copy": "copies and fills",
    "gap": "nothing running",
}

# The kind, the name, the scope and the kernels of a row.
_Key = tuple[Kind, str, str, tuple[str, ...]]
# The name of an emitted kernel ends in the first twelve hexadecimal digits of the hash of its spec.
_OURS = re.compile(r"_[0-9a-f]{12}$")
_TORCHS = re.compile(r"\b(at|c10)::|\bat_cuda_")
_COPIES = frozenset({"gpu_memcpy", "gpu_memset"})


class TraceError(ValueError):
    """Raised for a trace that cannot be read as steps of a model."""


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or fill on the GPU. `start` and `end` are in microseconds."""

    name: str
    category: str
    start: float
    end: float

    @property
    def kind(self) -> Kind:
        if self.category in _COPIES:
            return "copy"
        if self.name.startswith("triton_"):
            return "inductor"
        if _OURS.search(self.name):
            return "fused"
        return "torch" if _TORCHS.search(self.name) else "library"


@dataclass(frozen=True)
class Row:
    """A part of a step that takes time.

    name: the pattern of a fused op, or the name of the kernel for other kinds.
    scope: the layer of a fused op; "" for other kinds, because the trace does not tell their layer.
    kernels: the kernels of a fused op.
    count: the number of launches per step.
    us: the microseconds per step, as the mean of the steps. If kernels overlap, each kernel counts
        only with the time that it adds to the step.
    floor_us: the floor of the part; None if its work is not known.
    """

    kind: Kind
    name: str
    scope: str
    kernels: tuple[str, ...]
    count: float
    us: float
    floor_us: float | None = None

    @property
    def distance_us(self) -> float:
        """Returns the time above the floor, in microseconds."""
        return self.us - (self.floor_us or 0.0)


@dataclass(frozen=True)
class Profile:
    """A measured step.

    us: the time from the start of the step's first kernel to the end of its last kernel, as the
        mean of the steps.
    rows: the parts of that time.
    floor_us: the floor of the whole step.
    """

    steps: int
    us: float
    floor_us: float
    rows: tuple[Row, ...]

    @property
    def of_floor(self) -> float:
        """Returns the floor's share of the measured time."""
        return self.floor_us / self.us if self.us else 0.0

    def of(self, kind: Kind) -> float:
        """Returns the time of all rows of one kind, in microseconds."""
        return sum(row.us for row in self.rows if row.kind == kind)

    def folded(self) -> list[Row]:
        """Merges the rows of different layers that have the same name and the same kernels. The row
        furthest from its floor comes first."""
        groups: dict[_Key, list[Row]] = defaultdict(list)
        for row in self.rows:
            groups[row.kind, row.name, collapse_scope(row.scope), row.kernels].append(row)
        found = [_joined(rows, scope) for (_, _, scope, _), rows in groups.items()]
        return sorted(found, key=lambda row: -row.distance_us)

    def as_dict(self) -> dict[str, Any]:
        """Returns the object as JSON-ready data."""
        return {
            "steps": self.steps,
            "us": self.us,
            "floor_us": self.floor_us,
            "of_floor": self.of_floor,
            "kinds": {kind: self.of(kind) for kind in WORDS},
            "rows": [asdict(row) for row in self.rows],
        }


def _joined(rows: Sequence[Row], scope: str) -> Row:
    floors = [row.floor_us for row in rows if row.floor_us is not None]
    first = rows[0]
    scope = scope if len(rows) > 1 else first.scope
    count, us = sum(row.count for row in rows), sum(row.us for row in rows)
    floor = sum(floors) if floors else None
    return Row(first.kind, first.name, scope, first.kernels, count, us, floor)


def profile_of(trace: Mapping[str, Any], step: Step, steps: int | None = None) -> Profile:
    """Returns the profile of a trace of equal steps.

    `steps` is the number of steps; if it is None, the function finds the number from the launches
    of tilewright's kernels. Raises TraceError if the trace has no kernels, or does not consist of
    that number of equal steps.
    """
    launches = _launches(trace)
    if not launches:
        raise TraceError("the trace has no kernels: record it with ProfilerActivity.CUDA, on a GPU")
    expected = _expected(step)
    steps = _count(launches, expected) if steps is None else steps
    if steps < 1 or len(launches) % steps:
        raise TraceError(f"{len(launches)} launches cannot be divided into {steps} equal steps")
    each = len(launches) // steps
    runs = [launches[i : i + each] for i in range(0, len(launches), each)]
    if len({tuple(launch.name for launch in run) for run in runs}) > 1:
        raise TraceError(f"the {steps} steps of the trace launch different kernels")
    times: dict[_Key, float] = defaultdict(float)
    counts: Counter[_Key] = Counter()
    for run in runs:
        for key, us in _timed(run, expected):
            times[key] += us
            counts[key] += 1
    floors = _floors(step)
    rows = (
        Row(*key, counts[key] / steps, us / steps, floors.get(key)) for key, us in times.items()
    )
    whole = sum(run[-1].end - run[0].start for run in runs) / steps
    return Profile(steps, whole, step.total.floor_us, tuple(rows))


def _launches(trace: Mapping[str, Any]) -> list[Launch]:
    """Returns the events on the GPU, sorted by their start."""
    found = [
        Launch(event["name"], event["cat"], event["ts"], event["ts"] + event["dur"])
        for event in trace.get("traceEvents", ())
        if isinstance(event, dict)
        and event.get("ph") == "X"
        and event.get("cat") in ("kernel", *_COPIES)
    ]
    return sorted(found, key=lambda launch: (launch.start, launch.end))


def _timed(
    run: Sequence[Launch], expected: Mapping[str, Sequence[Part]]
) -> Iterator[tuple[_Key, float]]:
    """Yields the time that each launch adds to its step, and the time of each gap before a
    launch."""
    seen: Counter[str] = Counter()
    often = Counter(launch.name for launch in run)
    until = run[0].start
    for launch in run:
        if launch.start > until:
            yield ("gap", WORDS["gap"], "", ()), launch.start - until
            until = launch.start
        parts = expected.get(launch.name, ())
        key: _Key = launch.kind, launch.name, "", ()
        if parts:  # the parts that launch this kernel launch it equally often
            key = _key(parts[seen[launch.name] * len(parts) // often[launch.name]])
        seen[launch.name] += 1
        yield key, max(launch.end - until, 0.0)
        until = max(until, launch.end)


def _key(part: Part) -> _Key:
    return "fused", part.name, part.scope, part.kernels


def _expected(step: Step) -> dict[str, list[Part]]:
    """Returns, by the name of an emitted kernel, the parts that launch the kernel, in order."""
    found: dict[str, list[Part]] = defaultdict(list)
    for part in step.parts:
        for kernel in dict.fromkeys(part.kernels):
            found[kernel].append(part)
    return found


def _floors(step: Step) -> Mapping[_Key, float]:
    found: dict[_Key, float] = defaultdict(float)
    for part in step.parts:
        if part.kind == FUSED and part.kernels:
            found[_key(part)] += part.amounts.floor_us
    return dict(found)


def _count(launches: Sequence[Launch], expected: Mapping[str, Sequence[Part]]) -> int:
    """Counts the steps of a trace by the launches of tilewright's kernels. Returns 1 if the trace
    has no such launch."""
    names = Counter(launch.name for launch in launches if launch.name in expected)
    counts = {name: number / len(expected[name]) for name, number in names.items()}
    steps = min(counts.values(), default=1.0)
    odd = [name for name, count in counts.items() if steps < 1 or count % steps]
    if odd:
        said = ", ".join(f"{name} x{names[name]} of {len(expected[name])}" for name in odd)
        raise TraceError(f"the trace does not have a whole number of steps of this model: {said}")
    return int(steps)
