"""Tests that the statements of the documents are true."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

import tilewright
from tests.test_packages import LAYERS
from tilewright import compiler, serving
from tilewright.compiler import Options
from tilewright.ops.contract import all_ops
from tilewright.patterns.language import CODES
from tilewright.tools.commands.legend import TERMS
from tilewright.tools.report.miss_guide import miss_guide

ROOT = Path(__file__).resolve().parents[2]
# This runs when the tests are collected. By then, no pattern of a test has added codes.
OWN_CODES = dict(CODES)


def test_every_miss_code_has_its_paragraph_under_its_meaning():
    text = (ROOT / "docs" / "miss-codes.md").read_text("utf-8")
    sections = re.findall(r"^### (\w+)\n\*(.+)\*.*\n\n> .+\n\n(.+)", text, re.MULTILINE)
    assert {code: meaning for code, meaning, _ in sections} == OWN_CODES
    assert len(sections) == len(OWN_CODES)


def test_every_miss_code_says_last_what_to_do():
    guide = miss_guide({})
    assert set(guide) == set(OWN_CODES)
    for code, entry in guide.items():
        *_, last = entry.text.split("\n\n")
        assert re.match(r"\*\*What to do:\*\* \S", last), f"{code}: {last}"


DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        prose = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_files_that_documents_name_exist():
    """`folder/file.py` in backquotes must exist, and `folder/file.py: function` must be an
    identifier in it."""
    named = re.compile(
        r"`((?:codegen|ops|patterns|compiler|tools|tests|examples|benchmarks)/[\w/.]+)"
    )
    for document in DOCUMENTS:
        for path in named.findall(document.read_text("utf-8")):
            assert (ROOT / path).exists(), f"{document.name}: {path}"


def test_every_short_form_of_a_report_is_explained():
    text = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    assert [t.shown for t in TERMS if f"| `{t.shown}` | {t.meaning} |" not in text] == []


def test_the_citation_names_the_version_of_the_package():
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"version: {importlib.metadata.version('tilewright')}\n" in text


def test_issue_templates_ask_for_what_a_bug_needs():
    for template in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"):
        text = template.read_text("utf-8")
        assert "tilewright doctor" in text
        assert "repro file" in text.lower()


def test_functions_that_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = re.findall(r"`(\w+/[\w/]+\.py)`[^`\n]{0,20}`([\w.]+)(?:\(\))?`", text)
    assert len(named) > 10
    for path, name in named:
        source = (ROOT / path).read_text("utf-8")
        last = name.rpartition(".")[2]
        assert re.search(rf"\b{last}\b", source), f"{path} does not name {name}"


def test_code_that_documents_quote_stands_in_its_file():
    quoted = re.compile(r"<!-- from (\S+) -->\n```(?:python|text)\n(.*?)```", re.DOTALL)
    found = 0
    for document in DOCUMENTS:
        for path, block in quoted.findall(document.read_text("utf-8")):
            source = (ROOT / path).read_text("utf-8")
            depths = [textwrap.indent(block, " " * depth) for depth in range(0, 17, 4)]
            assert any(text in source for text in depths), f"{document.name}: {block}"
            found += 1
    assert found >= 3


def test_the_tables_are_those_of_the_results():
    tables = _script("measured_tables")
    again = "run python docs/measured_tables.py"
    assert tables.PAGE.read_text("utf-8") == tables.measured(), again


def test_the_charts_are_those_of_the_results():
    """Each chart is drawn from the stored results, and a page shows it."""
    script = _script("charts")
    for name, draw in script.CHARTS.items():
        assert (script.PICTURES / name).read_text("utf-8") == draw(), "run python docs/charts.py"
    assert sorted(script.CHARTS) == sorted(p.name for p in script.PICTURES.glob("chart-*.svg"))
    shown = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert [name for name in script.CHARTS if f"(pictures/{name})" not in shown] == []


def test_a_bar_is_as_long_as_its_number():
    """A bar is as long as its number: twice the number has twice the length, within its group."""
    script = _script("charts")
    groups = [script.Group("one", {"eager": 10.0, "tilewright": 20.0})]
    drawn = script.svg("title", [script.Panel("panel", groups)], "note")
    widths = dict(
        re.findall(r'<rect class="(\w+)" x="\d+" y="\d+" width="(\d+)" height="13"', drawn)
    )
    assert int(widths["tilewright"]) == pytest.approx(2 * int(widths["eager"]), abs=1)


def test_the_page_of_predictions_is_that_of_the_results():
    script = _script("predictions_page")
    assert script.PAGE.read_text("utf-8") == script.page(), "run python docs/predictions_page.py"
    published = script.kept("published_b200")["rows"]
    assert len(published) >= 10
    assert all(row["source"].startswith("https://github.com/") for row in published)


def test_the_page_of_coverage_shows_every_kept_row():
    """The page of coverage shows every row of the results file. A run for a few models writes the
    page again from the stored rows of all models."""
    table = _script("coverage_table", "benchmarks")
    kept = json.loads(table.KEPT.read_text("utf-8"))
    text = table.DOC.read_text("utf-8")
    assert text == table.page(kept), "run python benchmarks/coverage_table.py"
    assert len(kept["rows"]) > 180
    run = [row["model"] for row in kept["rows"] if "decode" in row]
    assert [name for name in run if f"\n| {name} |" not in text] == []


def test_the_page_of_quantised_models_shows_every_kept_row(monkeypatch):
    """The page of quantised models shows every row of the results file. Prepared models have no
    larger error than the library, and no point in them is silent."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    table = _script("quantised_table", "benchmarks")
    kept = json.loads(table.KEPT.read_text("utf-8"))
    text = table.DOC.read_text("utf-8")
    assert text == table.page(kept), "run python benchmarks/quantised_table.py"
    assert {row["model"].split("+")[0] for row in kept["rows"]} == {
        "llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"
    }  # fmt: skip
    assert [row["model"] for row in kept["rows"] if table.is_further(row)] == []
    assert [row["model"] for row in kept["rows"] if table.silent(row)] == []
    unread = [row["model"] for row in kept["rows"] if "prepared" not in row]
    # Transformers reads these.
    assert sorted(unread) == ["deepseek_v3+ct-w8a8", "qwen3_moe+ct-w8a8"]


