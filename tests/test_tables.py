"""Tests that tables of test parameters leave out only combinations."""

from __future__ import annotations

from itertools import combinations, product

from tests.tables import all_pairs, in_turn

AXES = ("abcd", [1, 2, 3], {"yes": True, "no": False})
VALUES = ("abcd", (1, 2, 3), (True, False))


def test_in_turn_has_every_value_once_in_the_longest_axis():
    rows = [row.values for row in in_turn(*AXES)]
    assert [set(column) for column in zip(*rows, strict=True)] == [set(axis) for axis in VALUES]
    assert len(rows) == 4


def test_all_pairs_has_every_pair_and_not_every_combination():
    rows = [row.values for row in all_pairs(*AXES)]
    for one, other in combinations(range(3), 2):
        found = {(row[one], row[other]) for row in rows}
        assert found == set(product(VALUES[one], VALUES[other]))
    assert len(set(rows)) == len(rows) <= 14 < 24


def test_rows_are_named_by_keys_and_values():
    assert [row.id for row in in_turn({"x": 1}, [len])] == ["x-len"]
    assert all_pairs("ab", {"yes": 1})[0].id == "a-yes"
