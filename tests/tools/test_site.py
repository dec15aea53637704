"""The site as a folder, without a server: its search runs where a browser starts no worker."""

from __future__ import annotations

import importlib.util
import json
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
    """The theme's own, as a site has it."""
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
    """The theme's script, in the place of a worker that `file://` does not allow."""
    index = tmp_path / "search_index.json"
    index.write_text(json.dumps(INDEX))
    command = ["node", str(PAGE), str(SHIM), str(search_script()), str(index), query]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == titles


def test_the_script_is_the_site_s_own():
    """The plugin `offline` takes one from another server, unless a script of that name is there."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "\n  - offline" in settings
    assert f"    - {SHIM.relative_to(ROOT / 'docs')} " in settings
