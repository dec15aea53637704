"""Tests that experts that run one by one are reported by name, with the setting that helps.

They are in the report of `lower`, in the backend's report and in the log. The model runs as before.
"""

from __future__ import annotations

import logging

import pytest
import torch

from tests.agreement import assert_no_worse, upcast
from tests.found import matches_of, misses_of, patterns_of
from tests.models.moe_loops import LOOPS, build
from tilewright.compiler import lower, reports


@pytest.mark.parametrize("name", LOOPS)
def test_lower_says_that_the_experts_run_one_by_one(name):
    torch._dynamo.reset()
    lowered = lower(*build(name))
    codes = [miss.code for miss in misses_of(lowered, "fused_moe", "capture")]
    assert not matches_of(lowered, "fused_moe", "capture")
    # One miss for each graph that shows the loop.
    assert 1 <= codes.count("EXPERT_LOOP") <= len(lowered.graphs), str(lowered)
    assert "GRAPH_BREAK" in codes
    # After a break, no row belongs to an expert.
    assert set(codes) <= {"EXPERT_LOOP", "GRAPH_BREAK", "EMPTY"}
    assert all(
        "torch._grouped_mm" in m.hint
        for m in misses_of(lowered, "fused_moe", "capture")
        if m.code == "EXPERT_LOOP"
    )


def test_the_backend_reports_and_logs_it_and_the_model_runs(caplog):
    torch._dynamo.reset()
    module, args = build("one_hot_nonzero")
    before = set(map(id, reports()))
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="tilewright"):
        options = {"inner": "eager", "patterns": sorted(patterns_of("fused_moe"))}
        compiled = torch.compile(module, backend="tilewright", options=options)
        assert torch.equal(compiled(*args), module(*args))
    new = [report for report in reports() if id(report) not in before]
    assert "EXPERT_LOOP" in {
        miss.code for report in new for miss in misses_of(report, "fused_moe", "capture")
    }
    assert "EXPERT_LOOP" in caplog.text


def test_a_captured_loop_is_told_and_runs():
    torch._dynamo.reset()
    module, (x,) = build("where_each")
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        out, expected, exact = compiled(x), module(x), upcast(module)(x.double())
    assert_no_worse(out, expected, exact, "where_each")
    (miss,) = misses_of(reports()[-1], "fused_moe")
    assert miss.code == "EXPERT_LOOP"
    assert "depends on data" in miss.message


def test_counts_that_nothing_says_are_of_experts_are_no_loop():
    """Counts are no loop over experts if no name says so. (This file's folder has such a name, as a
    user's file may.)"""
    torch._dynamo.reset()

    def best(x):
        return torch.nn.functional.one_hot(x.topk(2, -1)[1], 4).sum((0, 1))

    assert not misses_of(lower(best, (torch.randn(5, 4),)), "fused_moe")


def test_transformers_are_told_their_own_setting():
    pytest.importorskip("transformers", reason="Hugging Face models need the extra [models]")
    from tests.compiler.test_hf_moe import built

    torch._dynamo.reset()
    layer = built("mixtral", "eager").model.layers[-1].mlp
    lowered = lower(layer, (torch.randn(1, 5, layer.gate.weight.shape[1]).bfloat16(),))
    (miss,) = (m for m in misses_of(lowered, "fused_moe", "capture") if m.code == "EXPERT_LOOP")
    assert "experts_implementation='grouped_mm'" in miss.hint
