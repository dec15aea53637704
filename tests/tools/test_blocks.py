"""Tests the code blocks of each page: a block runs as it is pasted, in order, or a comment says why
it does not."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tools.blocks import Reader, assert_like, blocks, unmarked
from tilewright.patterns import language
from tilewright.tools.models.loading import import_place

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
#: Pages that scripts write. Other tests compare them with their sources.
GENERATED = ("op-reference",)
#: Files of examples/ that a page uses, and that its reader has.
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
    """Returns a reader in a separate folder. What it registers is removed afterwards."""
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:xdist -p no:hypothesispytest\n")
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("TILEWRIGHT_EVERYWHERE", raising=False)  # a reader's machine does not set it
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


def with_blocks(kinds: set[str]) -> list[Path]:
    """Returns the pages that have a block of one of these kinds."""
    return [
        page for page in PAGES if kinds & {kind for kind, _, _ in blocks(page.read_text("utf-8"))}
    ]


@pytest.mark.parametrize("page", with_blocks({"tested", "run"}), ids=lambda path: path.stem)
def test_a_page_does_what_it_says(page, reader, pytester):
    """On a CPU, blocks for a GPU are left out."""
    for needed in NEEDS.get(page.stem, ()):
        pytest.importorskip(needed, reason=f"{page.stem} needs {needed}")
    for name in TAKEN.get(page.stem, ()):
        shutil.copy(ROOT / "examples" / name, pytester.path)
        # A file is one module, however a step imports it, because an op can be registered only once
        # in a process.
        sys.modules[Path(name).stem] = import_place(name)
    reader.read(page)
    assert reader.done
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
@pytest.mark.parametrize("page", with_blocks({"gpu"}), ids=lambda path: path.stem)
def test_a_page_does_what_it_says_on_a_gpu(page, reader):
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    reader.read(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_block_is_run_or_says_why_not(page):
    if page.stem in GENERATED:
        pytest.skip("written by a script")
    assert unmarked(page.read_text("utf-8")) == []


def test_tests_that_blocks_name_compare_them():
    for page in PAGES:
        for path in re.findall(r"<!-- checked by (\S+) -->", page.read_text("utf-8")):
            assert page.name in (ROOT / path).read_text("utf-8"), f"{page.name}: {path}"


def test_every_page_is_in_the_menu_of_the_site():
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    named = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[2:]]
    assert [page for page in named if not re.search(rf"- (?:.+: )?{page}\n", menu)] == []
    assert len(TUTORIALS) >= 7


def test_a_stale_output_would_be_seen():
    assert_like("one (0.20 s)\n[...]\nlast x2\n", "one (1.31 s)\nmore\nlast x2\n")
    with pytest.raises(AssertionError, match="the page shows"):
        assert_like("one (0.20 s)\n[...]\nlast x2\n", "one (1.31 s)\nmore\nlast x3\n")


def test_a_block_without_a_known_mark_would_be_seen():
    run, known = (
        "<!-- tested -->\n```python\none\n```\n",
        "<!-- shown: a sketch -->\n```\ntwo\n```\n",
    )
    assert unmarked(f"{run}\n{known}") == []
    assert unmarked("prose\n\n```\nthree\n```\n") == ["three"]
    assert unmarked("<!-- tset -->\n```\nfour\n```\n") == ["four"]
    assert unmarked("<!-- shown: -->\n```\nfive\n```\n") == ["five"]


_SITE = ("material", "mkdocstrings")


@pytest.mark.skipif(not all(map(importlib.util.find_spec, _SITE)), reason="needs the extra 'docs'")
def test_the_site_builds_without_a_warning(tmp_path):
    """Every link leads to a page of the site, including links to sources."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path / "site"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "site" / "ops.html").read_text("utf-8")
    assert 'href="source/ops/formats/expert_weight.py.html"' in page
    assert (tmp_path / "site" / "source/ops/formats/expert_weight.py.html").is_file()
    assert (tmp_path / "site" / "index.html").is_file()
    api = (tmp_path / "site" / "api.html").read_text("utf-8")
    assert "<strong>strict</strong>" in api  # the arguments in a docstring are shown as a list
    assert ":class:" not in api
    assert "fused_qkv_paged" in (tmp_path / "site/search/search_index.json").read_text("utf-8")
