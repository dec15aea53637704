"""Tests that `lower` and `torch.compile` report code that Dynamo did not capture, once for each
place."""

from __future__ import annotations

import inspect
import json
import logging
import re
import time

import pytest
import torch

from tests.compiler.running import build
from tests.found import misses_of
from tilewright.compiler import StrictError, lower, reports
from tilewright.patterns.language import CAPTURE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def branch(x):
    y = x * 2
    if y.sum() > 0:
        return y + 1
    return y - 1


def number(x):
    y = x + 1
    return y * x.sum().item()


def loop(x):
    for _ in range(3):
        x = x * 2
        torch._dynamo.graph_break()
    return x


def branch_in_loop(x):
    for i in range(3):
        x = x * 2
        if (x > i).any():
            x = x + 1
    return x


def listed(x):
    y = x + 1
    return y * len(x.long().tolist())


def timed(x):
    y = x + 1
    time.perf_counter()
    return y * 2


def experts_in_turn(x, w1):
    for expert in w1.unbind(0):
        x = x * 2
        if (x > expert).any():
            x = x + expert
    return x


def block(x):
    try:
        x = x * 2
        torch._dynamo.graph_break()
        x = x + 1
    finally:
        x = x * 3
    return x


def helper(x):
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def nested(x):
    return helper(x + 1) * 2


@torch.compiler.disable
def update(cache, x):
    cache.add_(x)


def disabled(x):
    y = x + 1
    update(x, y)
    return y * 2


def only_disabled(x):
    update(x, x)
    return x


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


BREAKS = {
    "branch": (branch, branch, "if y.sum()", "depends on the data"),
    "branch in loop": (branch_in_loop, branch_in_loop, "(x > i).any()", "depends on the data"),
    "number": (number, number, ".item()", "needs a tensor's value as a Python number"),
    "list of numbers": (listed, listed, ".tolist()", "needs a tensor's value as a Python number"),
    "builtin": (timed, timed, "time.perf", "Dynamo cannot trace time.perf_counter"),
    "loop": (loop, loop, "graph_break()", "Dynamo gives up loop()"),
    "block": (block, block, "graph_break()", "Dynamo gives up block()"),
    "nested": (nested, helper, "graph_break()", "graph_break"),
    "disabled": (disabled, disabled, "update(", "torch.compiler.disable"),
    "no operation before": (only_disabled, only_disabled, "update(", "torch.compiler.disable"),
}


def breaks_in(misses):
    return [m for m in misses if m.code == "GRAPH_BREAK"]


@pytest.mark.parametrize("name", BREAKS)
def test_lower_tells_every_break_once_with_its_place(name):
    model, where, text, phrase = BREAKS[name]
    lowered = lower(model, (torch.ones(3),))
    (miss,) = misses_of(lowered, "capture")
    assert (miss.code, miss.pattern, miss.weight) == ("GRAPH_BREAK", CAPTURE, "lost")
    assert f"(test_breaks.py:{line_of(where, text)})" in miss.message
    assert phrase in miss.message
    assert miss.hint
    torch._dynamo.reset()
    with pytest.raises(StrictError, match="GRAPH_BREAK"):
        lower(model, (torch.ones(3),), strict=True)


@pytest.mark.parametrize("name", ["branch", "branch in loop"])
def test_the_two_texts_of_a_branch_have_one_hint(name):
    """Dynamo has two texts for a branch. Its own hint for the second text is about clamping, and
    does not mention the branch."""
    lowered = lower(BREAKS[name][0], (torch.ones(3),))
    (miss,) = misses_of(lowered, "capture")
    assert miss.hint == "compute both sides and choose with torch.where, or use torch.cond"


def sum_if_equal(held, x):
    return held + x if held.shape[0] == x.shape[0] else held


def guarded(x, cache):
    return sum_if_equal(cache[: x.sum().item()], x)