def test_the_hints_of_the_page_of_quantised_models_are_those_of_the_program(monkeypatch):
    """The kept hints, which the page shows, occur in the program's text. After a change of a hint,
    `python benchmarks/quantised.py --formats ...` measures the formats with this hint again."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    kept = json.loads(_script("quantised_table", "benchmarks").KEPT.read_text("utf-8"))
    files = [path for layer in ("patterns", "compiler") for path in (ROOT / layer).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    program = "\n".join(text for text in texts if isinstance(text, str))
    program += (ROOT / "docs" / "miss-codes.md").read_text("utf-8")
    said = {line for row in kept["rows"] for line in row.get("prepared", {}).get("said", ())}
    hints = {line.partition("Hint: ")[2] for line in said}
    hints |= {reason for row in kept["rows"] for reason in row.get("left", ())}
    parts = {part for hint in hints for part in re.split(r"; (?:or )?| \(`", hint)}
    assert len(parts) > 4
    assert [part for part in sorted(parts) if part not in program] == []


def test_the_table_of_planted_faults_counts_the_kept_verdicts():
    """The table of planted faults agrees with the stored verdicts. Each test that it counts as
    written since then exists."""
    kept = json.loads((ROOT / "tests" / "mutants.json").read_text("utf-8"))
    faults = [fault for fault in kept if 101 <= fault["seed"] <= 112]
    verdicts = ("changes nothing", "caught", "caught by a test written since", "survived")
    text = (ROOT / "docs" / "soundness.md").read_text("utf-8")
    for layer in ("codegen", "ops", "patterns", "compiler", "all"):
        own = [fault["verdict"] for fault in faults if fault["file"].startswith(f"{layer}/")]
        own = own or [fault["verdict"] for fault in faults]
        row = [f"`{layer}`" if layer != "all" else layer, len(own), *map(own.count, verdicts)]
        assert f"| {' | '.join(map(str, row))} |" in text
    for fault in kept:
        if fault["verdict"] == "caught by a test written since" and fault["by"]:
            file, _, name = fault["by"].partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text("utf-8"), fault


def test_the_readme_is_a_front_page():
    """The README is short, has no table of figures, and has the commands that the gate and a
    newcomer run."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(readme.splitlines()) <= 160
    assert re.findall(r"^\|.*---: \|$", readme, re.MULTILINE) == []  # it has no table of numbers
    assert "docs/pictures/chart-tokens.svg" in readme
    for command in ("make test", "make demo", "make .venv/.installed", "tilewright doctor"):
        assert re.search(rf"^{command}\b", readme, re.MULTILINE), command


