"""Tests that compiled objects and calls are freed once their user has dropped them.

`benchmarks/soak.py` tests the same with 100,000 calls and 200 models, and measures the memory of
the process.
"""

from __future__ import annotations

import gc
import types
import weakref
from pathlib import Path

import pytest
import torch
from torch import fx

from tests.compiler.broken_order import read_between
from tests.compiler.running import compiled
from tests.compiler.steps import Layer, make_args, normed, plain
from tilewright.compiler import reports
from tilewright.compiler.dataflow import access, operations

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def newly():
    """Excludes objects that existed before the test from searches and from garbage collection."""
    gc.collect()
    gc.freeze()


def reached(things) -> list:
    """Returns every object that `things` keep alive, without the contents of modules and
    classes."""
    found, open_ = {}, list(things)
    while open_:
        thing = open_.pop()
        if id(thing) in found or isinstance(thing, (type, types.ModuleType, types.FunctionType)):
            continue
        found[id(thing)] = thing
        open_ += gc.get_referents(thing)
    return list(found.values())


def alive(kind) -> int:
    gc.collect()
    return sum(issubclass(type(thing), kind) for thing in gc.get_objects())


@pytest.mark.parametrize("step", [normed, read_between])
def test_a_kept_report_holds_no_part_of_the_graph(step):
    """The report has a match, and a miss with its culprits."""
    compiled(Layer(step))(*make_args())
    (report,) = reports()
    assert report.matches or report.misses
    held = reached([report])
    parts = (torch.Tensor, torch.nn.Module, fx.Graph, fx.Node, torch.SymInt)
    assert [thing for thing in held if issubclass(type(thing), parts)] == []


def test_a_kept_report_says_what_the_report_said():
    compiled(Layer(read_between))(*make_args())
    (report,) = reports()
    (miss,) = [m for m in report.misses if m.code == "CACHE_READ"]
    assert miss.source.startswith("broken_order.py") or "steps.py" in miss.source
    assert str(miss) in report.text
    assert report.data["misses"][0]["code"] == report.misses[0].code
    assert report.nodes > 10


def test_the_graph_of_a_kept_report_is_asked_for_elsewhere():
    compiled(Layer(plain))(*make_args())
    with pytest.raises(AttributeError, match="lower"):
        _ = reports()[-1].after


def test_models_that_are_dropped_are_freed():
    """The weights of dropped models are freed, and so is every graph that was made from the
    models."""

    def cycle():
        model = Layer(plain)
        step = compiled(model, verify=True)
        step(*make_args())
        assert reports()[-1].matches
        weight = weakref.ref(model.k_proj.weight)
        del model, step
        torch._dynamo.reset()
        gc.collect()
        assert weight() is None

    cycle()  # objects that are made once stay
    graphs, tensors = alive(fx.GraphModule), alive(torch.Tensor)
    for _ in range(3):
        cycle()
    assert alive(fx.GraphModule) <= graphs
    assert alive(torch.Tensor) <= tensors


def test_what_torch_was_asked_is_not_kept_for_ever(monkeypatch):
    """Asks about operations that no table has, each with another number. The answers must not be
    kept."""
    monkeypatch.setattr(access, "MAX_REMEMBERED", 3)
    monkeypatch.setattr(operations, "_ASKED", {})

    def step(m, x, *rest):
        for i in range(8):
            x = torch.special.logit(x, eps=0.01 * (i + 1))
        return x, plain(m, x, *rest)

    compiled(Layer(step))(*make_args())
    assert 0 < len(operations._ASKED) <= 3


def test_calls_leave_nothing_behind():
    """Each call has new addresses and another number of tokens. Nothing of a call may be kept."""
    model = Layer(plain)

    def step(m, x, k_cache, v_cache, slots):
        k, v = (p(x).view(x.shape[0], -1, 16) for p in (m.k_proj, m.v_proj))
        k_cache.view(-1, *k_cache.shape[2:])[slots] = k
        v_cache.view(-1, *v_cache.shape[2:])[slots] = v
        return m.q_proj(x)

    model.step = step
    run = torch.compile(model, backend="tilewright", options={"inner": "eager"}, dynamic=True)

    def call(count):
        x, *caches, slots = make_args()
        run(x[:count].clone(), *caches, slots[:count].clone())

    for count in (2, 3, 4, 5):
        call(count)
    assert reports()[-1].matches
    tensors, graphs = alive(torch.Tensor), alive(fx.GraphModule)
    for i in range(400):
        call(2 + i % 4)
    assert alive(torch.Tensor) <= tensors
    assert alive(fx.GraphModule) <= graphs


@pytest.mark.parametrize(
    ("part", "backend", "device", "used"),
    [
        ("calls", "stock", "cuda", True),
        ("requests", "tilewright", "cpu", True),
        ("requests", "tilewright", "cuda", False),
        ("requests", "stock", "cpu", False),
    ],
)
def test_a_kept_row_names_the_inner_compiler_only_where_it_is_used(
    part, backend, device, used, monkeypatch
):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    import soak

    monkeypatch.setattr(soak, "DEVICE", device)
    assert ("inner" in soak.case(part, backend, "eager", 1)) == used
