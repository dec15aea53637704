"""Tests public functions with wrong names, targets, files, modes, dtypes, subclasses and variables.

Each error or warning names what was wrong and what is expected, and no compiled model fails because
of tilewright. tests/ops/bent_arguments.py tests arguments of ops, and
tests/codegen/qkv/test_tune.py tests files of tuned times.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from typer.testing import CliRunner

import tilewright
from tests.compiler.running import build, compiled, copies
from tilewright import declare, lower, prepare, reports
from tilewright.compiler import fuse
from tilewright.compiler.options import Options, check_mode
from tilewright.patterns.language import register_code, registered
from tilewright.tools.cli import app
from tilewright.tools.pytest_plugin import Matches
from tilewright.tools.zoo import load_model

# --- what is refused ------------------------------------------------------------------------------

MODEL, ARGS = build("page_offset")
FP8 = torch.float8_e4m3fn


def options(**given):
    return lambda: Options.of(given)


def fixture():
    return Matches(Path("unused"), "unused", update=False)


def paged(config=None, **given):
    """Returns a cache of a small Llama, or of another configuration."""
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    chosen = transformers.LlamaConfig(**small) if config is None else config
    return tilewright.PagedCache(chosen, **given)


def cache(**given):
    return lambda: paged(**given)


def modelopt(name):
    pytest.importorskip("transformers")
    return tilewright.load_modelopt(name)


#: For each action, words of the error: the given value, the expected value, and what to do.
REFUSED = {
    # torch.compile's options
    "an option's name": (options(patern=["moe"]), "patern", "expected some of", "'patterns'?"),
    "options in a list": (lambda: Options.of(["verify"]), "options: expected a dictionary"),
    "an inner compiler": (options(inner="Inductor"), "got 'Inductor'", "mean 'inductor'?"),
    "a pattern's name": (options(patterns=["qkv-cache"]), "['qkv-cache']", "mean 'qkv_cache'?"),
    "patterns as a text": (options(patterns="moe"), "patterns", "a list of strings", "'moe'"),
    "a chip's name": (options(target="H1000"), "'H1000'", "sm100", "did you mean 'h100'?"),
    "a chip's number": (options(target=90), "target", "got 90", "did you mean 'sm90'?"),
    "strict's name": (options(strict=["qkv_cahce"]), "strict", "did you mean 'qkv_cache'?"),
    "strict's text": (options(strict="moe"), "strict", "a bool or a list of names", "'moe'"),
    "fuel's sign": (options(fuel=-1), "fuel", "0 or more", "-1"),
    "a flag's text": (options(verify="yes"), "verify", "a bool", "'yes'"),
    "a folder for a report": (options(report="/"), "report", "a path of a file", "'/'"),
    "a report's folder": (options(report="/no/such/r.json"), "existing folder", "/no/such"),
    "a setting of Inductor": (
        options(inner_options={"triton.cudagraph": True}),
        "it has no 'triton.cudagraph'", "triton.cudagraphs",
    ),
    "a mode": (lambda: check_mode("fastest"), "'fastest'", "reduce-overhead"),
    # lower
    "the whole of a MODEL": (lambda: lower((MODEL, ARGS, {})), "model:", "tuple of 3", "(*made)"),
    "a tensor for arguments": (lambda: lower(MODEL, ARGS[0]), "args:", "one tensor", "(x,)"),
    "a list for keywords": (lambda: lower(MODEL, ARGS, ["x"]), "kwargs:", "by name", "list"),
    "lower's target": (lambda: lower(MODEL, ARGS, target="b2000"), "'b2000'", "mean 'b200'?"),
    "lower's dynamic": (lambda: lower(MODEL, ARGS, dynamic="no"), "dynamic:", "a bool", "'no'"),
    # the fixture
    "a tuple for a model": (lambda: fixture().check((MODEL, ARGS, {})), "model:", "(*made)"),
    "a count's name": (
        lambda: fixture().assert_matches(MODEL, ARGS, qkv_cahce=1),
        "['qkv_cahce']", "did you mean 'qkv_cache'?",
    ),
    "a count's type": (
        lambda: fixture().assert_matches(MODEL, ARGS, qkv_cache="1"),
        "qkv_cache: expected a number of sites, got '1'",
    ),
    "a code": (
        lambda: fixture().assert_misses(MODEL, ARGS, code="ESCAPE"),
        "['ESCAPE']", "did you mean 'ESCAPES'?", "tilewright explain",
    ),
    "an option of the fixture": (
        lambda: fixture().assert_matches(MODEL, ARGS, options={"targt": "sm90"}, qkv_cache=1),
        "['targt']", "did you mean 'target'?",
    ),
    # PagedCache
    "a model for its configuration": (
        lambda: paged(torch.nn.Linear(2, 2)), "config:", "model.config", "Linear",
    ),
    "a page's size": (cache(page_size=48), "page_size", "a power of two", "48"),
    "a page's size as a flag": (cache(page_size=True), "page_size", "True"),
    "a length": (cache(max_cache_len=0), "max_cache_len", "at least 1", "0"),
    "a dtype of pools": (cache(dtype=torch.float16), "dtype", "float8_e4m3fn", "torch.float16"),
    "scales without codes": (cache(scales={}), "scales", "None because dtype is None"),
    "scales as numbers": (cache(dtype=FP8, scales={0: 1.0}), "scales", "kv_scales(model)"),
    "scales of no layer": (
        cache(dtype=FP8, scales={7: (torch.ones(()), torch.ones(()))}), "1 layers", "got [7]",
    ),
    "tokens to reserve": (lambda: paged().reserve(-1), "tokens: expected", "-1"),
    "sequences": (lambda: paged().most_tokens(0), "batch: expected", "at least 1", "0"),
    # loading
    "a name for a model": (lambda: prepare("llama"), "model: expected a torch.nn.Module", "str"),
    "a checkpoint's folder": (lambda: modelopt("/no/such"), "folder", "'/no/such'"),
    "an operator": (lambda: declare("relu", abs), "op: expected", "namespace::name", "'relu'"),
    "a model of the zoo": (lambda: load_model("llama3_8b"), "'llama3_8b'", "mean 'llama3-8b'?"),
    "a code's meaning": (
        lambda: register_code("ESCAPES", "another"), "'ESCAPES' already means", "'another'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bent", REFUSED)
def test_what_is_refused_is_named_with_what_is_expected(bent):
    done, *words = REFUSED[bent]
    with pytest.raises((ValueError, TypeError, OSError)) as raised:
        done()
    assert [word for word in words if word not in str(raised.value)] == []
    assert "?;" not in str(raised.value)


# --- the command line -----------------------------------------------------------------------------

#: For each list of arguments, words of the one line that is printed. FILE is a file that is neither
#: a snapshot nor a report.
COMMANDS = {
    ("inspect", "meta-llama/Llama-3-8B"): ("nothing is downloaded", "hf download meta-llama/L"),
    ("inspect", "llama-8b"): ("'llama-8b' is not a zoo name", "did you mean 'llama3-8b'?"),
    ("inspect", "no.py:make"): ("no.py: no such file",),
    ("inspect", "llama3-8b", "--target", "b2000"): ("--target", "'b2000'", "mean 'b200'?"),
    ("inspect", "llama3-8b", "--html", "/no/such/a.html"): ("--html: no such folder",),
    ("inspect", "llama3-8b", "--tp", "3"): ("--tp: 3 ranks do not divide",),
    ("kernels", "llama3-8b", "-o", "FILE"): ("--output: cannot write", "File exists"),
    ("diff", "no.snapshot", "FILE"): ("no.snapshot: [Errno 2] No such file",),
    ("diff", "FILE", "FILE"): ("neither a snapshot nor a report", "it lacks 'matches'"),
    ("explain", "GROWINGCACHE"): ("'GROWINGCACHE'", "did you mean 'GROWING_CACHE'?", "lists"),
    ("explain", "--from", "no.py"): ("no.py: no such file",),
    ("bench", "mae"): ("no benchmark mae; there are", "did you mean"),
    ("bench", "--profile", "llama3-8b", "--trace", "no.json"): ("--trace needs --target",),
    ("cache", "--prune", "--max-size", "big"): ("--max-size: expected a size", "got 'big'"),
    ("cache", "--older-than", "3d"): ("can be used only together with --prune",),
}


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_answers_in_one_line_and_exit_code_two(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    Path("FILE").write_text('{"a": 1}')
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tilewright: ")
    assert [word for word in COMMANDS[arguments] if word not in line] == []
    assert "?;" not in line


@pytest.mark.parametrize(
    ("variable", "given", "words"),
    [
        ("TILEWRIGHT_CACHE_SIZE", "lots", "TILEWRIGHT_CACHE_SIZE: expected a size such as 500MB"),
        ("TILEWRIGHT_CACHE_DIR", "/dev/null/x", "/dev/null/x|not used: Not a directory"),
    ],
)
def test_a_variable_of_the_cache_is_named(variable, given, words, monkeypatch):
    monkeypatch.setenv(variable, given)
    done = CliRunner().invoke(app, ["cache"])
    assert done.exit_code in (1, 2)
    assert [word for word in words.split("|") if word not in done.output] == []


@pytest.mark.parametrize(
    ("product", "name"),
    [("H-100", "h100"), ("H200", "sm90"), ("B200", "sm100"), ("SM_90a", "sm90")],
)
def test_a_product_names_its_target(product, name):
    """A product has a name of its own only if its rates are not those of its target."""
    assert Options.of({"target": product}).target == name


@pytest.mark.parametrize(("given", "on"), [("1", True), ("off", False), ("No", False), ("", False)])
def test_a_variable_that_says_no_means_no(given, on, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_EVERYWHERE", given)
    assert Options.of({}).everywhere is on


def test_the_file_of_the_option_report_is_read_by_diff(tmp_path, monkeypatch):
    """The file of the option `report` can be read by `diff`. It has a line for each graph, and the
    sites of all lines are added up."""
    monkeypatch.chdir(tmp_path)
    shapes = {"heads": "4/2x32"}
    site = {"pattern": "qkv_cache", "op": "o", "scope": "layers.0", "shapes": shapes}
    graph = json.dumps({"matches": [site], "misses": []})
    Path("once").write_text(graph + "\n")
    Path("twice").write_text(f"{graph}\n{graph}\n")
    Path("spoilt").write_text(f"{graph}\n[]\n")
    same = CliRunner().invoke(app, ["diff", "twice", "twice"])
    assert (same.exit_code, "hold the same sites" in same.stdout) == (0, True)
    more = CliRunner().invoke(app, ["diff", "once", "twice"])
    assert (more.exit_code, more.stdout) == (
        1,
        "+ layers.*  qkv_cache -> o  heads=4/2x32  (1 -> 2)\n",
    )
    spoilt = CliRunner().invoke(app, ["diff", "once", "spoilt"])
    assert "not a report of tilewright" in spoilt.stderr


# --- what is compiled -----------------------------------------------------------------------------


class Named(torch.Tensor):
    """A tensor subclass that adds nothing."""


def in_dtype(dtype):
    def bend(monkeypatch, model, args):
        given = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
        return model.to(dtype), given, {}

    return bend


def subclassed(monkeypatch, model, args):
    return model, tuple(a.as_subclass(Named) if a.ndim > 2 else a for a in args), {}


def wrapped(monkeypatch, model, args):
    """Runs the model with activations of a tensor subclass that computes by its own rules."""
    return model, tuple(TwoTensor(a, a.clone()) if a.ndim == 2 else a for a in args), {}


def on_meta(monkeypatch, model, args):
    return model.to("meta"), tuple(a.to("meta") for a in args), {}


def failing(monkeypatch, model, args):
    """Makes a part of tilewright raise an error whose repro cannot be written."""
    monkeypatch.setenv("TILEWRIGHT_REPRO", "/dev/null/x")
    monkeypatch.setattr(fuse, "build_view", lambda graph: 1 / 0)
    return model, args, {}


def failing_pattern(monkeypatch, model, args):
    pattern = next(p for p in registered() if p.name == "qkv_cache")
    monkeypatch.setattr(type(pattern), "match", lambda *_: None)
    return model, args, {}


def given(**chosen):
    return lambda monkeypatch, model, args: (model, args, chosen)


def with_variable(name, value):
    def bend(monkeypatch, model, args):
        monkeypatch.setenv(name, value)
        return model, args, {}

    return bend


def trained(monkeypatch, model, args):
    return model.train(), args, {}


def in_mode(mode):
    """Returns a function that calls the model within a mode, which is entered in the call."""

    def bend(monkeypatch, model, args):
        def within(*inputs):
            with mode():
                return model(*inputs)

        return within, args, {}

    return bend


#: Maps a way to disturb a compilation to the text in its report or in the log.
COMPILED = {
    "float64": (in_dtype(torch.float64), "DTYPE"),
    "float16": (in_dtype(torch.float16), ""),
    "a subclass": (subclassed, ""),
    "a class that wraps": (wrapped, ""),
    "meta tensors": (on_meta, ""),
    "a full disk": (given(report="/dev/full"), "options['report']: nothing could be written"),
    "only that names nothing": (given(only=["nowhere"]), "names none of"),
    "no patterns' sites": (given(patterns=["moe"]), ""),
    "a failure of ours": (failing, "TILEWRIGHT_REPRO=/dev/null/x: no repro could be written"),
    "a pattern without an answer": (failing_pattern, "return a Match or reject(...)"),
    "a word for a flag": (with_variable("TILEWRIGHT_EVERYWHERE", "maybe"), ""),
    "a cache that is none": (with_variable("TILEWRIGHT_CACHE_DIR", "/dev/null/x"), ""),
    "train mode": (trained, ""),
    "inference mode": (in_mode(torch.inference_mode), ""),
    "grad mode": (in_mode(torch.enable_grad), ""),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("bent", COMPILED)
def test_no_compiled_model_dies_of_us(bent, monkeypatch, caplog):
    bend, words = COMPILED[bent]
    model, args, chosen = bend(monkeypatch, *build("page_offset"))
    expected = model(*copies(args))
    before = len(reports())
    with caplog.at_level(logging.WARNING, "tilewright"):
        ours = compiled(model, **chosen)(*copies(args))
    assert len(reports()) > before
    near = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 2e-2
    torch.testing.assert_close(ours, expected, rtol=near, atol=near)
    assert words in caplog.text + reports()[-1].text
