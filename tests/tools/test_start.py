"""Tests that commands start at once: those that trace no model import no torch, and ops import
little besides torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SNAPSHOT = "# torch 2.13\nlayers.* x2  qkv_cache -> fused_qkv_paged  heads=4/2x32\n"
SITE = {"pattern": "qkv_cache", "op": "fused_qkv_paged", "shapes": {"heads": "4/2x32"}}
REPORT = {"matches": [SITE | {"scope": f"layers.{n}"} for n in range(2)], "misses": []}
HEAVY = {"torch", "triton", "sympy", "numpy", "networkx", "transformers"}


def printed(code: str, *arguments: str) -> str:
    """Returns what a program in a separate process prints on stdout."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


RUN = """
import sys
from tilewright.tools.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--version",), "tilewright 0."),
        (("--help",), "explain"),
        (("inspect", "--help"), "llama3-8b"),
        (("verify", "--help"), "--layers"),
        (("explain",), "GROWING_CACHE"),
        (("explain", "GROWING_CACHE"), "static cache"),
        (("zoo",), "llama3-8b"),
        (("bench",), "compile_time"),
        (("cache",), "size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_that_traces_nothing_imports_no_torch(arguments, said, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    text, _, modules = printed(RUN, *arguments).rstrip().rpartition("\n")
    assert said in text
    assert HEAVY.isdisjoint(modules.split())


def test_a_saved_report_is_compared_with_a_snapshot_without_torch(tmp_path):
    """A saved report is compared with a snapshot without torch. The layers of a report are named
    like the layers of a snapshot."""
    (tmp_path / "a.snapshot").write_text(SNAPSHOT)
    (tmp_path / "b.json").write_text(json.dumps(REPORT))
    files = (str(tmp_path / "a.snapshot"), str(tmp_path / "b.json"))
    text, _, modules = printed(RUN, "diff", *files).rstrip().rpartition("\n")
    assert "hold the same sites" in text.replace("\n", " ")
    assert HEAVY.isdisjoint(modules.split())


def test_the_ops_import_neither_the_emitter_s_algebra_nor_a_compiler_nor_what_makes_kernels():
    code = """
import sys, torch
before = set(sys.modules)
import tilewright.ops
print(*set(sys.modules) - before)
"""
    modules = printed(code).split()
    assert "tilewright.ops" in modules
    parts = ("sympy", "triton", "networkx", "torch._dynamo", "torch._inductor")
    # These modules write the entries of the kernel cache.
    parts += ("filelock", "tilewright.codegen.audit")
    assert [n for n in modules if n.startswith(parts)] == []


def test_a_name_that_the_compiler_has_not_is_an_attribute_error():
    import tilewright.compiler

    assert not hasattr(tilewright.compiler, "raise")
    assert all(hasattr(tilewright.compiler, name) for name in tilewright.compiler.__all__)


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name in ("transformers", "peft"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import tilewright
from tilewright.tools.models.engine import engine_steps
from tilewright.tools.zoo import load_model
used = {
    "tilewright.PagedCache": lambda: tilewright.PagedCache,
    "tilewright.load_modelopt": lambda: tilewright.load_modelopt,
    "tilewright.serving.enable": lambda: tilewright.serving.enable,
    "tilewright.serving.BatchingConfig": lambda: tilewright.serving.BatchingConfig,
    "--engine": lambda: engine_steps(None).__enter__(),
    "llama3-8b": lambda: load_model("llama3-8b"),
}
for name, use in used.items():
    try:
        use()
        print(name, "needs nothing")
    except (ModuleNotFoundError, ValueError) as error:
        print(str(error).startswith(name), str(error).endswith("pip install transformers"))
tilewright.prepare, tilewright.cache_argument, tilewright.lower
"""


def test_what_needs_transformers_says_so_without_it():
    assert printed(ABSENT).splitlines() == ["True True"] * 6
