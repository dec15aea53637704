"""Tests tuning on the GPU of this machine: the times are real and are stored, and no memory of the
user is touched."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tilewright.codegen.qkv.plan import HERE
from tilewright.compiler import lower
from tilewright.ops.qkv import tuning
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.qkv_cache import OP
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime.device import device_target, target_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

CASE = AttentionCase(
    "tuned", num_tokens=9, hidden=2048, num_heads=8, num_kv_heads=2, head_dim=128, num_pages=40,
    page_size=16, rope_style="half", rotary_dim=128,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_known", {})
    return tmp_path / "tuned"


def measured(a):
    return tuning.measured_lowering(prepare(a), target_of(a.x.device))


def times(folder):
    return [json.loads(f.read_text())["seconds"] for f in folder.glob("*/*/times.json")]


def test_the_fastest_is_taken_and_only_named_slots_are_written(folder):
    a = replace(OP.sample_inputs(CASE, device="cuda"), tune=True)
    plain = OP.sample_inputs(CASE, device="cuda")
    got, want = OP.call(a), OP.call(plain)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    slots = a.slot_mapping.tolist()
    for ours, theirs in ((a.k_cache, plain.k_cache), (a.v_cache, plain.v_cache)):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        kept = torch.ones(ours.shape[0] * ours.shape[1], dtype=torch.bool)
        kept[slots] = False
        rows = [c.flatten(0, 1)[kept.to("cuda")] for c in (ours, theirs)]
        assert torch.equal(*rows)
    (taken,) = times(folder)
    assert len(taken) >= 4
    assert all(2e-6 < seconds < 1e-3 for seconds in taken.values())
    choice = measured(a)
    assert choice.source == HERE
    assert choice.seconds == min(taken.values())


def test_a_second_process_measures_nothing(folder, monkeypatch):
    a = replace(OP.sample_inputs(CASE, device="cuda"), tune=True)
    first = measured(a)
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_time", lambda *a: pytest.fail("measured again"))
    assert measured(a) == first


def test_a_capture_measures_nothing_and_works(folder):
    a = replace(OP.sample_inputs(CASE, device="cuda"), tune=True)
    plain = OP.sample_inputs(CASE, device="cuda")
    want = OP.call(plain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = OP.call(a)
    graph.replay()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert times(folder) == []


def test_inside_a_memory_pool_nothing_stays_behind(folder):
    """Tuning leaves nothing in a memory pool that is in use, as in the warm-up of Inductor's CUDA
    graphs. The memory that tuning allocates comes from elsewhere."""
    a = replace(OP.sample_inputs(replace(CASE, num_tokens=20), device="cuda"), tune=True)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        choice = measured(a)
    assert choice.source == HERE
    assert sum(s["allocated_size"] for s in pool.snapshot()) == 0


def test_lower_measures_for_the_gpu_at_hand(folder):
    a = OP.sample_inputs(CASE, device="cuda")
    target = device_target(a.x.device)
    assert target is not None

    def model(x, slots, cos, sin, q_weight, k_weight, v_weight, keys, values):
        q, k, v = (
            torch.nn.functional.linear(x, w.flatten(0, 1)).view(x.shape[0], -1, 128)
            for w in (q_weight, k_weight, v_weight)
        )
        half = [torch.cat((-t[..., 64:], t[..., :64]), -1) for t in (q, k)]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        keys.view(-1, 2, 128)[slots] = k * cos + half[1] * sin
        values.view(-1, 2, 128)[slots] = v
        return q * cos + half[0] * sin

    tables = [t.to(a.x.dtype) for t in (a.cos, a.sin)]
    weights = (a.q_weight, a.k_weight, a.v_weight)
    args = (a.x, a.slot_mapping, *tables, *weights, a.k_cache, a.v_cache)
    lowered = lower(model, args, target=target.name, tune=True)
    (site,) = lowered.matches
    assert "measured here, best of" in site.reason
    assert len(times(folder)) == 1
    assert tuning.describe(target.name) in lowered.notes
    assert torch.cuda.get_device_name() in tuning.describe(target.name)
