"""What the documents say is so."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tilewright.patterns.language import CODES

ROOT = Path(__file__).resolve().parents[2]
# Taken when the tests are collected: no pattern of a test has added codes by then.
OWN_CODES = dict(CODES)


def test_every_miss_code_has_its_paragraph_under_its_meaning():
    text = (ROOT / "docs" / "miss-codes.md").read_text("utf-8")
    sections = re.findall(r"^### (\w+)\n\*(.+)\*\n\n(.+)", text, re.MULTILINE)
    assert {code: meaning for code, meaning, _ in sections} == OWN_CODES
    assert len(sections) == len(OWN_CODES)


def test_links_between_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text("utf-8")):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_files_that_documents_name_exist():
    """`folder/file.py` in backquotes, and `folder/file.py: function` as an identifier in it."""
    named = re.compile(
        r"`((?:codegen|ops|patterns|compiler|tools|tests|examples|benchmarks)/[\w/.]+)"
    )
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for path in named.findall(document.read_text("utf-8")):
            assert (ROOT / path).exists(), f"{document.name}: {path}"


def test_functions_that_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = re.findall(r"`(\w+/[\w/]+\.py)`[^`\n]{0,20}`([\w.]+)(?:\(\))?`", text)
    assert len(named) > 10
    for path, name in named:
        source = (ROOT / path).read_text("utf-8")
        last = name.rpartition(".")[2]
        assert re.search(rf"\b{last}\b", source), f"{path} does not name {name}"


def test_the_readme_s_tables_are_those_of_the_results():
    path = ROOT / "docs" / "measured_tables.py"
    spec = importlib.util.spec_from_file_location("measured_tables", path)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    readme = (ROOT / "README.md").read_text("utf-8")
    assert tables.with_tables(readme) == readme, "run python docs/measured_tables.py"


def test_the_readme_s_examples_run(capsys):
    pytest.importorskip("transformers", reason="the zoo needs transformers")
    torch._dynamo.reset()
    readme = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"<!-- tested -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "model.layers.0.self_attn" in said
    assert "import triton" in said
