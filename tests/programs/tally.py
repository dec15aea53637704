"""Verdicts of random programs, and counts of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

#: Verdicts whose programs a tally stores.
JUDGED = ("wrong", "raised", "refused")


@dataclass
class Outcome:
    """The outcome of a program.

    verdict: one of these:
    "same";
    "nothing fused";
    "unstable": a rounding of the inputs changes eager's own result as much;
    "undefined": the program reads memory that nothing wrote;
    "tied": the result is right, except that topk takes another one of equal numbers, which PyTorch
    allows;
    "lost, told": the result is right, and a miss says why less is fused than in another spelling;
    "refused": the fused op refuses a value that eager takes;
    "raised": tilewright raised;
    "wrong".

    silent: the points of the census that nothing accounts for and no miss names.
    unrecognised: the points for which a miss says that no pattern recognises them.
    """

    verdict: str
    patterns: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    why: str = ""
    silent: tuple[str, ...] = ()
    unrecognised: tuple[str, ...] = ()


@dataclass
class Tally:
    """Counts over programs.

    broken: the number of programs with at least one breakage.
    patterns, misses: the numbers of programs with at least one of each.
    through_dynamo: the number of programs that were also compiled by torch.compile, and the number
        of these that differed.
    found: the seeds that were wrong, raised or refused, with the reasons.
    silent: the number of programs, changed or as written, with points of the census that nothing
        accounts for and no miss names.
    unrecognised: the number of programs with points for which a miss says that no pattern
        recognises them.
    unaccounted: the seeds and points of both kinds. Runs before 2026-11-24 count all of them as
        silent, because this miss did not exist then.
    """

    programs: int = 0
    models: int = 0
    broken: int = 0
    fused: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    patterns: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    through_dynamo: Counter[str] = field(default_factory=Counter)
    found: dict[str, str] = field(default_factory=dict)
    silent: Counter[str] = field(default_factory=Counter)
    unrecognised: Counter[str] = field(default_factory=Counter)
    unaccounted: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: dict[str, Any]) -> Tally:
        """Returns the tally that was stored as JSON."""
        tally = cls()
        for part in fields(cls):
            if part.name in counts:
                kind = type(getattr(tally, part.name))
                setattr(tally, part.name, kind(counts[part.name]))
        return tally

    def count(self, seed: Any, outcome: Outcome, drawn: str = "", broken: bool = False) -> None:
        """Adds one program. `drawn` is its description, which is kept if the result was wrong."""
        self.programs += 1
        self.broken += broken
        self.fused += bool(outcome.patterns)
        self.verdicts[outcome.verdict] += 1
        self.patterns.update(set(outcome.patterns))
        self.misses.update(set(outcome.codes))
        for points, counted in (
            (outcome.unrecognised, self.unrecognised),
            (outcome.silent, self.silent),
        ):
            if points:
                counted["broken" if broken else "as written"] += 1
                self.unaccounted[str(seed)] = f"{', '.join(points[:3])} [{drawn}]"
        if outcome.verdict in JUDGED:
            said = f"{outcome.verdict}: {outcome.why.splitlines()[0]}"
            self.found[str(seed)] = f"{said} [{drawn}]"

    def add(self, other: Tally) -> None:
        for part in fields(self):
            mine, more = getattr(self, part.name), getattr(other, part.name)
            if isinstance(more, Counter):
                setattr(self, part.name, Counter(mine) + more)
            else:
                setattr(self, part.name, mine | more if isinstance(more, dict) else mine + more)
