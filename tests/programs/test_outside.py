"""Some programs of numbers from outside their range, and some models as export spells them; the
modules run more of them."""

from __future__ import annotations

import pytest

from tests.programs import exported, outside

#: Of each kind, a few seeds of which one raises where that kind can.
SEEDS = {"mixture": (6, 11), "loop": (6, 10), "adapted": (10, 15), "written": (6, 10)}
LOOKED_UP = ("mixture", "loop", "adapted", "written", "paged")


@pytest.mark.parametrize("kind", outside.KINDS)
def test_numbers_from_outside_do_what_they_do_in_eager(kind):
    tally = outside.run(range(*SEEDS.get(kind, (0, 3))), [kind])
    assert not tally.found, tally.found
    verdicts = {"same", "both raise"} if kind in LOOKED_UP else {"same"}
    assert verdicts <= set(tally.verdicts), tally.verdicts


@pytest.mark.parametrize("family", ["attention", "wild"])
def test_exported_models_are_fused_as_they_were(family):
    tally = exported.run(family, range(1, 3))
    assert not tally.found, tally.found
    assert tally.fused, tally
