"""Tables of test parameters that cover each value, or each pair of values, with few rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

#: Values of one parameter. A mapping gives each value a name for the ids of tests.
Axis = Mapping[str, Any] | Iterable[Any]


def in_turn(*axes: Axis) -> list[Any]:
    """Returns rows that cover each value of each axis. There are as many rows as the longest axis
    has values."""
    named = [_named(axis) for axis in axes]
    longest = max(map(len, named))
    return [_row([axis[row % len(axis)] for axis in named]) for row in range(longest)]


def all_pairs(*axes: Axis) -> list[Any]:
    """Returns rows that cover each pair of values of two axes. They are chosen greedily by the
    number of new pairs."""
    named = [_named(axis) for axis in axes]
    rows = [
        (row, frozenset(combinations(enumerate(places), 2)))
        for places in product(*(range(len(axis)) for axis in named))
        for row in [[axis[place] for axis, place in zip(named, places, strict=True)]]
    ]
    missing = {pair for _, pairs in rows for pair in pairs}
    chosen = []
    while missing:
        row, pairs = max(rows, key=lambda item: len(item[1] & missing))
        chosen.append(_row(row))
        missing -= pairs
    return chosen


def _named(axis: Axis) -> list[tuple[str, Any]]:
    if isinstance(axis, Mapping):
        return list(axis.items())
    return [(getattr(value, "__name__", str(value)), value) for value in axis]


def _row(parts: list[tuple[str, Any]]) -> Any:
    return pytest.param(*(value for _, value in parts), id="-".join(name for name, _ in parts))
