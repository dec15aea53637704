"""Tests the backend as a whole: its fallbacks, its reports, and when it leaves a graph alone."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

from tests.compiler.running import (
    assert_close,
    build,
    compiled,
    copies,
    patterns_used,
    run_both,
    same_bits,
)
from tests.found import codes_of, matches_of, misses_of, patterns_in, patterns_of
from tilewright.compiler import StrictError, backend, fuse, lower, reports
from tilewright.compiler.options import Options
from tilewright.ops import contract
from tilewright.patterns import language

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- a model without a match --------------------------------------------------------------------


#: The names of the patterns of `qkv`. The tests that use them concern a whole report: its warnings
#: and its files.
QKV = sorted(patterns_of("qkv"))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.softmax(self.linear(x), -1).cumsum(0)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_model_without_a_match_is_the_inner_compilers(inner):
    model, x = Plain(), torch.randn(4, 8)
    ours = compiled(model, inner=inner)(x)
    assert matches_of(reports()[-1], "qkv") == [] == misses_of(reports()[-1], "qkv")
    assert reports()[-1].nodes == reports()[-1].nodes_after > 0
    torch._dynamo.reset()
    assert torch.equal(ours, torch.compile(model, backend=inner)(x))


def test_a_missed_model_is_untouched_and_warned_about(caplog):
    model, args = build("out_of_place", num_layers=2)
    with caplog.at_level(logging.WARNING, "tilewright"):
        (expected, eager), (actual, ours) = run_both(model, args, patterns=QKV)
    assert same_bits((actual, *ours), (expected, *eager))
    (record,) = caplog.records
    assert "nothing was fused (FUNCTIONAL_WRITE x4)" in record.getMessage()


# --- what fails inside never takes the model down -----------------------------------------------


def broken(*args, **kwargs):
    raise ArithmeticError("injected")


def break_view(monkeypatch):
    monkeypatch.setattr(fuse, "build_view", broken)


def break_rewrite(monkeypatch):
    monkeypatch.setattr(fuse, "rewrite_sites", broken)


def break_match(monkeypatch):
    monkeypatch.setattr(type(language.registered(["qkv_cache"])[0]), "match", broken)


def break_lint(monkeypatch):
    monkeypatch.setattr(fuse, "check_graph", broken)


def break_fake(monkeypatch):
    monkeypatch.setattr("tilewright.compiler._compat.run_fake", broken)


# Failures after which nothing of the whole graph is fused. test_failures.py tests failures at a
# single site.
WHOLE = [break_view, break_rewrite, break_lint]
BREAKS = [*WHOLE, break_match, break_fake]


@pytest.mark.parametrize("injure", WHOLE)
def test_an_error_inside_compiles_unfused_and_is_reported(injure, monkeypatch, caplog):
    model, args = build("page_offset")
    injure(monkeypatch)
    with caplog.at_level(logging.ERROR, "tilewright"):
        (expected, eager), (actual, ours) = run_both(model, args)
    assert same_bits((actual, *ours), (expected, *eager))
    assert any("tilewright failed" in r.getMessage() for r in caplog.records)
    (report,) = reports()
    assert report.matches == ()
    assert "ArithmeticError" in report.notes[0]
    assert "injected" in report.notes[0]


@pytest.mark.parametrize("injure", BREAKS)
def test_an_error_inside_raises_under_strict(injure, monkeypatch):
    model, args = build("page_offset")
    injure(monkeypatch)
    before = copies(args)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(model, strict=True)(*args)
    inner = raised.value.inner_exception
    assert isinstance(inner, ArithmeticError) or isinstance(inner.__cause__, ArithmeticError)
    assert same_bits(args, before)


def refuse_fused(monkeypatch):
    """Makes an inner compiler fail on graphs with a fused op."""

    def compile_fx(gm, inputs, **kwargs):
        if any("tilewright" in str(n.target) for n in gm.graph.nodes):
            raise ArithmeticError("injected")
        return gm.forward

    monkeypatch.setattr(backend._compat, "compile_fx", compile_fx)


def test_an_inner_compiler_that_fails_on_the_fused_graph_gets_the_original(monkeypatch, caplog):
    model, args = build("page_offset")
    refuse_fused(monkeypatch)
    with caplog.at_level(logging.ERROR, "tilewright"):
        (expected, eager), (actual, ours) = run_both(model, args, inner="inductor")
    assert same_bits((actual, *ours), (expected, *eager))
    assert any("inner compiler failed" in r.getMessage() for r in caplog.records)
    (report,) = reports()
    assert report.matches == ()
    assert "injected" in report.notes[0]


def test_an_inner_compiler_that_fails_raises_under_strict(monkeypatch):
    model, args = build("page_offset")
    refuse_fused(monkeypatch)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="injected"):
        compiled(model, inner="inductor", strict=True)(*args)


def test_an_op_that_refuses_its_arguments_is_a_miss_and_leaves_the_graph(monkeypatch):
    model, args = build("page_offset")
    op = contract.get_op("fused_qkv_paged")

    def refuse(*args, **kwargs):
        raise contract.ArgumentError(op.name, "x", "something else", "this")

    monkeypatch.setattr("tilewright.compiler._compat.run_fake", refuse_op(refuse))
    (expected, eager), (actual, ours) = run_both(model, args, patterns=["qkv_cache"])
    assert same_bits((actual, *ours), (expected, *eager))
    (report,) = reports()
    assert [(m.pattern, m.code) for m in misses_of(report, "qkv")] == [("qkv_cache", "UNSUPPORTED")]
    assert "x: expected something else, got this" in misses_of(report, "qkv")[0].message
    assert report.nodes == report.nodes_after


def test_a_site_that_an_op_refuses_goes_to_the_next_pattern(monkeypatch):
    model, args = build("page_offset", num_layers=2)

    def refuse(*args, **kwargs):
        raise contract.ArgumentError("fused_qkv_paged", "x", "something else", "this")

    monkeypatch.setattr("tilewright.compiler._compat.run_fake", refuse_op(refuse))
    assert_close(model, args)
    (report,) = reports()
    assert patterns_in(report, "qkv") == ["cache_store"] * 2
    assert [(m.pattern, m.code) for m in misses_of(report, "qkv")] == [
        ("qkv_cache", "UNSUPPORTED")
    ] * 2
    torch._dynamo.reset()
    assert_close(model, args, fuel=1)
    assert len(matches_of(reports()[-1], "qkv")) == 1


def test_fused_ops_called_by_hand_are_left_alone():
    model, args = build("page_offset", num_layers=2)
    graphs = []

    def keep(gm, inputs):
        graphs.append(fuse.fuse(gm, Options()))
        return gm.forward

    torch.compile(model, backend=keep)(*copies(args))
    again = fuse.fuse(graphs[0].after, Options())
    assert matches_of(again, "qkv") == misses_of(again, "qkv") == []
    assert str(again.after.graph) == str(graphs[0].after.graph)


def refuse_op(refuse):
    from tilewright.compiler._compat import run_fake

    return lambda node: refuse() if "fused_qkv" in str(node.target) else run_fake(node)


def test_strict_raises_for_a_near_miss_with_its_reason():
    model, args = build("out_of_place")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(model, strict=True)(*args)
    assert isinstance(raised.value.inner_exception, StrictError)
    assert "FUNCTIONAL_WRITE" in str(raised.value)


def test_strict_is_content_with_a_model_that_matches():
    model, args = build("page_offset")
    compiled(model, strict=True)(*args)
    assert patterns_used() == ["qkv_cache"]


# --- reports ------------------------------------------------------------------------------------


def without_times(line):
    data = json.loads(line)
    for graph in data["graphs"]:
        graph.pop("seconds")
    return data


def test_the_report_file_has_one_line_for_each_graph(tmp_path):
    path = tmp_path / "report.jsonl"
    models = [
        build("page_offset", num_layers=2),
        build("out_of_place"),
        (Plain(), (torch.ones(1, 8),)),
    ]
    for model, args in models:
        compiled(model, report=str(path), patterns=QKV)(*copies(args))
    fused, missed, plain = (without_times(line) for line in path.read_text().splitlines())
    assert [m["scope"] for m in fused["matches"]] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert fused["matches"][0]["op"] == "fused_qkv_paged"
    assert fused["graphs"][0]["nodes_after"] < fused["graphs"][0]["nodes"]
    assert [m["code"] for m in missed["misses"]] == ["FUNCTIONAL_WRITE"]
    assert plain["matches"] == plain["misses"] == []


def test_reports_are_the_same_every_time(tmp_path):
    model, args = build("page_offset", num_layers=2, norm="rms_spelled")
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path in paths:
        torch._dynamo.reset()
        compiled(model, report=path)(*copies(args))
    one, two = (without_times(path.read_text()) for path in paths)
    assert one == two
    assert one["matches"]


def test_every_graph_of_a_broken_model_is_fused_and_reported():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.halves = nn.ModuleList(build("page_offset")[0] for _ in range(2))

        def forward(self, x, *rest):
            x = self.halves[0](x, *rest)
            torch._dynamo.graph_break()
            return self.halves[1](x, *rest)

    model, args = Broken().requires_grad_(False), build("page_offset")[1]
    assert_close(model, args)
    assert [len(matches_of(r, "qkv")) for r in reports()] == [1, 1]
    torch._dynamo.reset()
    lowered = lower(model, args)
    assert len(lowered.graphs) == 2
    assert patterns_in(lowered, "qkv") == ["qkv_cache"] * 2
    assert "GRAPH_BREAK" in codes_of(lowered, "capture")


# --- when and how often -------------------------------------------------------------------------


def test_an_input_that_needs_grad_compiles_unfused_and_says_so(caplog, tmp_path):
    model, args = build("out_of_place")
    model.requires_grad_(True)
    path = tmp_path / "report.jsonl"
    with torch.enable_grad(), caplog.at_level(logging.WARNING, "tilewright"):
        compiled(model, report=path)(*copies(args)).sum().backward()
    assert model.layers[0]["self_attn"].projection.q_proj.weight.grad is not None
    (note,) = reports()[-1].notes
    assert note.startswith("nothing was fused: 9 parameters need grad, and fused ops compute no ")
    assert "torch.no_grad()" in note
    assert note in [r.getMessage() for r in caplog.records]
    assert json.loads(path.read_text())["notes"] == [note]


@pytest.mark.parametrize(
    ("takes_grad", "mode"),
    [
        (True, torch.enable_grad),
        (True, torch.no_grad),
        (True, torch.inference_mode),
        (False, torch.enable_grad),
    ],
)
def test_lower_says_that_training_would_not_be_fused(takes_grad, mode):
    """The note appears only if the user is about to train. Under no_grad, the same parameters are
    no obstacle."""
    model, args = build("page_offset")
    model.requires_grad_(takes_grad)
    with mode():
        lowered = lower(model, args)
    assert patterns_in(lowered, "qkv") == ["qkv_cache"]
    said = takes_grad and mode is torch.enable_grad
    notes = (
        ["9 parameters need grad, and nothing is fused while gradients are recorded"]
        if said
        else []
    )
    assert [note.partition(":")[0] for note in lowered.notes] == notes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_could_be_trained_are_fused_where_no_grad_is_taken(mode):
    model, args = build("page_offset")
    model.requires_grad_(True)
    with torch.enable_grad(), mode():
        assert_close(model, args)
    assert patterns_used() == ["qkv_cache"]


def test_regional_compilation_fuses_each_layer():
    model, args = build("page_offset", num_layers=2)
    eager = copies(args)
    expected = model(*eager)
    for layer in model.layers:
        layer["self_attn"].compile(backend="tilewright", options={"inner": "eager"})
    ours = copies(args)
    actual = model(*ours)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert patterns_used() == ["qkv_cache"] * 2


def test_a_new_length_recompiles_once_and_stays_fused():
    model, args = build("setitem_on_view")
    run = compiled(model)
    for length in (10, 7, 5, 3):
        eager, ours = (
            (*(a[:length] for a in b[:3]), b[3], b[4][:length], *b[5:])
            for b in (copies(args), copies(args))
        )
        torch.testing.assert_close(run(*ours), model(*eager), rtol=1e-4, atol=1e-5)
    assert [len(matches_of(r, "qkv")) for r in reports()] == [1, 1]


def test_dynamic_shapes_give_one_report_though_dynamo_may_call_twice():
    model, args = build("setitem_on_view")
    run = torch.compile(model, backend="tilewright", options={"inner": "eager"}, dynamic=True)
    eager, ours = copies(args), copies(args)
    torch.testing.assert_close(run(*ours), model(*eager), rtol=1e-4, atol=1e-5)
    assert patterns_used() == ["qkv_cache"]


def test_the_given_graph_is_never_changed():
    model, args = build("page_offset")
    seen = []

    def spy(gm, inputs):
        before = str(gm.graph)
        first = backend.tilewright(gm, inputs, options={"inner": "eager"})
        second = backend.tilewright(gm, inputs, options={"inner": "eager"})
        seen.append((before, str(gm.graph)))
        assert len({str(fuse.fuse(gm, Options()).after.graph) for _ in range(2)}) == 1
        assert first is not second
        return second

    eager, ours = copies(args), copies(args)
    actual = torch.compile(model, backend=spy)(*ours)
    torch.testing.assert_close(actual, model(*eager), rtol=1e-4, atol=1e-5)
    assert seen[0][0] == seen[0][1]
    one, two = reports()
    assert one.matches == two.matches != ()


def test_a_mode_is_handed_to_inductor(monkeypatch):
    model, args = build("page_offset")
    patches = []

    def compile_fx(gm, inputs, config_patches=None):
        patches.append(config_patches)
        return gm.forward

    monkeypatch.setattr(backend._compat, "compile_fx", compile_fx)
    torch.compile(model, backend="tilewright", mode="reduce-overhead")(*copies(args))
    assert patches[-1]["triton.cudagraphs"] is True
    assert patterns_used() == ["qkv_cache"]
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="no-such-mode"):
        torch.compile(model, backend="tilewright", mode="no-such-mode")(*copies(args))
