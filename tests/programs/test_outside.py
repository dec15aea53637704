"""Tests some programs with numbers outside their usual range, and some models as export writes
them. The modules run more of them."""

from __future__ import annotations

import pytest
import torch

from tests.programs import exported, outside
from tests.programs.run import OPTIONS, capture
from tilewright.compiler.fuse import fuse

#: A few seeds of each kind. One of them raises an error, if programs of that kind can.
SEEDS = {"mixture": (6, 11), "adapted": (10, 15), "written": (6, 10)}
LOOKED_UP = ("mixture", "adapted", "written", "paged")


@pytest.mark.parametrize("kind", outside.KINDS)
def test_numbers_from_outside_do_what_they_do_in_eager(kind):
    tally = outside.run(range(*SEEDS.get(kind, (0, 3))), [kind])
    assert not tally.found, tally.found
    verdicts = {"same", "both raise"} if kind in LOOKED_UP else {"same"}
    assert verdicts <= set(tally.verdicts), tally.verdicts


@pytest.mark.parametrize("lookup", outside.LOOKUPS)
def test_experts_looked_up_are_fused_or_told_why_not(lookup):
    """The pattern `moe` fuses experts whose weights a lookup selects. The pattern `moe_dense`,
    which would read the same products as a dense mixture, must report nothing if the experts are
    fused, and the true reason if they are not."""
    module = outside.Mixture(lookup, False, False)
    ids = torch.randint(outside.EXPERTS, (outside.TOKENS, outside.SLOTS))
    args = (outside.normal(outside.TOKENS, outside.HIDDEN), ids, outside.normal(*ids.shape))
    with torch.no_grad():
        report = fuse(capture(module, args, lookup).module, OPTIONS)
    told = {miss.code for miss in report.misses if miss.is_lost}
    fused = [site.op for site in report.matches]
    unread = lookup == "taken_along"
    assert (fused, told) == (([], {"EXPERT_WEIGHT"}) if unread else (["fused_moe"], set()))


@pytest.mark.parametrize("family", ["attention", "wild"])
def test_exported_models_are_fused_as_they_were(family):
    tally = exported.run(family, range(1, 3))
    assert not tally.found, tally.found
    assert tally.fused, tally
