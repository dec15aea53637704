"""Tests that a pattern and an op from one file outside the package behave as the built-in ones
do."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.found import patterns_in
from tests.models.qkv_idioms import build
from tilewright.compiler import lower, reports
from tilewright.ops import contract
from tilewright.patterns import language

FILE = Path(__file__).parent / "extension_example" / "scaled_store.py"


@pytest.fixture(scope="module")
def extension():
    """Loads the example's file as a user's file is loaded."""
    spec = importlib.util.spec_from_file_location("somebodys_scaled_store", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    language.CODES.pop("SCALED_STORE_SOURCE")


@pytest.fixture
def registered(extension):
    """Registers the pattern for one test, and restores the registry afterwards."""
    before = language.registered()
    language.register(extension.PATTERN)
    yield extension
    language.unregister(extension.PATTERN.name)
    assert language.registered() == before


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Embeddings(nn.Module):
    """Writes rows of a table. `how` says what is changed."""

    def __init__(self, how="as it should be"):
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 8), requires_grad=False)

    def forward(self, x, table, rows):
        product = x.sin() * self.scale
        if self.how == "sum":
            product = product + 1
        if self.how == "matrix":
            product = x * x
        if self.how == "read first":
            early = product.sum()
        if self.how == "accumulated":
            table.index_add_(0, rows, product)
        elif self.how == "one column":
            table[rows, 0] = product[:, 0]
        else:
            table.index_copy_(0, rows, product)
        return table.sum() + (early if self.how == "read first" else 0)


def args():
    generator = torch.Generator().manual_seed(0)
    x, table = (torch.randn(s, generator=generator) for s in ((3, 8), (6, 8)))
    return x, table, torch.tensor([5, 0, 2])


def assert_runs_as_eager(model):
    eager, ours = args(), args()
    expected = model(*eager)
    actual = torch.compile(model, backend="tilewright", options={"inner": "eager"})(*ours)
    assert torch.equal(actual, expected)
    assert torch.equal(ours[1], eager[1])


def test_it_is_matched_rewritten_and_run(registered):
    model = nn.Sequential(Embeddings())[0]
    assert_runs_as_eager(model)
    (report,) = reports()
    assert [m.op for m in report.matches] == ["tests_extension::scaled_store"]
    (graph,) = lower(model, args()).graphs
    targets = [str(n.target) for n in graph.after.graph.nodes]
    assert "tests_extension.scaled_store.default" in targets
    assert not {"mul", "index_copy_"} & set(targets)
    assert "index_copy_" in [n.target for n in graph.before.graph.nodes]


def test_it_is_reported_as_text_and_as_json(registered):
    lowered = lower(Embeddings(), args())
    how = "[reference: the op declares no kernel]"
    assert f"scaled_store  rows=3 table=6x8  {how}" in str(lowered)
    (match,) = json.loads(lowered.to_json())["matches"]
    assert match["pattern"] == "scaled_store"
    assert match["shapes"] == {"rows": 3, "table": "6x8"}
    assert match["source"].startswith("test_extension.py:")
    assert match["reason"] == "the op declares no kernel"


@pytest.mark.parametrize(
    ("how", "code", "phrase"),
    [
        ("sum", "SCALED_STORE_SOURCE", "aten.add is written"),
        ("matrix", "SCALED_STORE_SOURCE", "the scale is (3, 8)"),
        ("accumulated", "ACCUMULATED_WRITE", "adds"),
        ("one column", "SLOT_INDEX", "whole rows"),
        ("read first", "ESCAPES", "aten.sum"),
    ],
)
def test_it_is_missed_with_its_own_reasons_and_ours(registered, how, code, phrase):
    lowered = lower(Embeddings(how), args())
    assert lowered.matches == []
    (miss,) = lowered.misses
    assert (miss.pattern, miss.code) == ("scaled_store", code)
    assert phrase in miss.message
    assert miss.source.startswith("test_extension.py:")
    (data,) = json.loads(lowered.to_json())["misses"]
    assert (data["code"], data["stage"]) == (code, miss.stage.label)
    assert f"missed scaled_store: {miss}" in str(lowered)
    torch._dynamo.reset()
    assert_runs_as_eager(Embeddings(how))


def test_it_leaves_other_patterns_their_sites(registered):
    model, inputs = build("page_offset", num_layers=2)
    lowered = lower(model, inputs)
    assert patterns_in(lowered, "qkv", "scaled_store") == ["qkv_cache"] * 2


def test_it_is_left_out_and_named_by_the_options(registered):
    assert lower(Embeddings(), args(), patterns=["-scaled_store"]).matches == []
    torch._dynamo.reset()
    assert len(lower(Embeddings(), args(), patterns=["scaled_store"]).matches) == 1


def test_without_it_nothing_is_said(extension):
    lowered = lower(Embeddings(), args())
    assert (lowered.matches, lowered.misses) == ([], [])
    with pytest.raises(ValueError, match="scaled_store"):
        lower(Embeddings(), args(), patterns=["scaled_store"])


def test_registering_again_changes_nothing_and_a_namesake_is_refused(registered):
    before = language.registered()
    assert language.register(registered.ScaledStore()) == registered.PATTERN
    assert contract.register(registered.OP) is registered.OP
    assert language.registered() == before

    @dataclass(frozen=True)
    class Namesake:
        name: str = "scaled_store"

    with pytest.raises(ValueError, match=r"'scaled_store' is taken by .*ScaledStore"):
        language.register(Namesake())
    assert language.registered() == before


def test_a_code_has_one_meaning(extension):
    meaning = language.CODES["SCALED_STORE_SOURCE"]
    language.register_code("SCALED_STORE_SOURCE", meaning)
    with pytest.raises(ValueError, match="SCALED_STORE_SOURCE"):
        language.register_code("SCALED_STORE_SOURCE", "something else")


def test_a_pattern_that_fails_is_named_and_costs_the_model_nothing(registered, monkeypatch):
    def fail(self, anchor, flow):
        raise ZeroDivisionError("theirs")

    monkeypatch.setattr(registered.ScaledStore, "match", fail)
    assert_runs_as_eager(Embeddings())
    (miss,) = reports()[-1].misses
    assert (miss.pattern, miss.code) == ("scaled_store", "INTERNAL")
    assert "'scaled_store' failed to match: ZeroDivisionError: theirs" in miss.message
    assert miss.source.startswith("test_extension.py:")
    assert "TILEWRIGHT_REPRO" in miss.hint


def test_an_op_that_refuses_makes_a_miss_and_leaves_the_graph(registered):
    x, table, rows = args()
    model = Embeddings().double()
    lowered = lower(model, (x.double(), table.double(), rows))
    assert lowered.matches == []
    (miss,) = lowered.misses
    assert miss.code == "UNSUPPORTED"
    assert "float32" in miss.message
    before, after = (str(g.graph) for g in (lowered.graphs[0].before, lowered.graphs[0].after))
    assert before == after


def test_the_op_is_a_good_function_to_call_by_hand(extension):
    arguments, again = (extension.OP.sample_inputs("small") for _ in range(2))
    extension.OP.call(arguments)
    again.table.index_copy_(0, again.rows, again.x * again.scale)
    assert torch.equal(arguments.table, again.table)
    with pytest.raises(contract.ArgumentError, match="scale: expected shape"):
        torch.ops.tests_extension.scaled_store(
            arguments.x, arguments.scale[:2], arguments.table, arguments.rows
        )