def test_what_only_data_tell_is_named():
    """With scalars captured in the graph, the graph breaks at the comparison of a scalar, and not
    at `.item()`."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        lowered = lower(guarded, (torch.ones(3, dtype=torch.long), torch.ones(9)))
    (miss,) = misses_of(lowered, "capture")
    assert re.search(r"a branch depends on a number that only the data decides: Eq", miss.message)
    assert "a Python number in its place" in miss.hint


def causal_if_square(q, k):
    square = q.shape[2] == k.shape[2]
    return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=square)


def test_a_call_that_fails_while_traced_says_how():
    compiled = torch.compile(
        causal_if_square, backend="tilewright", dynamic=True, options={"inner": "eager"}
    )
    before = len(reports())
    compiled(torch.ones(1, 2, 5, 16), torch.ones(1, 2, 9, 16))
    told = [miss for report in reports()[before:] for miss in misses_of(report, "capture")]
    assert "a call fails while it is traced: scaled_dot_product_attention()" in told[0].message
    assert "SymBool" in told[0].message
    assert "dynamic=False" in told[0].hint


def test_a_branch_in_a_loop_over_experts_has_the_hint_for_experts_too():
    lowered = lower(experts_in_turn, (torch.ones(3), torch.ones(2, 3)))
    (miss,) = misses_of(lowered, "capture")
    assert "depends on the data" in miss.message
    assert "torch.where" in miss.hint
    assert "torch._grouped_mm" in miss.hint


@pytest.mark.parametrize("name", BREAKS)
def test_torch_compile_reports_and_warns_once(name, caplog, tmp_path):
    model, where, text, _ = BREAKS[name]
    path = tmp_path / "report.jsonl"
    options = {"inner": "eager", "report": str(path)}
    before = len(reports())
    with caplog.at_level(logging.WARNING, "tilewright"):
        expected = model(torch.ones(3))
        assert torch.equal(torch.compile(model, backend="tilewright", options=options)(
            torch.ones(3)), expected)  # fmt: skip
    told = [m for report in reports()[before:] for m in breaks_in(misses_of(report, "capture"))]
    place = f"(test_breaks.py:{line_of(where, text)})"
    assert told
    assert all(place in miss.message for miss in told)
    (record,) = (r for r in caplog.records if "GRAPH_BREAK" in r.getMessage())
    assert place in record.getMessage()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(place in text for line in lines for text in line["graph_breaks"])
    assert {m["weight"] for line in lines for m in line["misses"]} == {"lost"}


@pytest.mark.parametrize(
    "name", [n for n in BREAKS if n not in ("no operation before", "branch in loop")]
)
def test_strict_raises_for_a_break_under_torch_compile(name):
    model = BREAKS[name][0]
    for strict in (True, ["capture"]):
        torch._dynamo.reset()
        options = {"inner": "eager", "strict": strict}
        with pytest.raises(Exception, match=r"GRAPH_BREAK|graph_break") as raised:
            torch.compile(model, backend="tilewright", options=options)(torch.ones(3))
        kinds = (torch._dynamo.exc.BackendCompilerFailed, torch._dynamo.exc.Unsupported)
        assert isinstance(raised.value, kinds)
    torch._dynamo.reset()
    options = {"inner": "eager", "strict": ["qkv_cache"]}
    torch.compile(model, backend="tilewright", options=options)(torch.ones(3))


def test_strict_raises_with_dynamos_words_for_a_branch_in_a_loop():
    options = {"inner": "eager", "strict": True}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent branching"):
        torch.compile(branch_in_loop, backend="tilewright", options=options)(torch.ones(3))


def test_breaks_under_another_backend_are_none_of_ours():
    before = reports()
    torch.compile(loop, backend="eager")(torch.ones(3))
    assert reports() == before


def test_breaks_are_told_after_a_reset_too():
    """torch._dynamo.reset() forgets the callbacks that other code registered."""
    for _ in range(2):
        before = len(reports())
        torch.compile(loop, backend="tilewright")(torch.ones(3))
        assert [m.code for m in misses_of(reports()[before:][0], "capture")] == ["GRAPH_BREAK"]
        torch._dynamo.reset()


def produces(x):
    yield x + 1


def test_a_model_of_which_there_is_no_graph_is_told():
    lowered = lower(produces, (torch.ones(3),))
    (miss,) = misses_of(lowered, "capture")
    assert (miss.code, miss.weight, lowered.graphs) == ("NO_GRAPH", "lost", ())
    assert "torch.compiler.disable" in miss.hint
    assert "nothing to fuse" not in str(lowered)
    with pytest.raises(StrictError, match="NO_GRAPH"):
        lower(produces, (torch.ones(3),), strict=True)


# --- what runs after a break in lower -------------------------------------------------------------


def test_what_comes_out_of_a_graph_is_zeros_after_a_break():
    seen = []

    def model(x, lengths):
        ids = lengths + 7
        torch._dynamo.graph_break()
        seen.append(ids.tolist())
        longest = int(ids.max())
        return x.new_zeros(longest + 1, 2)

    for _ in range(3):  # after some calls, memory of earlier calls is present
        torch._dynamo.reset()
        torch.full((64,), 10**15)
        lowered = lower(model, (torch.ones(3), torch.arange(4)))
        assert "on zeros in place of the graph's results" not in str(lowered)
    assert seen == [[0, 0, 0, 0]] * 3


@torch.compiler.disable
def share(y):
    return 10 // int(y.sum())


def test_an_error_on_zeros_is_part_of_the_break():
    """This holds after one graph as well as after several."""

    def model(x):
        y = x.t()[1:] + 1
        return x + share(y)

    lowered = lower(model, (torch.ones(3, 4),))
    assert len(lowered.graphs) == 1
    first, miss = misses_of(lowered, "capture")
    assert "torch.compiler.disable" in first.message
    assert miss.code == "GRAPH_BREAK"
    assert (
        "after this graph failed on zeros in place of the graph's results: ZeroDivis"
        in miss.message
    )


def test_an_error_before_any_graph_is_the_models():
    def model(x):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        lower(model, (torch.ones(3),))


def test_what_our_pass_cannot_read_is_a_miss_of_lower(monkeypatch):
    from tilewright.compiler import fuse

    def broken(graph, target):
        raise ArithmeticError("injected")

    monkeypatch.setattr(fuse, "build_view", broken)
    model, args = build("page_offset")
    lowered = lower(model, args)
    (miss,) = lowered.misses  # no pattern saw an operation
    assert miss.code == "INTERNAL"
    assert "ArithmeticError: injected" in miss.message
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="injected"):
        lower(model, args, strict=True)
