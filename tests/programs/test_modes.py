"""Tests some random programs of modes. `python -m tests.programs.modes 0:1000` runs more of
them."""

from __future__ import annotations

from tests.programs.modes import run

FIRST = 10_000_000


def test_programs_of_modes_give_what_eager_gives():
    tally = run(range(FIRST, FIRST + 10))
    assert not tally.found, tally.found
    assert tally.verdicts["same"] >= 5, tally
    assert tally.patterns
    assert {"GRADIENT", "TRANSFORM"} & set(tally.misses)
