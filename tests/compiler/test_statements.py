"""Tests graphs with inserted statements: see :mod:`tests.compiler.statements`."""

from __future__ import annotations

import logging
import warnings

import pytest

from tests.compiler import statement_programs, statements
from tests.compiler.statement_programs import FORMS, turn_of, turns

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# These seeds take two fifths of the turns. STEP divides neither the number of turns nor the number
# of families, so each statement occurs in the graphs of several families.
FIRST, STEP = 100_800, 5
SEEDS = range(FIRST, FIRST + 2 * len(turns()), STEP)


@pytest.fixture(autouse=True)
def quiet():
    """Silences torch's warnings about programs that are not valid."""
    logging.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def test_a_graph_with_statements_computes_what_it_did():
    """Each kind of statement in each spelling occurs in graphs of some families. The programs run
    in a fork, because torch may crash a process; the programs of that process are then left
    out."""
    found = statements.tallied(SEEDS)
    assert not found.wrong
    assert found.programs.total() > len(SEEDS) * 0.9
    assert found.fused.total() > found.programs.total() / 2
    assert not found.left or found.crashed


def test_the_seeds_here_have_every_statement_and_family():
    """The seeds of this file contain every kind of statement in every spelling, and most of these
    in the graph of each family."""
    here = {turn_of(seed) for seed in SEEDS}
    assert {turn[1:] for turn in here} == {turn[1:] for turn in turns()}
    for other, least in ((1, 0.95), (2, 0.9)):
        asked, of_all = ({(t[0], t[other]) for t in drawn} for drawn in (here, turns()))
        assert len(asked) >= least * len(of_all)


def test_turns_are_all_that_a_statement_can_be():
    drawn = set(turns())
    for family in statement_programs.FAMILIES:
        spelled = {
            kind: {f for g, k, f in drawn if (g, k) == (family, kind)} for _, kind, _ in drawn
        }
        assert spelled["writes"] == spelled["out"] == set(FORMS)
        assert spelled["aliases"] == set(FORMS) - {"checkpoint", "cond"}
        assert spelled["reads"]


def test_the_operators_are_those_that_torch_registers():
    """The operators are drawn from all that torch registers, so new operators of a newer torch are
    drawn, too. There are hundreds of each kind."""
    counts = {
        kind: len(statement_programs.overloads(kind)) for kind in ("writes", "out", "aliases")
    }
    assert counts["writes"] > 250
    assert counts["out"] > 500
    assert counts["aliases"] > 40


def test_every_family_fuses_as_it_is():
    for family in statement_programs.FAMILIES:
        base = statement_programs.base(family)
        report = statements.fuse(base.module, statements.OPTIONS)
        assert report.matches, family


def test_a_wrong_rewrite_is_seen(monkeypatch):
    """If the checks of legality are turned off, statements give wrong results, and the test sees
    them."""
    monkeypatch.setattr("tilewright.compiler.fuse.check_legality", lambda match, flow: None)
    outcomes = map(statements.tried, range(60))
    assert any(outcome is not None and outcome.wrong for outcome in outcomes)
