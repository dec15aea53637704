"""Tests the table of steps at several batch sizes: its numbers, its plot, and its command."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tilewright.tools.cli import app
from tilewright.tools.report.batch_plot import LEFT, RIGHT, batch_plot
from tilewright.tools.step.batches import BatchRow, notes_of, weight_bytes

ROW = BatchRow(
    target="sm90",
    batch=16,
    modelled_us=2000.0,
    bar_percent=10,
    bar_why="held-out steps",
    kind="decode, dense",
    floor_us=1500.0,
    bound="reading weights",
    memory=2**30,
    hides_caches=False,
)
BATCHED = """
    import torch

    def make(batch=1):
        with torch.device("meta"):
            model = torch.nn.Linear(256, 256, bias=False).to(torch.bfloat16).requires_grad_(False)
            return model, (torch.zeros(batch, 256, dtype=torch.bfloat16),), {}

    def make_alone():
        return make()
"""


def test_rates_and_the_ends_of_the_bar():
    assert ROW.steps_per_s == pytest.approx(500)
    assert ROW.sequences_per_s == pytest.approx(8000)
    assert ROW.ends == pytest.approx((1800, 2200))
    assert replace(ROW, modelled_us=0.0).steps_per_s == 0.0


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert weight_bytes(model) == 2 * 8 * 8 * 4
    model[1].weight = model[0].weight
    assert weight_bytes(model) == 8 * 8 * 4
    assert weight_bytes(torch.relu) == 0


def test_each_reason_is_said_once_and_caches_where_they_are_in_no_time():
    other = replace(ROW, target="sm100", bar_why="published", bar_percent=40)
    said = list(notes_of([ROW, replace(ROW, batch=64), other]))
    assert [line for line in said if line.startswith("±")] == [
        "± 10 %: held-out steps (docs/predictions.md)",
        "± 40 %: published (docs/predictions.md)",
    ]
    assert not any("--present" in line for line in said)
    assert any("--present" in line for line in notes_of([replace(ROW, hides_caches=True)]))


def test_the_plot_has_a_point_and_a_range_for_each_row():
    other = replace(ROW, target="sm100", modelled_us=1000.0, floor_us=700.0)
    svg = batch_plot([ROW, replace(ROW, batch=64, modelled_us=4000.0), other])
    assert len(re.findall(r'<path class="range', svg)) == 3
    assert len(re.findall(r'<circle class="to', svg)) == 3
    assert len(re.findall(r'<circle class="from', svg)) == 3
    assert len(re.findall('<polyline class="line', svg)) == 2
    # A longer time is drawn higher, and its range lies around its point.
    points = [float(y) for y in re.findall(r'<circle class="to[^>]* cy="([\d.]+)"', svg)]
    assert points[2] > points[0] > points[1]
    low, high = map(
        float, re.search(r'class="range[^>]* d="M[\d.]+ ([\d.]+)V([\d.]+)"', svg).groups()
    )
    assert low > points[0] > high


def test_chips_stand_side_by_side_at_a_batch_with_points_and_floors_of_their_own():
    """At one batch size, the points and floors of two chips are next to each other. Otherwise their
    bars would cover each other, and equal circles would not show the chip."""
    other = replace(ROW, target="sm100", modelled_us=2100.0, bar_percent=40)
    svg = batch_plot([ROW, other])
    groups = re.findall(r'<g class="chip-(\d)">(.*?)</g>', svg, re.DOTALL)
    assert sorted(look for look, _ in groups) == ["0", "1"]
    places = []
    for _, drawn in groups:
        assert len(re.findall(r'<circle class="from', drawn)) == 1
        xs = {
            *re.findall(r'<circle[^>]* cx="([\d.]+)"', drawn),
            *re.findall(r'd="M([\d.]+)', drawn),
        }
        assert len(xs) == 1  # the point, its range and its floor share one x
        places.append(float(xs.pop()))
    assert abs(places[0] - places[1]) >= 10  # the width of a circle


@pytest.mark.parametrize("chips", [1, 2, 7])
@pytest.mark.parametrize("batches", [(8,), (1, 16, 64), (1, 2, 4, 8, 16, 32, 64, 128, 250, 256)])
def test_a_plot_s_ticks_and_labels_do_not_cover_each_other(chips, batches):
    rows = [
        replace(ROW, target=f"chip{chip}", batch=batch, modelled_us=2000.0 + batch + chip)
        for chip in range(chips)
        for batch in batches
    ]
    svg = batch_plot(rows)
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)<', svg)
    below = [(float(x), said) for x, _, said in texts if said.isdigit()]
    assert {int(said) for _, said in below} <= set(batches)
    assert all(b - a >= 30 for (a, _), (b, _) in pairwise(below))
    beside = sorted(float(y) for _, y, said in texts if said.startswith("chip"))
    assert len(beside) == chips
    assert all(b - a >= 16.8 for a, b in pairwise(beside))
    assert len([said for *_, said in texts if said.endswith("s") and said[0].isdigit()]) >= 3
    # Points stay between the edges of the plot, and nearer to their own batch than to the next
    # batch.
    assert all(LEFT < float(x) < RIGHT for x in re.findall(r' cx="([\d.]+)"', svg))


def test_nothing_that_takes_no_time_is_drawn():
    assert batch_plot([replace(ROW, modelled_us=0.0)]) == ""


@pytest.fixture
def inspect(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "batched.py").write_text(textwrap.dedent(BATCHED))
    monkeypatch.delitem(sys.modules, "batched", raising=False)
    torch._dynamo.reset()
    return lambda *arguments: CliRunner().invoke(app, ["inspect", *arguments])


def test_a_table_of_batches_and_chips(inspect):
    done = inspect("batched.py:make", "--batches", "1,16", "--target", "sm100,sm90")
    assert done.exit_code == 0, done.stderr
    rows = re.findall(r"^(sm\d+) +(\d+) +\S+ \S+ ± (\d+) %", done.stdout, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("sm100", "1"),
        ("sm100", "16"),
        ("sm90", "1"),
        ("sm90", "16"),
    ]
    assert int(rows[0][2]) > int(rows[2][2])
    assert "no kernel of tilewright ran on sm100" in done.stdout


def test_the_table_as_json_keeps_to_its_schema(inspect):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra 'dev'")
    done = inspect("batched.py:make", "--batches", "4", "--target", "sm90", "--json")
    data = json.loads(done.stdout)
    schema = files("tilewright.tools").joinpath("schemas/inspect-batches.json").read_text()
    jsonschema.validate(data, json.loads(schema))
    (row,) = data["batches"]["rows"]
    assert row["memory"] == 2 * 256 * 256
    assert row["low_us"] < row["modelled_us"] < row["high_us"]


def test_the_page_has_the_table_and_the_plot(inspect, tmp_path):
    page = tmp_path / "page.html"
    done = inspect("batched.py:make", "--batches", "1,16", "--target", "sm90", "--html", str(page))
    assert done.exit_code == 0, done.stderr
    text = page.read_text("utf-8")
    assert 'id="batch-table"' in text
    assert 'class="batches"' in text
    plain = inspect("batched.py:make", "--target", "sm90", "--no-kernels", "--html", str(page))
    assert plain.exit_code == 0, plain.stderr
    assert 'id="batch-table"' not in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batches", "0"), "--batches: expected numbers of at least 1"),
        (("--batches", "many"), "--batches: expected numbers of at least 1"),
        (("--batches", "1", "--census"), "--batches cannot be used together with"),
        (("--batches", "1", "--target", "sm100,sm7"), "--target: expected one of"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(inspect, arguments, said):
    done = inspect("batched.py:make", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_function_has_to_take_the_batch(inspect):
    done = inspect("batched.py:make_alone", "--batches", "2")
    assert done.exit_code == 2
    assert "batch" in done.stderr
