"""Each tutorial, done as it says: what it shows is what comes out."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tools.tutorials import Reader, assert_like, blocks
from tilewright.patterns import language
from tilewright.tools.models.loading import import_place

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
#: What a reader has besides: files of examples/ that a tutorial takes.
TAKEN = {
    "write-a-pattern": ("swiglu_pattern.py",),
    "quantised-models": ("quantised_checkpoints.py",),
    "write-a-kernel": ("add_rms_norm_kernel.py", "post_norm_pattern.py"),
}
NEEDS = {
    "serve-llama": ("transformers",),
    "two-gpus": ("transformers.distributed",),
    "quantised-models": ("transformers", "torchao", "compressed_tensors", "gptqmodel"),
}


@pytest.fixture
def reader(pytester, monkeypatch):
    """In a folder of its own; what it registers is taken out again."""
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:xdist -p no:hypothesispytest\n")
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    torch._dynamo.reset()
    codes, known, modules = dict(language.CODES), names_of_patterns(), set(sys.modules)

    def run(arguments: list[str]) -> str:
        torch._dynamo.reset()
        return pytester.runpytest_inprocess(*arguments).stdout.str()

    def forget() -> None:
        for pattern in names_of_patterns() - known:
            language.unregister(pattern)
        for code in set(language.CODES) - set(codes):
            del language.CODES[code]

    yield Reader(run, forget)
    forget()
    own = {str(path) for path in pytester.path.glob("*.py")}
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) in own:
            del sys.modules[name]


def names_of_patterns() -> set[str]:
    return {pattern.name for pattern in language.registered()}


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_does_what_it_says(tutorial, reader, pytester):
    for needed in NEEDS.get(tutorial.stem, ()):
        pytest.importorskip(needed, reason=f"{tutorial.stem} needs {needed}")
    for name in TAKEN.get(tutorial.stem, ()):
        shutil.copy(ROOT / "examples" / name, pytester.path)
        # One module for a file, however a step imports it: an op registers once in a process.
        sys.modules[Path(name).stem] = import_place(name)
    reader.read(tutorial)
    assert reader.done
    assert not torch.distributed.is_initialized()


def test_every_tutorial_is_a_page_of_the_site():
    pages = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [t for t in TUTORIALS if f"- tutorials/{t.name}\n" not in pages] == []
    assert len(TUTORIALS) == 7


def test_a_stale_output_would_be_seen():
    """And a block is not skipped for a name that nobody knows."""
    assert_like("one (0.20 s)\n[...]\nlast x2\n", "one (1.31 s)\nmore\nlast x2\n")
    with pytest.raises(AssertionError, match="the tutorial shows"):
        assert_like("one (0.20 s)\n[...]\nlast x2\n", "one (1.31 s)\nmore\nlast x3\n")
    texts = [tutorial.read_text("utf-8") for tutorial in TUTORIALS]
    marks = [line for text in texts for line in text.splitlines() if line.startswith("<!--")]
    known = [block for text in texts for block in blocks(text)]
    assert len([m for m in marks if not m.startswith("<!-- from ")]) == len(known) > 15


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs the extra 'docs'")
def test_the_site_builds_without_a_warning(tmp_path):
    """And every link leads to a page of it, those to sources too."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path / "site"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "site" / "ops.html").read_text("utf-8")
    assert 'href="source/ops/formats/expert_weight.py.html"' in page
    assert (tmp_path / "site" / "source/ops/formats/expert_weight.py.html").is_file()
    assert (tmp_path / "site" / "index.html").is_file()
    assert "fused_qkv_paged" in (tmp_path / "site/search/search_index.json").read_text("utf-8")
