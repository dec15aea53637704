"""Tests tuning without a GPU: when a measurement is requested, with which arguments, and what
happens to its result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import interpret
from tilewright.codegen.qkv.plan import HERE
from tilewright.codegen.qkv.tune import Machine, name_of
from tilewright.codegen.targets import SM90
from tilewright.ops.qkv import lowering, tuning
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.qkv_cache import OP
from tilewright.ops.qkv.samples import AttentionCase

CASE = AttentionCase(
    "llama", num_tokens=5, hidden=256, head_dim=64, rope_style="half", rotary_dim=64
)


class Bench:
    """Stands for the GPU. It has times by the name of a trial, and records the requests and the
    modes of torch during them."""

    def __init__(self):
        self.fastest = "library"
        self.asked = []
        self.modes = []
        self.error = None
        self.capturing = False

    def __call__(self, a, case, index, choices):
        self.asked.append((a, case, index))
        self.modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        if self.error is not None:
            raise self.error
        return [1e-6 if name_of(choice) == self.fastest else 2e-6 for choice in choices]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Makes this machine look like an H200 with a cache folder of its own."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "machine", lambda index: Machine("H200", (("triton", "0"),)))
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "gpu_index", lambda device: 0)
    monkeypatch.setattr(tuning, "device_for", lambda target: 0 if target == "sm90" else None)
    monkeypatch.setattr(lowering, "target_of", lambda device: SM90)
    bench = Bench()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bench.capturing)
    monkeypatch.setattr(tuning, "_time", bench)
    return bench


def measured(tokens=5, **changes):
    """Returns the lowering that a call takes under `tune`, or None if it is the plan's choice."""
    a = OP.sample_inputs(replace(CASE, num_tokens=tokens))
    return tuning.measured_lowering(prepare(replace(a, tune=True, **changes)), SM90)


def lowering_of(a):
    return interpret(OP, a, num_sms=SM90.num_sms).outcome.name


def test_a_launch_takes_what_was_measured_here(bench):
    a = OP.sample_inputs(CASE)
    assert lowering_of(a) == "swapped"
    assert bench.asked == []
    assert lowering_of(replace(a, tune=True)) == "library"
    assert measured().source == HERE
    assert len(bench.asked) == 1


def test_a_bucket_is_measured_once_and_another_at_its_own_first_need(bench):
    for tokens in (5, 16, 1, 5):
        measured(tokens=tokens)
    assert [case.num_tokens for _, case, _ in bench.asked] == [16]
    measured(tokens=17)
    assert [case.num_tokens for _, case, _ in bench.asked] == [16, 32]


def test_a_static_count_is_measured_as_it_is(bench):
    measured(static_tokens=True)
    assert [case.num_tokens for _, case, _ in bench.asked] == [5]


def test_the_next_process_reads_what_was_measured(bench):
    first = measured()
    tuning._known.clear()
    assert measured() == first
    assert len(bench.asked) == 1


def test_nothing_is_measured_while_a_graph_is_captured(bench):
    bench.capturing = True
    assert measured() is None
    assert bench.asked == []
    bench.capturing = False
    assert measured().source == HERE
    bench.capturing = True
    tuning._known.clear()  # another process finds the result on disk
    assert measured().source == HERE
    assert len(bench.asked) == 1


def test_where_measuring_fails_the_plan_stands_and_it_is_said_once(bench, caplog):
    bench.error = torch.OutOfMemoryError("no room")
    for _ in range(2):
        assert measured() is None
    assert len(bench.asked) == 1
    (record,) = [r for r in caplog.records if "tune" in r.message]
    assert "no room" in record.message


def test_measuring_has_a_thread_without_the_callers_modes(bench):
    with torch.inference_mode():
        measured()
    assert bench.modes == [(False, False)]


def test_a_report_tells_measured_from_not_yet_measured(bench):
    a = OP.sample_inputs(CASE, device="meta")
    report = OP.plan_for(replace(a, tune=True), "sm90")
    lines = report.reason.splitlines()
    assert "measured here" in lines[0]
    assert all("not measured here yet" in line for line in lines[1:])
    assert [case.num_tokens for _, case, _ in bench.asked] == [16]
    static = OP.plan_for(replace(a, tune=True, static_tokens=True), "sm90")
    assert static.name == "library"
    assert "us measured here, best of" in static.reason
    assert "measured here" not in OP.plan_for(a, "sm90").reason


def test_a_report_for_a_chip_that_is_not_here_measures_nothing(bench):
    a = replace(OP.sample_inputs(CASE, device="meta"), tune=True)
    assert OP.plan_for(a, "sm100") == OP.plan_for(replace(a, tune=False), "sm100")
    assert bench.asked == []
