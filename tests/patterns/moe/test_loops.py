"""Experts that run one by one are told by name, with the setting that helps: in `lower`'s report,
in the backend's, and in the log; and the model runs as it did."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.agreement import assert_no_worse, upcast
from tests.found import codes_of, matches_of, misses_of, patterns_of
from tests.models.moe_loops import LOOPS, E, build, where_each
from tilewright.compiler import lower, reports


@pytest.mark.parametrize("name", LOOPS)
def test_lower_says_that_the_experts_run_one_by_one(name):
    torch._dynamo.reset()
    _, breaks, code = LOOPS[name]
    lowered = lower(*build(name))
    codes = [miss.code for miss in misses_of(lowered, "fused_moe", "capture")]
    assert not matches_of(lowered, "fused_moe", "capture")
    # One for each graph that shows it.
    assert 1 <= codes.count(code) <= len(lowered.graphs), str(lowered)
    assert ("GRAPH_BREAK" in codes) == breaks
    assert set(codes) <= {code, "GRAPH_BREAK", "EMPTY"}  # behind a break no row is of an expert
    assert all(
        "torch._grouped_mm" in m.hint
        for m in misses_of(lowered, "fused_moe", "capture")
        if m.code == code
    )


@pytest.mark.parametrize("name", ["one_hot_nonzero", "masked_stacked"])
def test_the_backend_reports_and_logs_it_and_the_model_runs(name, caplog):
    torch._dynamo.reset()
    module, args = build(name)
    before = set(map(id, reports()))
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="tilewright"):
        options = {"inner": "eager", "patterns": sorted(patterns_of("fused_moe"))}
        compiled = torch.compile(module, backend="tilewright", options=options)
        assert torch.equal(compiled(*args), module(*args))
    new = [report for report in reports() if id(report) not in before]
    code = LOOPS[name][2]
    assert code in {
        miss.code for report in new for miss in misses_of(report, "fused_moe", "capture")
    }
    assert code in caplog.text


def captured(step):
    """The report of a loop in one graph that was no worse than eager."""
    torch._dynamo.reset()
    module, (x,) = build("where_each")
    module.step = step
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        out, expected, exact = compiled(x), module(x), upcast(module)(x.double())
    assert_no_worse(out, expected, exact, step.__name__)
    return reports()[-1]


def test_a_loop_over_all_experts_that_dynamo_captures_is_fused():
    report = captured(where_each)
    (site,) = matches_of(report, "fused_moe")
    assert (site.shapes["experts"], site.shapes["gate"]) == (E, "loop")
    assert not misses_of(report, "fused_moe")


def bent(expert_of=lambda e: e, number_of=lambda e: e, experts=range(E)):
    """The loop with other weights, other tokens, or some experts."""

    def step(m, x, weights, ids):
        out = torch.zeros_like(x)
        for e in experts:
            token, slot = torch.where(ids == number_of(e))
            y = m.expert(x[token], expert_of(e)) * weights[token, slot, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out

    return step


def weighed_by_another_slot(m, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        y = m.expert(x[token], e) * weights[token, 1 - slot, None]
        out = out.index_add(0, token, y.to(out.dtype))
    return out


def with_rows_to_spare(m, x, weights, ids):
    out = torch.zeros(x.shape[0] + 3, x.shape[1], dtype=x.dtype)
    for e in range(E):
        token, slot = torch.where(ids == e)
        y = m.expert(x[token], e) * weights[token, slot, None]
        out = out.index_add(0, token, y.to(out.dtype))
    return out


def in_modules(m, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, slot = torch.where(ids == e)
        y = expert(x[token]) * weights[token, slot, None].to(x.dtype)
        out = out.index_add(0, token, y)
    return out


@pytest.mark.parametrize(
    "step",
    [bent(expert_of=lambda e: (e + 1) % E), bent(number_of=lambda e: (e + 1) % E),
     bent(experts=range(1, E)), bent(experts=[0, 1, 2, 3, 3]), weighed_by_another_slot,
     with_rows_to_spare, in_modules],
)  # fmt: skip
def test_a_captured_loop_that_is_no_mixture_of_one_stack_is_told(step):
    report = captured(step)
    assert not matches_of(report, "fused_moe")
    assert codes_of(report, "fused_moe") == {"EXPERT_LOOP"}


def of_more_experts(m, x, weights, ids):
    """The choice is among more experts than the loop has, as on one of several devices."""
    return where_each(m, x, weights, ids + (ids == 2) * E)


def test_experts_that_are_not_in_the_stack_are_left_out():
    assert matches_of(captured(of_more_experts), "fused_moe")


def test_counts_that_nothing_says_are_of_experts_are_no_loop():
    """This file lies in a folder of that name, as a user's may."""
    torch._dynamo.reset()

    def best(x):
        return torch.nn.functional.one_hot(x.topk(2, -1)[1], 4).sum((0, 1))

    assert not misses_of(lower(best, (torch.randn(5, 4),)), "fused_moe")


def test_a_count_that_is_asked_for_stays():
    """How many tokens an expert has goes out: the loop is fused, and that is found out still."""
    torch._dynamo.reset()
    module, (x,) = build("where_each")
    module.step = counted
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        (out, found), (expected, exact) = compiled(x), module(x)
    assert len(matches_of(reports()[-1], "fused_moe")) == 1
    assert found.shape == exact.shape
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def counted(m, x, weights, ids):
    return where_each(m, x, weights, ids), torch.where(ids == 1)[0]


def test_transformers_are_told_their_own_setting():
    pytest.importorskip("transformers", reason="Hugging Face models need the extra [models]")
    from tests.compiler.test_hf_moe import built

    torch._dynamo.reset()
    lowered = lower(built("mixtral", "eager"), (torch.arange(3, 8)[None],), {"use_cache": False})
    (miss,) = (m for m in misses_of(lowered, "fused_moe", "capture") if m.code == "EXPERT_LOOP")
    assert "experts_implementation='grouped_mm'" in miss.hint
