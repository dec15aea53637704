"""Tests the command line: every kind of MODEL, where output is printed, and the errors."""

from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import re
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tilewright.tools.cli import app
from tilewright.tools.commands import models
from tilewright.tools.commands.legend import explained
from tilewright.tools.kernel_audit import audit_kernels

CACHE_MODEL = """
    import torch

    class Attention(torch.nn.Module):
        def __init__(self, write):
            super().__init__()
            for name, heads in (("q", 4), ("k", 2), ("v", 2)):
                setattr(self, name, torch.nn.Linear(128, heads * 32, bias=False))
            self.write = write

        def forward(self, x, slots):
            q, k, v = self.q(x), self.k(x).view(-1, 2, 32), self.v(x).view(-1, 2, 32)
            self.write(self.k_cache, slots, k)
            self.write(self.v_cache, slots, v)
            return q.tanh()

    class Model(torch.nn.Module):
        def __init__(self, write):
            super().__init__()
            self.layers = torch.nn.ModuleList([Attention(write) for _ in range(2)])
            for layer in self.layers:
                layer.register_buffer("k_cache", torch.zeros(48, 2, 32))
                layer.register_buffer("v_cache", torch.zeros(48, 2, 32))

        def forward(self, x, slots):
            for layer in self.layers:
                x = layer(x, slots)
            return x

    def by_index(cache, slots, new):
        cache[slots] = new

    def by_addition(cache, slots, new):
        cache.index_add_(0, slots, new)

    def make(write=by_index):
        print("a line of the model's own")
        with torch.device("meta"):
            model = Model(write).to(torch.bfloat16).requires_grad_(False)
            x, slots = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
        return model, (x, slots), {}

    def make_missed():
        return make(by_addition)

    def make_plain():
        return torch.nn.Linear(3, 2), (torch.ones(1, 3),), {}

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(  # no mask
                self.q(x), self.k(x), self.v(x)
            )

    def make_encoder():
        model = torch.nn.Sequential()
        model.attention = Encoder()
        return model, (torch.ones(1, 2, 128, 32),), {}

    def make_empty():
        return len, ([1],), {}

    def make_untraceable():
        def forward(x):
            raise RuntimeError("boom\\nand more lines")  # boom
        return forward, (torch.ones(2),), {}

    class Misfit(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.linear(x, torch.ones(3, 7))  # the misfit

    def make_misfit():
        return Misfit(), (torch.ones(1, 5),), {}

    def make_bad_layer():
        return torch.nn.Linear("a", 3), (), {}  # a bad layer

    def make_broken_graph():
        def forward(x):
            if x.sum().item() > 0:  # the break
                return x + 1
            return x
        return forward, (torch.ones(2),), {}

    def make_misshapen():
        return torch.nn.Linear(3, 2), (torch.ones(1, 5),), {}

    def make_number():
        return 3

    def make_exit():
        raise SystemExit(7)
"""