def test_every_option_and_variable_has_a_line():
    text = (ROOT / "docs" / "options.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)[^`]*` \|", text, re.MULTILINE)
    options = {field.name for field in dataclasses.fields(Options)}
    sources = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]
    named = re.compile(r"\bTILEWRIGHT_[A-Z_]+\b")
    variables = {name for path in sources for name in named.findall(path.read_text("utf-8"))}
    assert set(rows) == options | variables


def test_every_public_name_is_on_the_page_of_the_api():
    shown = (ROOT / "docs" / "api.md").read_text("utf-8")
    for package in (tilewright, compiler):
        names = [
            f"{package.__name__}.{name}"
            for name in package.__all__
            # `serving` is a module, and the next test checks its names.
            if name[0] != "_" and name != "serving"
        ]
        public = [name.replace("tilewright.compiler.", "tilewright.") for name in names]
        assert [
            name
            for name, short in zip(names, public, strict=True)
            if f"::: {name}\n" not in shown and f"::: {short}\n" not in shown
        ] == [f"{package.__name__}.tilewright"] * (package is compiler)  # the backend itself


@pytest.mark.parametrize("name", serving.__all__)
def test_every_public_name_of_serving_is_once_on_the_page_of_the_api(name):
    shown = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert len(re.findall(rf"^::: tilewright\.compiler\.serving\S*\.{name}$", shown, re.M)) == 1


def _script(name, folder="docs"):
    """Returns a module of a folder that is no package."""
    path = ROOT / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses look up annotations there
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
        del sys.modules[name]
    return module


def test_the_op_reference_is_what_the_ops_declare():
    script = _script("op_reference")
    assert script.PAGE.read_text() == script.page(), "run python docs/op_reference.py"


def test_every_op_s_reference_has_its_formula():
    """op-reference.md shows the reference's formula: indented lines, one of which says what is
    stored or returned."""
    for op in all_ops():
        if op.namespace == "tilewright":
            formula = re.findall(r"^    .* = .+", inspect.cleandoc(op.reference.__doc__), re.M)
            assert formula, (
                f"{op.name}: the docstring of its reference has no formula `    out = ...`, "
                "indented by 4; where every line but the first is indented alike, Python takes the "
                "indentation away: put a sentence below the formula"
            )


def test_the_pictures_are_what_the_patterns_make():
    script = _script("pattern_pictures")
    blocks = script.examples()
    for pattern in set(blocks) - {"names"}:
        for name, svg in script.pictures(pattern, blocks).items():
            again = f"{name}: run python docs/pattern_pictures.py {pattern}"
            assert (script.PICTURES / name).exists(), again
            assert _nodes(svg)
            assert _nodes((script.PICTURES / name).read_text()) == _nodes(svg), again


_NODE = re.compile(r'<g class="(node[^"]*)".*?<text[^>]*>([^<]*)</text>', re.DOTALL)


def _nodes(svg):
    """Returns the class and label of every node. The places of nodes may differ from run to run."""
    return sorted(_NODE.findall(svg))


def test_screenshots_are_skipped_without_a_browser(capsys):
    assert _script("page_pictures").main(["--chromium", "no-such-browser"]) == 0
    assert "skipped" in capsys.readouterr().err
