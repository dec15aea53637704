"""Tests that an exception in a pattern, an op or a rewrite costs one site, and that a file
reproduces it alone."""

from __future__ import annotations

import importlib
import logging
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.compiler.running import assert_close, build, compiled, copies, doubled, same_bits
from tests.found import matches_of, misses_of, patterns_in
from tests.models import lora_idioms
from tilewright.compiler import StrictError, fuse, lower, reports, rewrite
from tilewright.ops import contract
from tilewright.patterns import language

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ROOT = Path(__file__).parents[2]


class Broken(ArithmeticError):
    """An exception that tilewright itself never raises."""


def at_first_call(function):
    """Returns `function` changed so that its first call raises."""
    calls = []

    def run(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise Broken("injected")
        return function(*args, **kwargs)

    return run


def fail_match(monkeypatch):
    pattern = type(language.registered(["qkv_cache"])[0])
    monkeypatch.setattr(pattern, "match", at_first_call(pattern.match))


def fail_anchors(monkeypatch):
    """Makes a pattern's `anchors` raise after the anchor of the first layer."""
    pattern = type(language.registered(["qkv_cache"])[0])
    anchors = pattern.anchors

    def some(self, flow):
        yield next(iter(anchors(self, flow)))
        raise Broken("injected")

    monkeypatch.setattr(pattern, "anchors", some)


def fail_legality(monkeypatch):
    monkeypatch.setattr(fuse, "check_legality", at_first_call(fuse.check_legality))


def fail_fake(monkeypatch):
    """Makes the op's fake implementation raise, which runs when the op's node is made."""
    real = rewrite._insert
    monkeypatch.setattr(rewrite, "_insert", at_first_call(real))


def fail_half_way(monkeypatch):
    """Makes a rewrite raise when it has already replaced operands and removed writes, so that the
    graph cannot be used any more."""
    monkeypatch.setattr(rewrite, "check_site", at_first_call(rewrite.check_site))


def fail_erasing(monkeypatch):
    monkeypatch.setattr(rewrite, "_erase", at_first_call(rewrite._erase))


def fail_plan(monkeypatch):
    monkeypatch.setattr(fuse, "_lowering", at_first_call(fuse._lowering))


FAILURES = {
    "match": (fail_match, "to match"),
    "anchors": (fail_anchors, "at its anchors"),
    "legality": (fail_legality, "in the check for hazards"),
    "fake": (fail_fake, "to rewrite"),
    "half-way": (fail_half_way, "to rewrite"),
    "erasing": (fail_erasing, "to rewrite"),
    "plan": (fail_plan, "to plan fused_qkv_paged"),
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_failure_costs_one_site_and_the_next_pattern_may_take_it(where, monkeypatch, caplog):
    """The failure happens in one of two layers. The other layer is fused as usual. In the layer
    with the failure only the write is fused. The numbers are right."""
    model, args = build("page_offset", num_layers=2)
    injure, doing = FAILURES[where]
    injure(monkeypatch)
    with caplog.at_level(logging.ERROR, "tilewright"):
        assert_close(model, args)
    (report,) = reports()
    assert sorted(patterns_in(report, "qkv")) == ["cache_store", "qkv_cache"]
    (miss,) = misses_of(report, "qkv")
    assert (miss.pattern, miss.code, miss.weight) == ("qkv_cache", "INTERNAL", "lost")
    assert f"failed {doing}" in miss.message
    assert "Broken: injected" in miss.message
    assert "TILEWRIGHT_REPRO=<folder>" in miss.hint
    assert bool(miss.source) == (where != "anchors")
    assert report.notes == ()
    (record,) = caplog.records
    assert isinstance(record.exc_info[1], Broken)


@pytest.mark.parametrize("where", FAILURES)
def test_under_strict_a_failure_raises_with_its_cause(where, monkeypatch):
    model, args = build("page_offset", num_layers=2)
    FAILURES[where][0](monkeypatch)
    with pytest.raises(StrictError, match="INTERNAL") as raised:
        lower(model, args, strict=True)
    assert isinstance(raised.value.__cause__, Broken)


def test_under_strict_a_compilation_raises_and_changes_nothing(monkeypatch):
    model, args = build("page_offset", num_layers=2)
    fail_half_way(monkeypatch)
    before = copies(args)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(model, strict=True)(*args)
    assert isinstance(raised.value.inner_exception, StrictError)
    assert isinstance(raised.value.inner_exception.__cause__, Broken)
    assert same_bits(args, before)


def test_where_every_site_fails_half_way_the_pattern_is_left_out(monkeypatch):
    """If every site fails half-way, the pattern is left out. The compiler does not copy the graph
    again for each layer."""
    model, args = build("page_offset", num_layers=8)
    real, copied = rewrite.check_site, []

    def check_site(match, node, replacements):
        if match.pattern == "qkv_cache":
            raise Broken("injected")
        return real(match, node, replacements)

    monkeypatch.setattr(rewrite, "check_site", check_site)
    real_copy = fuse._copy
    monkeypatch.setattr(fuse, "_copy", lambda gm: copied.append(1) or real_copy(gm))
    lowered = lower(model, args)
    assert patterns_in(lowered, "qkv") == ["cache_store"] * 8
    assert [m.code for m in misses_of(lowered, "qkv")] == ["INTERNAL"] * 8
    assert len({m.scope for m in misses_of(lowered, "qkv")}) == 8
    assert len(copied) <= 7


def test_what_a_pattern_owes_is_told_in_its_own_words(monkeypatch):
    monkeypatch.setattr(type(language.registered(["qkv_cache"])[0]), "match", lambda *a: None)
    model, args = build("page_offset")
    lowered = lower(model, args)
    (miss,) = misses_of(lowered, "qkv")
    assert miss.code == "INTERNAL"
    assert miss.message == (
        "pattern 'qkv_cache': match returned None; return a Match or reject(...)"
    )
    assert patterns_in(lowered, "qkv") == ["cache_store"]


def test_an_op_whose_check_fails_is_a_miss(monkeypatch):
    """The op's own fake implementation fails, and not a stand-in for it."""
    op = contract.get_op("fused_qkv_paged")
    validate = op.validate

    def failing(arguments):
        if arguments.x.shape == (10, 64):
            raise Broken("injected")
        validate(arguments)

    monkeypatch.setitem(vars(op), "validate", failing)
    model, args = build("page_offset")
    lowered = lower(model, args)
    assert [m.code for m in misses_of(lowered, "qkv")] == ["INTERNAL"]
    assert patterns_in(lowered, "qkv") == ["cache_store"]


# --- two that failed so ---------------------------------------------------------------------------


class OtherActivation(nn.Module):
    """An attention whose V is a projection of another tensor than K's, written as an einsum."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(16, 16, bias=False) for _ in range(2))
        self.w = nn.Parameter(torch.eye(16))

    def forward(self, x, k_cache, v_cache, slots):
        q, k = self.q(x).view(-1, 2, 8), self.k(x).view(-1, 2, 8)
        v = torch.einsum("tk,nk->tn", x + 1, self.w)
        k_cache[slots] = k
        v_cache[slots] = v.view(-1, 2, 8)
        return q


def test_an_einsum_of_another_activation_is_told_as_such():
    model = OtherActivation().requires_grad_(False)
    args = (torch.randn(4, 16), *(torch.zeros(9, 2, 8) for _ in range(2)), torch.arange(4))
    lowered = lower(model, args)
    (miss,) = misses_of(lowered, "qkv")
    assert miss.code == "ACTIVATION"
    assert miss.message == "K projects input[4, 16], but V projects aten.add[4, 16]"
    assert patterns_in(lowered, "qkv") == ["cache_store"]


@pytest.mark.parametrize("name", ["gather_einsum", "grouped", "none_where"])
def test_adapters_of_no_rows_are_fused_and_planned(name):
    model, args = lora_idioms.build(name)
    args = tuple(a[:0] if a.shape[:1] == (lora_idioms.T,) else a for a in args)
    lowered = lower(model, args)
    assert misses_of(lowered, "lora") == []
    assert {m.lowering for m in matches_of(lowered, "lora")} == {"nothing"}
    assert all(m.kernels == () for m in matches_of(lowered, "lora"))


# --- the file that shows it -----------------------------------------------------------------------


@pytest.fixture
def failing():
    """Registers the pattern of failing_pattern.py for one test."""
    module = importlib.import_module("tests.compiler.failing_pattern")
    language.register(module.PATTERN)
    yield module.PATTERN
    language.unregister(module.PATTERN.name)


class Summed(nn.Module):
    """Has a cumsum, and inputs of every kind: aliases, strided and empty tensors, a constant, a
    branch, and a user's function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def forward(self, x, upper, lower, turned, empty):
        upper.mul_(2)
        y = torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))
        y = y.bfloat16().float() @ self.weight * float("inf")
        return doubled(y).cumsum(0) + turned.sum() + lower.sum() + empty.sum()