@pytest.fixture
def inspect(tmp_path, monkeypatch):
    """Returns `inspect(*arguments)`, which runs the command in a folder that holds mine.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(CACHE_MODEL))
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    torch._dynamo.reset()

    def run(*arguments: str):
        return CliRunner().invoke(app, ["inspect", *arguments])

    return run


def test_the_version_is_the_package_s():
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.stdout.strip() == f"tilewright {importlib.metadata.version('tilewright')}"


@pytest.mark.parametrize("model", ["mine.py:make", "mine:make"])
def test_a_users_function_as_text(inspect, model):
    done = inspect(model, "--no-kernels")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{model}\ntarget sm100 (modelled), 1 graph")
    assert "Fused: 2 sites" in done.stdout
    assert "layers.*  x2  qkv_cache -> fused_qkv_paged  mine.py:" in done.stdout
    assert "heads=4/2x32 rope=none" in done.stdout
    assert "Missed" not in done.stdout


def test_what_the_model_prints_does_not_mix_with_the_report(inspect):
    done = inspect("mine.py:make", "--no-kernels", "--json")
    assert "a line of the model's own" in done.stderr
    json.loads(done.stdout)


def test_json_has_the_facts(inspect):
    done = inspect("mine.py:make", "--json", "--no-kernels", "--target", "sm90")
    report = json.loads(done.stdout)
    assert report["model"] == "mine.py:make"
    assert report["target"] == "sm90"
    assert [m["scope"] for m in report["matches"]] == ["layers.0", "layers.1"]
    match = report["matches"][0]
    assert (match["pattern"], match["op"]) == ("qkv_cache", "fused_qkv_paged")
    assert match["shapes"]["heads"] == "4/2x32"
    assert match["lowering"]
    assert match["reason"]
    assert report["misses"] == []
    (graph,) = report["graphs"]
    assert graph["nodes_after"] < graph["nodes"]


def test_kernels_come_with_their_audit(inspect, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    report = json.loads(inspect("mine.py:make", "--json", "--target", "sm90").stdout)
    names = {name for match in report["matches"] for name in match["kernels"]}
    assert {kernel["name"] for kernel in report["kernels"]} == names
    for kernel in report["kernels"]:
        assert kernel["error"] is None
        audit = kernel["audit"]
        assert audit["sm_target"] == "sm_90a"
        assert 16 < audit["registers"] <= 255
        assert audit["mma"]
        assert set(audit["mma"]) <= set(audit["opcodes"])
    text = inspect("mine.py:make", "--target", "sm90").stdout
    assert "Kernels for sm90" in text
    for kernel in report["kernels"]:
        opcode, count = next(iter(kernel["audit"]["mma"].items()))
        (row,) = (line for line in text.splitlines() if line.startswith(f"{kernel['name']} "))
        assert f"{opcode} x{count}" in row
        assert str(kernel["audit"]["shared_bytes"]) in row.split()
        for problem in kernel["problems"]:
            assert f"{kernel['name']}: {problem.split(':')[0]}" in text


def test_misses_come_with_code_place_reason_and_count(inspect):
    text = inspect("mine.py:make_missed", "--no-kernels")
    assert text.exit_code == 0
    assert "Fused" not in text.stdout
    assert "x2  qkv_cache  ACCUMULATED_WRITE  mine.py:" in text.stdout
    assert "anchored" in text.stdout
    report = json.loads(inspect("mine.py:make_missed", "--no-kernels", "--json").stdout)
    assert {m["code"] for m in report["misses"]} == {"ACCUMULATED_WRITE"}
    for miss in report["misses"]:
        assert miss["message"]
        assert miss["source"].startswith("mine.py:")


def test_nothing_to_fuse_is_a_report_too(inspect):
    done = inspect("mine.py:make_plain")
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "Nothing to fuse was found. Where patterns start, and what is there:" in said
    assert "(index_copy_, cache[slots] = k): nothing like it" in said
    assert "after them: only linear x1, the first in the top level" in said


def test_where_nothing_starts_the_nearest_is_named_with_its_place(inspect):
    done = inspect("mine.py:make_encoder")
    said = " ".join(done.stdout.split())
    line = line_of("no mask")
    where = f"the first in attention (mine.py:{line})"
    assert f"among heads: only scaled_dot_product_attention x1, {where}" in said
    assert "after them: only linear x3, the first in attention.q" in said
    assert "the topk of the numbers in the rows of a product: nothing" in said


def test_a_call_without_tensors_is_said_to_be_one(inspect):
    done = inspect("mine.py:make_empty")
    assert done.exit_code == 0
    assert "Nothing was captured" in done.stdout


def test_patterns_can_be_chosen_and_left_out(inspect):
    chosen = inspect("mine.py:make", "--no-kernels", "--patterns", "cache_store")
    assert "cache_store -> paged_kv_store" in chosen.stdout
    left_out = inspect("mine.py:make", "--no-kernels", "--patterns=-qkv_cache,-cache_store")
    assert "Nothing to fuse was found" in left_out.stdout


@pytest.mark.parametrize(("option", "tokens"), [("--dynamic", "T"), ("--no-dynamic", "3")])
def test_dynamic_makes_the_token_count_a_symbol(inspect, option, tokens):
    report = json.loads(inspect("mine.py:make", "--json", "--no-kernels", option).stdout)
    assert [m["shapes"]["x"] for m in report["matches"]] == [f"bfloat16[{tokens},128]"] * 2


ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")


def assert_shows(document: str, first_line: str, output: str) -> None:
    """Asserts that the block of a document with this first line equals the output to the last
    character.

    The command, times, and lines or ends of entries that `[...]` cuts are not compared.
    """
    (block,) = re.findall(rf"^```\n({re.escape(first_line)}\n.*?)^```$", document, re.M | re.S)
    shown = re.escape(re.sub(r"^\$ .*\n", "", block).strip("\n"))
    shown = re.sub(r"\\\([\d\\.]+\\ s\\\)", r"\\(\\d+\\.\\d+ s\\)", shown)
    cut = re.escape("[...]")
    shown = shown.replace(f"\\\n{cut}", r"(?:\n.*)*").replace(f"\\ {cut}", r".*(?:\n    .*)*")
    said = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
    assert re.fullmatch(shown, said), f"the document shows\n{block}\nand the command says\n{said}"


def test_a_zoo_model_in_full_size_is_shown_as_in_the_readme(monkeypatch):
    pytest.importorskip("transformers", reason="the zoo needs transformers")
    monkeypatch.setattr(
        models,
        "audit_kernels",
        lambda kernels, *given, **options: audit_kernels(kernels[:1], *given),
    )
    torch._dynamo.reset()
    done = CliRunner().invoke(app, ["inspect", "llama3-8b"])
    assert done.exit_code == 0, done.stderr
    assert "model.layers.*.self_attn  x32  qkv_cache -> fused_qkv_paged" in done.stdout
    assert_shows(README, "$ tilewright inspect llama3-8b", done.stdout)


def test_a_missed_site_is_shown_as_in_troubleshooting(inspect, tmp_path):
    pytest.importorskip("transformers", reason="a cache of transformers")
    (tmp_path / "growing.py").write_text(
        "from tests.models.hf import build_hf\n"
        "def make():\n    return build_hf('llama', cache='dynamic')[:3]\n"
    )
    done = inspect("growing.py:make", "--no-kernels", "--patterns", "cache_absent")
    head, _, rest = done.stdout.partition("\n\n")
    assert head.startswith("growing.py:make\n"), done.stderr
    assert "tilewright explain GROWING_CACHE" in rest.partition("\n\nIn words\n")[2]
    assert_shows(TROUBLESHOOTING, "Missed: 4 sites", rest.partition("\n\nA step: ")[0])


@pytest.mark.parametrize(("was", "now"), [
    ("11.2 us modelled", "11.3 us modelled"),
    ("qkv_projection_swapped_", "qkv_projection_swapped_0"),
    (" nodes, ", "0 nodes, "),
    ("sdpa_attention.py:193", "sdpa_attention.py:194"),
    ("UTCHMMA x16", "UTCHMMA x17"),
])  # fmt: skip
def test_a_stale_readme_would_be_seen(was, now):
    (block,) = re.findall(r"^```\n\$ tilewright inspect llama3-8b\n(.*?)^```$", README, re.M | re.S)
    output = block.replace(" [...]", "\n    shapes     some").replace("[...]", "streamed_linear")
    assert_shows(README, "$ tilewright inspect llama3-8b", output)
    assert was in output
    with pytest.raises(AssertionError, match="the document shows"):
        assert_shows(README, "$ tilewright inspect llama3-8b", output.replace(was, now))


def test_a_report_ends_in_words_for_its_short_forms(inspect):
    """A report ends with an explanation of its short forms, and with the places that explain its
    misses."""
    report, _, words = inspect("mine.py:make", "--no-kernels").stdout.partition("In words\n")
    assert "\n  w4 s4" in words
    assert "what to do" not in words
    assert set(re.findall(r"gqa=\d+", report)) == set(re.findall(r"gqa=\d+", words)) != set()
    assert ("page+offset" in report) == ("page+offset" in words)
    missed = inspect("mine.py:make_missed", "--no-kernels").stdout.partition("In words\n")[2]
    assert "anchored" in missed
    assert "what to do: tilewright explain ACCUMULATED_WRITE" in " ".join(missed.split())


@pytest.mark.parametrize(
    ("report", "shown"),
    [
        (
            "  layers.0  x2  p -> op  m.py:1\n    shapes     slots=page+offset",
            ["slots=page+offset"],
        ),
        ("  graph  p -> op  m.py:1", ["graph"]),
        ("  layers.0  p  K_PATH  m.py:1\n    k path     seen", ["k path, v path, q path"]),
        ("    reason     swapped 128x16x128 /2 w4 s4", ["swapped", "128x16x128", "/2", "w4 s4"]),
        ("    reason     one kernel,\n               64x16x128 w4 s4", ["64x16x128", "w4 s4"]),
        ("    shapes     gqa=16 heads=32/2x128", ["gqa=16"]),
        ("  modelled.w4  p -> op  ws.py:1\n    kernels    graph_w4_s4", []),
    ],
)
def test_a_short_form_is_found_where_it_stands(report, shown):
    assert [term for term, _ in explained(report)] == shown


def test_a_file_without_a_function_lists_those_that_give_a_model_first(inspect, tmp_path):
    (tmp_path / "models.py").write_text(
        "def about(x): return x\n"
        "def behind(): return make()\n"
        "def make(): return None, (), {}\n"
        "def another(x): return x, (), {}\n"
    )
    for given in ("models.py", "models.py:"):
        done = inspect(given)
        assert done.exit_code == 2
        said = f"{given}: expected models.py:function; it defines make, behind, about, another"
        assert done.stderr.strip() == f"tilewright: {said}"


def test_tracing_is_shown_on_a_terminal_alone(monkeypatch):
    for is_terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal)
        monkeypatch.setattr(models, "make_console", lambda stderr, console=console: console)
        with models.waiting("tracing m"):
            time.sleep(0.15)
        assert ("tracing m" in out.getvalue()) is is_terminal


ERRORS = [
    (("llama3_8b",), "'llama3_8b' is not a zoo name"),
    (("mine.py:absent",), "absent is not there in mine.py"),
    (("missing.py:make",), "missing.py: no such file"),
    (("broken.py:make",), "importing broken.py failed: ModuleNotFoundError"),
    (("no_such_module:make",), "importing no_such_module failed"),
    (("mine.py:make_number",), "expected (model, args, kwargs), got int"),
    (("mine.py:make_exit",), "its code ended the process (exit 7)"),
    (("mine.py:make_untraceable",), "cannot be traced: RuntimeError: boom"),
    (("mine.py:make_misshapen",), "same reduction dim, but got [1, 5] X [3, 2]"),
    (("mine.py:make", "--target", "sm70"), "sm90, sm89, sm86, sm80, got 'sm70'"),
    (("mine.py:make", "--target", "interpret"), "--target: expected one of sm100, sm103"),
    (("mine.py:make", "--patterns", "nonsense"), "--patterns: unknown ['nonsense']"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[row[1] for row in ERRORS])
def test_an_error_is_one_line_on_stderr_and_exit_code_two(inspect, arguments, message):
    done = inspect(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line != "a line of the model's own"]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("tilewright: ")
    assert message in said[0]


def line_of(remark: str) -> int:
    """Returns the line of mine.py that ends in a comment."""
    rows = textwrap.dedent(CACHE_MODEL).splitlines()
    (number,) = (n for n, row in enumerate(rows, 1) if row.endswith(f"# {remark}"))
    return number


@pytest.mark.parametrize(
    ("function", "remark", "reason"),
    [
        ("make_misfit", "the misfit", "must have same reduction dim"),
        ("make_bad_layer", "a bad layer", "calling mine.py:make_bad_layer failed: TypeError"),
        ("make_untraceable", "boom", "RuntimeError: boom"),
    ],
)
def test_an_error_inside_torch_names_the_user_s_own_line(inspect, function, remark, reason):
    done = inspect(f"mine.py:{function}")
    assert done.exit_code == 2
    assert reason in done.stderr
    assert done.stderr.rstrip().endswith(f"mine.py:{line_of(remark)})")


def test_a_graph_break_names_the_user_s_own_line_and_what_to_do(inspect):
    report = json.loads(inspect("mine.py:make_broken_graph", "--json").stdout)
    (miss,) = report["misses"]
    assert miss["code"] == "GRAPH_BREAK"
    assert "needs a tensor's value as a Python number" in miss["message"]
    assert miss["message"].endswith(f"(mine.py:{line_of('the break')})")
    assert miss["hint"].startswith("compute with the tensor itself")
    assert "cache.index_copy_(dim, positions, k)" in miss["hint"]
    assert "capture_scalar_outputs" not in miss["hint"]


def test_debug_shows_the_trace_before_the_line(inspect):
    done = inspect("mine.py:make_untraceable", "--debug")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Traceback (most recent call last)" in done.stderr
    assert "and more lines" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("tilewright: mine.py:make_untraceable: ")


def test_logging_is_as_before_after_an_error(inspect):
    inspect("mine.py:make_untraceable")
    assert logging.root.manager.disable == logging.NOTSET


def test_the_installed_script_is_this_program():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="tilewright")
    assert script.value == "tilewright.tools.cli:main"
    assert callable(script.load())
    assert Path(sys.modules["tilewright.tools.cli"].__file__).name == "cli.py"
