"""Tests the rows and lanes of a drawing, and compares two drawings line by line."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from tilewright.tools.report.flow import MAX_LETTERS, rows, side_by_side
from tilewright.tools.report.node_facts import label


def nodes_of(function) -> list[fx.Node]:
    return list(fx.symbolic_trace(function).graph.nodes)


def same(node):
    return None


def labels(drawn):
    return [[label(node) for node in row.nodes] for row in drawn]


def test_nodes_that_hand_a_value_on_share_a_row_and_what_goes_round_passes_in_a_lane():
    def model(x):
        x = torch.relu(x)
        y = torch.cos(torch.sin(torch.exp(x)))
        return torch.tanh(x + y)

    drawn = rows(nodes_of(model), same)
    assert labels(drawn) == [["relu"], ["exp", "sin", "cos", "add", "tanh"]]
    around, last = drawn
    assert (around.lane, around.goes_on) == (0, True)
    # One lane leads into the row, although two of its nodes read the value.
    assert last.into == (0,)
    assert last.goes_on  # the graph returns it


def test_a_value_that_a_later_row_reads_goes_by_the_rows_between():
    def model(x):
        x = torch.relu(x)
        y = torch.exp(x)
        z = torch.sin(y) * torch.cos(y)
        return x + z

    drawn = rows(nodes_of(model), same)
    assert labels(drawn) == [["relu"], ["exp"], ["sin"], ["cos", "mul", "add"]]
    assert [row.lane in row.passing for row in drawn] == [False] * 4
    assert 0 in drawn[1].passing
    assert 0 in drawn[2].passing
    assert set(drawn[3].into) == {drawn[0].lane, drawn[1].lane, drawn[2].lane}


def test_other_kinds_and_long_runs_start_rows_of_their_own():
    def model(x):
        for _ in range(12):
            x = torch.relu(x)
        return torch.exp(x)

    drawn = rows(nodes_of(model), lambda node: label(node) == "exp")
    assert labels(drawn)[-1] == ["exp"]
    relus = [row for row in drawn if label(row.nodes[0]) == "relu"]
    assert sum(len(row.nodes) for row in relus) == 12
    assert len(relus) > 1
    assert all(sum(len(label(n)) for n in row.nodes) <= MAX_LETTERS for row in drawn)


def test_what_comes_from_outside_has_a_row_and_views_of_inputs_have_none():
    def model(x, w):
        a = torch.relu(x)
        return torch.matmul(torch.exp(a), w.transpose(0, 1))

    nodes = nodes_of(model)
    outside = next(node for node in nodes if label(node) == "relu")
    drawn = rows([node for node in nodes if node is not outside], same)
    assert [row.outside for row in drawn] == [True, False]
    assert labels(drawn) == [["relu"], ["exp", "matmul"]]


def random_graph(seed: int) -> list[fx.Node]:
    choose = random.Random(seed)
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    for _ in range(choose.randrange(1, 40)):
        operands = choose.choices(values[-6:], k=choose.choice((1, 1, 2, 3)))
        function = choose.choice((torch.relu, torch.add, torch.cat, torch.sin))
        values.append(graph.call_function(function, tuple(operands)))
    graph.output(values[-1])
    return list(graph.nodes)


@pytest.mark.parametrize("seed", range(40))
def test_lanes_of_any_graph_hold_together(seed):
    nodes = random_graph(seed)
    drawn = rows(nodes, same)
    assert [n for row in drawn for n in row.nodes] == [n for n in nodes if n.op == "call_function"]
    above: set[int] = set()
    where = {}
    for row in drawn:
        assert set(row.into) | set(row.passing) <= above
        assert row.lane not in row.passing
        # No lane ends while a later row needs it, and each lane starts at a row.
        assert above - set(row.passing) <= set(row.into)
        read = {where[u] for n in row.nodes for u in n.all_input_nodes if u in where}
        assert read == set(row.into)
        where |= dict.fromkeys(row.nodes, row.lane)
        above = set(row.below)
        assert len(above) == len(row.below)


@pytest.mark.parametrize("seed", range(40))
def test_two_drawings_stand_line_by_line(seed):
    before = random_graph(seed)
    choose = random.Random(seed)
    copied = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in before:
        # This node disappeared together with a site.
        if node.op == "call_function" and choose.random() < 0.4:
            made[node] = made[node.all_input_nodes[0]]
        else:
            made[node] = copied.node_copy(node, made.__getitem__)
            made[node].name = node.name
        if node.op == "call_function" and choose.random() < 0.2:  # it is new
            made[node] = copied.call_function(torch.neg, (made[node],))
            made[node].name = f"new_{node.name}"
    left, right = rows(before, same), rows(list(copied.nodes), same)
    lines = side_by_side(left, right, {})
    assert [line.before for line in lines if line.before] == left
    assert [line.after for line in lines if line.after] == right
    assert all(line.before or line.after for line in lines)
    # Only lanes pass in a line for which a drawing has no row.
    above: list[tuple[int, ...]] = [(), ()]
    for line in lines:
        assert [line.before_passing, line.after_passing] == above
        sides = zip((line.before, line.after), above, strict=True)
        above = [row.below if row else lanes for row, lanes in sides]
    line_of = {n.name: i for i, line in enumerate(lines) if line.before for n in line.before.nodes}
    for i, line in enumerate(lines):
        kept = (
            [line_of[n.name] for n in line.after.nodes if n.name in line_of] if line.after else []
        )
        assert not kept or max(kept) <= i  # no result stands above its source