def summed_arguments():
    shared = torch.zeros(10, 4)
    return torch.ones(3, 4), shared[:7], shared[5:], torch.zeros(6, 5).t()[1:], torch.zeros(0, 3)


def run(path):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(path)], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=120, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def test_the_repro_file_shows_the_same_error(failing, tmp_path, monkeypatch):
    """Writes a repro file with symbolic sizes. The next test runs the file with numbers."""
    monkeypatch.setenv("TILEWRIGHT_REPRO", str(tmp_path / "made"))
    lowered = lower(Summed(), summed_arguments(), dynamic=True)
    (miss,) = misses_of(lowered, "fails")
    (path,) = (tmp_path / "made").iterdir()
    assert str(path) in miss.hint
    done = run(path)
    assert done.returncode != 0
    assert "StrictError" in done.stderr
    said = r"pattern 'fails' failed to match: ArithmeticError: at aten.cumsum\[\w+, 4\]"
    assert re.fullmatch(said, miss.message)
    assert re.search(said, done.stderr)


def test_the_repro_file_has_the_inputs_as_they_were(failing, tmp_path, monkeypatch, capsys):
    """Without the failing pattern, the file runs to its end, so its code and its inputs fit each
    other. It runs in this process; the last test runs it in a separate process."""
    monkeypatch.setenv("TILEWRIGHT_REPRO", str(tmp_path))
    lower(Summed(), summed_arguments())
    assert capsys.readouterr().out == ""
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert (
        text.count("storage_") >= 6
    )  # x, the weight, one tensor for the storage of both parts, and the transposed tensor
    lines = [line for line in text.splitlines() if "failing_pattern" not in line]
    path.write_text("\n".join(lines))
    monkeypatch.delitem(language._REGISTRY, failing.name)
    with torch._dynamo.config.patch(capture_scalar_outputs=False):  # the file sets this option
        given = runpy.run_path(str(path), run_name="__main__")["inputs"]()
    assert "no error" in capsys.readouterr().out
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    expected = [*summed_arguments(), Summed().weight]
    described = sorted((tuple(t.shape), t.stride(), t.storage_offset()) for t in tensors)
    assert described == sorted((tuple(t.shape), t.stride(), t.storage_offset()) for t in expected)
    assert sum(isinstance(t, nn.Parameter) for t in tensors) == 1
    keys = [t.untyped_storage()._cdata for t in tensors if t.numel()]
    assert len(set(keys)) == len(keys) - 1


def test_a_repro_that_cannot_be_written_is_a_warning(failing, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_REPRO", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING, "tilewright"):
        (miss,) = misses_of(lower(Summed(), summed_arguments()), "fails")
    assert miss.code == "INTERNAL"
    assert any("no repro could be written" in r.getMessage() for r in caplog.records)
