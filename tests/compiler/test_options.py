"""Tests every option: what it does, and which error a bad value causes."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

from tests.compiler.running import (
    assert_close,
    build,
    compiled,
    patterns_used,
)
from tests.found import matches_of
from tilewright.codegen.build.cache.folder import others_are_trusted
from tilewright.compiler import backend, environment, lower, reports
from tilewright.compiler.options import Options
from tilewright.ops.checks import is_on

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


BAD_OPTIONS = {
    "inner": ("gcc", "one of ['inductor', 'eager']"),
    "verify": (1, "a bool"),
    "strict": ("yes", "a bool"),
    "fuel": (-1, "a number of rewrites, 0 or more, or None"),
    "only": ("layers.0", "a list of strings or None"),
    "target": ("sm999", "one of ['sm100', 'sm103', 'sm120', 'sm90', "),
    "report": ("/no/such/folder/report.jsonl", "a path of a file in an existing folder"),
    "tune": (1, "a bool"),
    "everywhere": (1, "a bool"),
    "inner_options": (["triton.cudagraphs"], "a dictionary or None"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_option_is_named_with_expected_and_actual(name):
    given, expected = BAD_OPTIONS[name]
    with pytest.raises(ValueError, match=name) as raised:
        Options.of({name: given})
    assert expected in str(raised.value)
    assert repr(given) in str(raised.value)


@pytest.mark.parametrize("given", [True, 1.0, "2"])
def test_fuel_is_a_whole_number(given):
    with pytest.raises(ValueError, match="fuel"):
        Options.of({"fuel": given})


@pytest.mark.parametrize("given", [5, "qkv_cache", ["qkv_cache", 3], []])
def test_patterns_is_a_list_of_names(given):
    with pytest.raises(ValueError, match="patterns"):
        Options.of({"patterns": given})


def test_a_pattern_is_not_both_wanted_and_excluded():
    with pytest.raises(ValueError, match=r"\['qkv_cache'\] are both wanted and excluded"):
        Options.of({"patterns": ["qkv_cache", "-qkv_cache"]})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TILEWRIGHT_DEBUG", "maybe", "expected 1 or 0, got 'maybe', which means 'on'"),
        ("TILEWRIGHT_CACHE_TRUST", "yes", "expected 1 or 0, got 'yes', which means 'off'"),
        ("TILEWRIGHT_EVERYWERE", "1", "did you mean 'TILEWRIGHT_EVERYWHERE'?"),
        ("TILEWRIGHT_DEBUG", "True", None),
        ("TILEWRIGHT_EVERYWHERE", "", None),
        ("TILEWRIGHT_CACHE_DIR", "anywhere", None),
        ("OTHERWRIGHT_DEBUG", "maybe", None),
    ],
)
def test_unknown_variables_and_values_are_named(name, value, said):
    found = list(environment.problems({name: value}))
    assert [name in line and said in line for line in found] == [True] * (said is not None)


@pytest.mark.parametrize("value", ["", "0", "off", "False", "no", "1", "on", "maybe"])
def test_the_effect_that_is_named_is_the_effect(value, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_TRUST", value)
    in_effect = {"TILEWRIGHT_DEBUG": is_on(value), "TILEWRIGHT_CACHE_TRUST": others_are_trusted()}
    for name, on in in_effect.items():
        for line in environment.problems({name: value}):
            assert line.endswith(f"means '{'on' if on else 'off'}'")
        known = environment.ON if on else environment.OFF
        assert value.lower() in known or list(environment.problems({name: value}))


def test_the_variables_that_are_known_are_those_of_the_page():
    page = (Path(__file__).resolve().parents[2] / "docs" / "options.md").read_text("utf-8")
    listed = re.findall(r"^\| `(TILEWRIGHT_\w+)", page, re.MULTILINE)
    assert sorted(listed) == sorted((*environment.SWITCHES, *environment.OTHERS))


def test_an_unknown_pattern_and_an_unknown_option_are_named_with_what_there_is():
    with pytest.raises(ValueError, match=r"qkv_cahce.*cache_store"):
        Options.of({"patterns": ["qkv_cahce"]})
    with pytest.raises(ValueError, match=r"unknown \['fule'\].*'fuel'"):
        Options.of({"fule": 3})


@pytest.mark.parametrize(
    "options", [{"patterns": ["qkv_cahce"]}, {"target": "sm999"}, {"fuel": -1}]
)
def test_a_bad_option_stops_the_compilation(options):
    model, args = build("page_offset")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(model, **options)(*args)
    assert isinstance(raised.value.inner_exception, ValueError)
    assert next(iter(options)) in str(raised.value)


def test_lower_refuses_a_bad_pattern_or_target():
    model, args = build("page_offset")
    with pytest.raises(ValueError, match="qkv_cahce"):
        lower(model, args, patterns=["qkv_cahce"])
    with pytest.raises(ValueError, match="sm999"):
        lower(model, args, target="sm999")


@pytest.mark.parametrize("fuel", [0, 2, None])
def test_fuel_limits_the_rewrites_in_program_order(fuel):
    model, args = build("page_offset", num_layers=3)
    assert_close(model, args, fuel=fuel, patterns=["qkv_cache"])
    scopes = [site.scope for site in matches_of(reports()[-1], "qkv")]
    everything = [f"layers.{i}.self_attn" for i in range(3)]
    assert scopes == everything[:fuel]


def test_only_rewrites_the_sites_named():
    model, args = build("page_offset", num_layers=3)
    assert_close(model, args, only=["layers.[02].*"])
    assert [s.scope for s in matches_of(reports()[-1], "qkv")] == [
        "layers.0.self_attn",
        "layers.2.self_attn",
    ]


def test_a_module_has_the_same_path_where_the_forward_of_the_model_is_decorated(monkeypatch):
    """transformers 5.24 decorates every forward. In the graph, the module is then `args[0]` of the
    wrapper."""
    model, args = build("page_offset", num_layers=2)
    forward = type(model).forward

    @functools.wraps(forward)
    def decorated(*args, **kwargs):
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(model), "forward", decorated)
    assert_close(model, args, only=["layers.1.*"])
    assert [s.scope for s in matches_of(reports()[-1], "qkv")] == ["layers.1.self_attn"]


def test_a_pattern_left_out_leaves_its_sites_to_the_next():
    model, args = build("page_offset", num_layers=2)
    assert_close(model, args, patterns=["-qkv_cache"])
    assert patterns_used() == ["cache_store"] * 2


def test_only_the_patterns_named_are_tried():
    model, args = build("page_offset")
    assert_close(model, args, patterns=["cache_absent"])
    assert patterns_used() == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"triton.cudagraph": True}, "'triton.cudagraphs'"),
        ({"triton.cudagraphs": "yes"}, "a value of type bool for 'triton.cudagraphs'"),
    ],
)
def test_a_bad_setting_of_inductor_is_named(given, expected):
    with pytest.raises(ValueError, match="inner_options") as raised:
        Options.of({"inner_options": given})
    assert expected in str(raised.value)


def test_settings_of_inductor_need_inductor():
    with pytest.raises(ValueError, match=r'inner="inductor" together with it'):
        Options.of({"inner": "eager", "inner_options": {"max_autotune": True}})


def test_settings_of_inductor_reach_it_and_go_before_its_mode(monkeypatch):
    seen = []

    def compile_fx(gm, inputs, config_patches):
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr(backend._compat, "compile_fx", compile_fx)
    settings = {"triton.cudagraphs": False, "max_fusion_size": 3}
    mode = backend.inductor.mode_patches("reduce-overhead")
    assert mode["triton.cudagraphs"] is True
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    backend.tilewright(gm, [torch.ones(1)], options={"inner_options": settings})
    backend.tilewright(
        gm, [torch.ones(1)], options={"inner_options": settings}, mode="reduce-overhead"
    )
    assert seen[0] == settings
    assert seen[1] == {**mode, **settings}


@pytest.mark.parametrize("tune", [True, False])
def test_tune_asks_the_op_and_says_what_there_is_to_measure_on(tune):
    model, inputs = build("static_cache")
    lowered = lower(model, inputs, tune=tune, patterns=["qkv_cache"])
    notes = [line for line in str(lowered).splitlines() if line.startswith("tune: ")]
    if not tune:
        assert notes == []
    elif torch.cuda.is_available():
        assert len(notes) == 1
    else:
        (note,) = notes
        assert "there is no sm100 GPU here to measure on" in note
        assert "shipped table and the cost model" in note
    (graph,) = lowered.graphs
    asked = [n.kwargs.get("tune", False) for n in graph.after.graph.nodes if "tilewright" in n.meta]
    assert asked == [tune] * len(matches_of(lowered, "qkv"))
    assert asked
