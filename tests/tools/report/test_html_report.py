"""The page of a report: whole, self-contained, for the keyboard; opened in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

from tests.models import qkv_idioms
from tests.tools.test_commands import command  # noqa: F401  a fixture
from tilewright.compiler import lower
from tilewright.tools.layers import layers
from tilewright.tools.report.html_report import render_html, write_html
from tilewright.tools.zoo import build_zoo_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def lowered():
    pytest.importorskip("transformers", reason="the zoo needs transformers")
    torch._dynamo.reset()
    model, args, kwargs = build_zoo_model("qwen3-30b-a3b", layers=3, tokens=4)
    return lower(model, args, kwargs)


@pytest.fixture(scope="module")
def page(lowered):
    return render_html("a <model>", lowered)


class _Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_nothing_is_loaded_from_anywhere(page):
    for tag, attributes in _Elements(page).found:
        for name in ("src", "href", "data"):
            value = attributes.get(name, "")
            assert value.startswith(("#", "data:")) or not value, (tag, value)
    assert "default-src 'none'" in page
    assert "@import" not in page


def test_every_link_leads_somewhere_and_every_id_is_there_once(page):
    elements = _Elements(page).found
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    own = [
        name for name in ids if not re.match(r"(p|m|DejaVu|figure|axes|text|line2d|patch)", name)
    ]
    assert len(own) == len(set(own))
    targets = {
        a["href"][1:] for tag, a in elements if tag == "a" and a.get("href", "").startswith("#")
    }
    assert targets - {""} <= set(ids)


def test_names_are_escaped(page):
    assert "a &lt;model&gt;" in page
    assert "a <model>" not in page


def test_equal_layers_are_drawn_once_with_their_fused_nodes(lowered, page):
    (graph,) = lowered.graphs
    layer = next(layer for layer in layers(graph) if layer.scope)
    assert layer.scopes == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert layer.title == "model.layers.0 … 2 (3 layers)"
    assert layer.title in page
    assert sum(1 for node in layer.after if "tilewright" in node.meta) == 5
    classes = [a.get("class", "") for tag, a in _Elements(page).found if tag == "g"]
    assert classes.count("node op") == 5
    assert classes.count("node fused") > 20
    focusable = [a for tag, a in _Elements(page).found if "node" in a.get("class", "").split()]
    assert all(a["tabindex"] == "0" for a in focusable)


def test_a_miss_comes_with_its_guide():
    torch._dynamo.reset()
    lowered = lower(*qkv_idioms.build("out_of_place"))
    page = render_html("missed", lowered)
    assert [miss.code for miss in lowered.misses] == ["FUNCTIONAL_WRITE"]
    assert "FUNCTIONAL_WRITE" in page
    assert "without the trailing underscore return a new cache" in page  # docs/miss-codes.md


def test_the_file_is_written_whole_or_not_at_all(lowered, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("before")
    tmp_path.joinpath("page.html").chmod(0o644)
    write_html(path, "model", lowered)
    assert path.read_text().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_inspect_writes_the_page(command, tmp_path):  # noqa: F811
    done = command("inspect", "mine.py:make", "--no-kernels", "--html", "page.html")
    assert done.exit_code == 0, done.stderr
    assert "layers.*" in (tmp_path / "page.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
def test_a_browser_opens_it_without_a_word(page, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page)
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"{path.as_uri()}#site-0"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    opened = re.search(r'<details id="site-0"[^>]*>', done.stdout)
    assert opened
    assert "open" in opened[0]
