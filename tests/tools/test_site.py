"""Tests the site: its search without a server, its colours, and names for readers who cannot see
it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "docs" / "javascripts" / "iframe-worker.js"
PAGE = Path(__file__).with_name("search_from_a_folder.js")
INDEX = {
    "config": {
        "lang": ["en"],
        "separator": r"[\s\-]+",
        "pipeline": ["stopWordFilter"],
        "fields": {"title": {"boost": 1000.0}, "text": {"boost": 1.0}, "tags": {"boost": 1e6}},
    },
    "docs": [
        {"location": "a.html", "title": "Paged caches", "text": "Pages and a block table."},
        {"location": "b.html", "title": "Targets", "text": "Chips that kernels are made for."},
    ],
}


def search_script() -> Path:
    """Returns the theme's own script, as a site has it."""
    if shutil.which("node") is None:
        pytest.skip("needs node, which runs the site's scripts")
    found = importlib.util.find_spec("material")
    if found is None or found.origin is None:
        pytest.skip("needs the theme of the site, in the extra 'docs'")
    workers = Path(found.origin).parent / "templates" / "assets" / "javascripts" / "workers"
    (script,) = workers.glob("search.*.min.js")
    return script


@pytest.mark.parametrize(
    ("query", "titles"), [("block table", ["Paged caches"]), ("chips", ["Targets"]), ("absent", [])]
)
def test_the_search_of_a_folder_finds_pages(query, titles, tmp_path):
    """The theme's script runs in place of a worker, which `file://` does not allow."""
    index = tmp_path / "search_index.json"
    index.write_text(json.dumps(INDEX))
    command = ["node", str(PAGE), str(SHIM), str(search_script()), str(index), query]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == titles


def test_the_script_is_the_site_s_own():
    """The plugin `offline` takes a script from another server, unless a script of that name
    exists."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "\n  - offline" in settings
    assert f"    - {SHIM.relative_to(ROOT / 'docs')} " in settings


def test_what_scrolls_can_be_reached_by_the_keyboard():
    """The theme makes a block of code reachable only after it has been on the screen."""
    if shutil.which("node") is None:
        pytest.skip("needs node, which runs the site's scripts")
    script = SHIM.with_name("scrolled.js")
    command = ["node", str(PAGE.with_name("scrolled_in_a_page.js")), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"tables": [0, None], "code": [0, None]}


STYLES = (ROOT / "docs" / "stylesheets" / "site.css").read_text("utf-8")
#: The backgrounds of the theme's code and of its search results, by the theme's colour scheme.
BEHIND_CODE = {"default": "f5f5f5", "slate": "272a35"}
BEHIND_RESULTS = {"default": "ffffff", "slate": "1e2129"}
DOCUMENTS = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colours RRGGBB, from 1 to 21, as WCAG 2 defines it."""

    def light(colour: str) -> float:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(light(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard():
    assert contrast("000000", "ffffff") == pytest.approx(21)
    assert contrast("009485", "ffffff") == pytest.approx(3.76, abs=0.01)  # the theme's teal


def test_colours_of_the_site_stand_out():
    (primary,) = re.findall(r"--md-primary-fg-color: #(\w{6})", STYLES)
    assert min(contrast(primary, behind) for behind in ("ffffff", "f5f5f5")) >= 4.5
    for scheme, behind in BEHIND_CODE.items():
        (rules,) = re.findall(rf"scheme={scheme}\] {{(.*?)}}", STYLES, re.DOTALL)
        colours = re.findall(r"--md-code-hl-[\w-]+: #(\w{6})", rules)
        assert colours
        assert all(contrast(colour, behind) >= 4.5 for colour in colours)
        (found,) = re.findall(r"--md-accent-fg-color: #(\w{6})", rules)
        assert contrast(found, BEHIND_RESULTS[scheme]) >= 4.5


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_pictures_and_columns_have_names(path):
    """Pictures and columns have names. A screen reader reads the text of a picture, and the name of
    a column before each cell."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert "![](" not in text
    heads = re.findall(r"^(\|.*\|)\n\|[-:| ]+\|$", text, re.MULTILINE)
    assert [head for head in heads if not all(re.split(r"\s*\|\s*", head)[1:-1])] == []


def test_the_theme_s_dialog_gets_a_name():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = '<div class="md-search" data-md-component="search" role="dialog"><label>'
    for hook in (hooks.on_post_page, hooks.on_post_template):
        assert 'role="dialog" aria-label="Search"><label>' in hook(page)


def test_bars_of_the_charts_stand_out():
    """The bars of the charts are visible. A bar is no text, so it needs a contrast of 3 to 1 with
    the background of the site and of a git host."""
    charts = (ROOT / "docs" / "charts.py").read_text("utf-8")
    light, dark = charts.split("@media (prefers-color-scheme: dark)")
    for text, pages in ((light, ("ffffff",)), (dark, ("1f212b", "0d1117"))):
        bars = re.findall(
            r"\.(?:eager|bf16|codes|floor) \{ fill: #(\w{6})", text.split('"""\ntext')[-1]
        )
        assert len(bars) == 4
        assert all(contrast(bar, page) >= 3 for bar in bars for page in pages)
