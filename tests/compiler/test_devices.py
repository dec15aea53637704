"""Tests that a graph is rewritten only for a device for which its ops have kernels. For another
device it stays as it was."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.compiler.running import build, compiled, run_both, same_bits
from tests.found import matches_of, misses_of, patterns_in
from tests.models import moe_idioms
from tilewright.codegen import targets
from tilewright.codegen.targets import get_target
from tilewright.compiler import StrictError, backend, lower, reports
from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options
from tilewright.compiler.verify.sites import verify_sites
from tilewright.ops import contract, fused_op
from tilewright.ops.runtime import device as devices
from tilewright.patterns.qkv.qkv_cache import QkvCache

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch):
    """Undoes the setting that is made for all tests."""
    monkeypatch.delenv("TILEWRIGHT_EVERYWHERE", raising=False)


def projection(x, weights, k_cache, v_cache, slots):
    """Has x [T, C], weights of 4, 2 and 2 heads of 32, and caches [S, 2, 32]."""
    q, k, v = (torch.nn.functional.linear(x, weight) for weight in weights)
    k_cache.index_copy_(0, slots, k.view(-1, 2, 32))
    v_cache.index_copy_(0, slots, v.view(-1, 2, 32))
    return q * 2


def its_arguments(**how):
    floats = {"dtype": torch.bfloat16, **how}
    weights = [torch.ones(32 * heads, 64, **floats) for heads in (4, 2, 2)]
    caches = (torch.zeros(8, 2, 32, **floats) for _ in "kv")
    return torch.ones(3, 64, **floats), weights, *caches, torch.ones(3, dtype=torch.int64, **how)


@pytest.mark.parametrize("strict", [False, True])
def test_on_the_cpu_a_graph_stays_as_it_is_and_the_report_says_so_once(strict, caplog):
    model, args = build("page_offset", num_layers=2)
    with caplog.at_level(logging.WARNING, "tilewright"):
        (expected, eager), (actual, ours) = run_both(model, args, strict=strict)
    assert same_bits([actual, *ours], [expected, *eager])
    (report,) = reports()
    assert report.matches == ()
    (miss,) = [miss for miss in report.misses if miss.code == "NO_KERNELS"]
    assert (miss.scope, miss.weight) == ("layers.0.self_attn", "advice")
    assert miss.source.startswith("cache_writes.py:")
    assert "no kernels for the CPU" in miss.message
    assert "qkv_cache x2" in miss.message
    assert '"everywhere": True' in miss.hint
    assert len([line for line in str(report).splitlines() if "NO_KERNELS" in line]) == 1
    assert caplog.records == []


def test_inductor_gets_the_very_graph_that_dynamo_traced(monkeypatch):
    given = []

    def compile_fx(gm, inputs, config_patches):
        given.append((gm, config_patches))
        return gm.forward

    def traced(gm, inputs):
        given.append(gm)
        return backend.tilewright(gm, inputs)

    monkeypatch.setattr(backend._compat, "compile_fx", compile_fx)
    torch.compile(projection, backend=traced)(*its_arguments())
    dynamos, (inductors, patches) = given
    assert inductors is dynamos
    assert patches == {}


def test_the_option_and_the_variable_fuse_anyway(monkeypatch):
    def fused(**options):
        torch._dynamo.reset()
        compiled(projection, **options)(*its_arguments())
        return patterns_in(reports()[-1], "qkv")

    assert fused() == []
    assert fused(everywhere=True) == ["qkv_cache"]
    monkeypatch.setenv("TILEWRIGHT_EVERYWHERE", "1")
    assert fused() == ["qkv_cache"]
    assert fused(everywhere=False) == []
    monkeypatch.setenv("TILEWRIGHT_EVERYWHERE", "0")
    assert fused() == []


def test_what_is_shown_is_what_a_gpu_gets():
    assert patterns_in(lower(projection, its_arguments()), "qkv") == ["qkv_cache"]
    errors = verify_sites(projection, its_arguments())
    assert [(e.pattern, e.good) for e in errors] == [("qkv_cache", True)]


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_tensors_that_stand_for_a_gpu_s_match(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("fakes of a GPU that is not there")
    found = []

    def backend(gm, inputs):
        found.append(fuse(gm, Options()))
        return gm.forward

    with FakeTensorMode():
        torch.compile(projection, backend=backend)(*its_arguments(device=device))
    assert patterns_in(found[0], "qkv") == ["qkv_cache"]


def added(x, weights, k_cache, v_cache, slots):
    k_cache.index_add_(0, slots, torch.nn.functional.linear(x, weights[1]).view(-1, 2, 32))


def test_where_nothing_would_be_fused_a_miss_is_no_loss(caplog):
    with caplog.at_level(logging.WARNING, "tilewright"):
        compiled(added, strict=True)(*its_arguments())
    assert [(m.code, m.weight) for m in reports()[-1].misses] == [("ACCUMULATED_WRITE", "advice")]
    assert caplog.records == []
    assert lower(added, its_arguments()).lost
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match="ACCUMULATED_WRITE"
    ) as raised:
        compiled(added, strict=True, everywhere=True)(*its_arguments())
    assert isinstance(raised.value.inner_exception, StrictError)


def test_what_fails_is_no_advice_anywhere(monkeypatch):
    def fails(self, anchor, flow):
        raise ArithmeticError

    monkeypatch.setattr(QkvCache, "match", fails)
    compiled(projection)(*its_arguments())
    assert ("INTERNAL", "lost") in [(m.code, m.weight) for m in reports()[-1].misses]


def lowering(*device_types, build=None):
    entry = None if build else (lambda *args: None)
    return contract.Lowering("one", entry, frozenset(device_types), lambda a: None, build=build)


@pytest.mark.parametrize(("lowerings", "target", "where"), [
    ((), None, {"cpu", "cuda", "meta", "xpu"}),  # the op has only its reference
    ((lowering("cuda", build="a:b"),), "sm90", {"cuda", "meta"}),
    ((lowering("cuda", build="a:b"),), None, {"meta"}),
    ((lowering("cuda"),), None, {"cuda", "meta"}),  # a user's op, for GPUs of any generation
    ((lowering("cuda", build="a:b"), lowering("cpu")), None, {"cpu", "meta"}),
])  # fmt: skip
def test_an_op_is_for_the_devices_of_its_lowerings(lowerings, target, where, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "device_target", lambda device: target)
    op = SimpleNamespace(lowerings=lowerings)
    found = {
        name
        for name in ("cpu", "cuda", "meta", "xpu")
        if contract.FusedOp.has_lowering_on(op, torch.device(name))
    }
    assert found == where


def test_a_gpu_without_a_target_is_named(monkeypatch):
    monkeypatch.setattr(fused_op, "emits_for", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    found = []

    def backend(gm, inputs):
        found.append(fuse(gm, Options()))
        return gm.forward

    with FakeTensorMode():
        torch.compile(projection, backend=backend)(*its_arguments(device="cuda"))
    assert matches_of(found[0], "qkv") == []
    (miss,) = found[0].misses
    assert "no kernels for Tesla T4 (compute capability 7.5): qkv_cache x1" in miss.message


@pytest.mark.parametrize(("target", "fused"), [("sm90", 1), ("sm103", 1), ("sm120", 0)])
def test_a_family_without_kernels_for_a_chip_leaves_its_sites(target, fused):
    module, args = moe_idioms.build("plain")
    found = lower(module, args, target=target)
    assert len(matches_of(found, "fused_moe")) == fused
    told = [(m.code, m.weight, m.message) for m in misses_of(found, "moe") if m.pattern == "moe"]
    why = f"fused_moe: its kernels are not audited for {target}"
    assert told == [("NO_KERNELS", "advice", why)] * (1 - fused)


@pytest.mark.parametrize(("target", "fused"), [("sm89", True), ("sm80", False)])
def test_numbers_that_a_chip_does_not_have_leave_a_site(target, fused):
    x, weights, k_cache, v_cache, slots = its_arguments()
    caches = [cache.to(torch.float8_e4m3fn) for cache in (k_cache, v_cache)]

    def step(x, weights, k_cache, v_cache, slots):
        q, k, v = (torch.nn.functional.linear(x, weight) for weight in weights)
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache.view(torch.uint8)[slots] = new.view(-1, 2, 32).to(cache.dtype).view(torch.uint8)
        return q * 2

    found = lower(step, (x, weights, *caches, slots), target=target)
    assert patterns_in(found, "qkv") == ["qkv_cache"] * fused
    if not fused:
        assert {m.code for m in found.misses} == {"NO_KERNELS"}
        assert (
            "k_cache has the dtype float8_e4m3fn, which sm80 does not support"
            in found.misses[0].message
        )


def test_an_adapter_s_ops_are_asked_too():
    """An adapter needs ops before the op that a match names. If these have no kernels, only the
    writes are fused."""
    layer, args = attention_with_adapter()
    found = lower(layer, args, target="sm120")
    whole = matches_of(lower(layer, args, target="sm90"), "qkv")
    assert [m.op for m in whole] == ["fused_qkv_paged"]
    assert [m.op for m in matches_of(found, "qkv")] == ["paged_kv_store"]
    told = {m.message for m in found.misses}
    assert any("shrink_qkv_permute_3mn: its kernels are not audited for sm120" in m for m in told)


def test_a_family_that_the_targets_do_not_list_is_named(monkeypatch):
    """A new op may belong to a family that the list of a target lacks. Then its kernels are not
    used, and the reason says so."""
    monkeypatch.setattr(fused_op, "FAMILIES", targets.FAMILIES - {"moe"})
    module, args = moe_idioms.build("plain")
    found = lower(module, args, target="sm90")
    why = "FAMILIES in codegen/targets.py has no entry for the folder ops/moe"
    assert any(why in text for text in (str(found), *(m.message for m in found.misses)))


def attention_with_adapter():
    down = torch.ones(8, 64, dtype=torch.bfloat16)
    up = torch.ones(64, 8, dtype=torch.bfloat16)

    def step(x, weights, k_cache, v_cache, slots):
        q, k, v = (torch.nn.functional.linear(x, weight) for weight in weights)
        k = k + torch.nn.functional.linear(torch.nn.functional.linear(x, down), up) * 2.0
        k_cache.index_copy_(0, slots, k.view(-1, 2, 32))
        v_cache.index_copy_(0, slots, v.view(-1, 2, 32))
        return q * 2

    return step, its_arguments()


@pytest.mark.parametrize("target", ["sm90", "sm120"])
def test_a_call_by_hand_is_told_of_its_chip(target):
    op = contract.get_op("fused_moe")
    arguments = op.sample_inputs(op.cases[0])
    chosen = op.choose("cuda", arguments, get_target(target))
    reasons = [reason for _, reason in chosen.rejected]
    assert (chosen.lowering.name, reasons) == {
        "sm90": ("emitted_kernel", []),
        "sm120": ("reference", ["its kernels are not audited for sm120"]),
    }[target]
    assert op.plan_for(arguments, target).name != "reference" or target == "sm120"
