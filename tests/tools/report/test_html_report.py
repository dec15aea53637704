"""Tests the page of a report: it is complete and self-contained, can be used with the keyboard, and
opens in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from tests.models import qkv_idioms
from tilewright.compiler import Lowered, lower
from tilewright.compiler.report import collapse_sites, site_kind
from tilewright.tools.report.html_report import render_html, write_html
from tilewright.tools.report.layers import layers
from tilewright.tools.report.step_bars import step_view
from tilewright.tools.report.templates import readable_time
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
    """Collects every element with its attributes and the elements around it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.inside: list[tuple[str, ...]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside.append(tuple(self.open))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside.append(tuple(self.open))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def having(self, name, value=None):
        return [(t, a) for t, a in self.found if name in a and value in (None, a[name])]


@pytest.fixture(scope="module")
def elements(page):
    return _Elements(page)


def test_nothing_is_loaded_from_anywhere(page, elements):
    for tag, attributes in elements.found:
        for name in ("src", "href", "data", "action", "srcset"):
            value = attributes.get(name, "")
            assert value.startswith(("#", "data:")) or not value, (tag, value)
    assert "default-src 'none'" in page
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[^\"\s]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_every_link_leads_somewhere_and_every_id_is_there_once(elements):
    ids = [attributes["id"] for _, attributes in elements.having("id")]
    assert len(ids) == len(set(ids))
    assert elements.open == []
    for _, attributes in elements.having("href"):
        assert attributes["href"][1:] in ids or attributes["href"] == "data:,"
    for _, attributes in elements.having("aria-labelledby"):
        assert attributes["aria-labelledby"] in ids


def test_names_are_escaped(page):
    assert "a &lt;model&gt;" in page
    assert "a <model>" not in page


def test_landmarks_and_labels(elements):
    tags = [tag for tag, _ in elements.found]
    assert [tags.count(tag) for tag in ("header", "nav", "main", "h1")] == [1, 1, 1, 1]
    first_link = next(attributes for tag, attributes in elements.found if tag == "a")
    assert (first_link["class"], first_link["href"]) == ("skip", "#content")
    assert all("aria-label" in a for tag, a in elements.found if tag == "nav")
    assert all("aria-labelledby" in a for tag, a in elements.found if tag == "section")
    assert all(a.get("scope") for tag, a in elements.found if tag == "th")
    assert all("aria-label" in a for _, a in elements.having("role", "img"))
    # Every scrollable element can be reached by the keyboard, and has a name.
    for tag, attributes in elements.found:
        if tag == "pre" or "scroll" in attributes.get("class", "").split():
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
    (facts,) = (a for _, a in elements.having("id", "facts"))
    assert facts["role"] == "status"


def test_whatever_is_wide_is_in_a_box_that_scrolls(page):
    """Everything wide is in a box that scrolls. On a narrow screen the page itself is as wide as
    the screen, and a drawing stays legible."""
    boxes = re.findall(r'<div class="scroll[^"]*"[^>]*>\s*<(table class="\w+|svg)', page)
    assert sorted(boxes) == ["svg", 'table class="flow', 'table class="flow', 'table class="wide']
    assert len(boxes) == len(re.findall(r'<table class="|<svg xmlns', page))
    # Each side of a drawing has room for its lanes and for the longest names of operations.
    for width, drawn in re.findall(
        r'class="flow" style="min-width:(\d+)px"(.*?)</table>', page, re.S
    ):
        lanes = {int(lane) for lane in re.findall(r"padding-left:(\d+)px", drawn)}
        assert int(width) - sum(lanes) >= 2 * 200


def test_both_colour_schemes_have_every_colour_and_paper_is_light(page):
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    colours = [re.findall(r"(--[\w-]+):", text) for text in (light, dark)]
    assert colours[0] == colours[1]
    assert len(colours[0]) > 10
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= set(colours[0])
    dark_rules = re.findall(r"@media ([^{]*prefers-color-scheme: dark[^{]*)\{", page)
    assert len(dark_rules) == 2  # the rules of the page, and the rules of the sources
    assert all("screen and" in rule for rule in dark_rules)
    assert "@media print" in page


def bars_of(text):
    """Returns the widths, in percent, of the parts of each bar."""
    bars = re.findall(r'<div class="bar"[^>]*>(.*?)</div>', text)
    return [[float(width) for width in re.findall(r"width:([\d.]+)%", bar)] for bar in bars]


def test_every_site_has_a_bar_of_bytes_and_one_of_time(lowered, page):
    rows = re.findall(r'<details class="site".*?</summary>', page, re.DOTALL)
    assert len(rows) == len(collapse_sites(lowered.matches)) == 5
    for row in rows:
        assert re.findall(r'class="bar" role="img" aria-label="(\w+): ', row) == ["bytes", "time"]
        assert len(bars_of(row)) == 2
        assert all(0 < sum(bar) <= 100.02 for bar in bars_of(row))
    # All bars have one scale: the longest bar fills its place.
    for place in (0, 1):
        assert max(sum(bars_of(row)[place]) for row in rows) == pytest.approx(100, abs=0.05)


def test_the_total_is_the_sum_of_its_layers_and_of_its_parts(lowered, page):
    view = step_view(lowered, None)
    assert sum(view.total.by_kind.values()) == pytest.approx(view.total.amounts.modelled_us)
    for name in ("weights", "caches", "activations", "launches", "floor_us", "modelled_us"):
        rows = [getattr(row.amounts, name) for row in view.layers]
        assert sum(rows) == pytest.approx(getattr(view.total.amounts, name)), name
    assert view.total.amounts.floor_us <= view.total.amounts.modelled_us
    # The fused step moves fewer bytes and starts fewer kernels than Inductor alone.
    assert view.total.amounts.activations < view.alone.amounts.activations
    assert view.total.amounts.launches < view.alone.amounts.launches
    table = page[page.index('id="step-table"') : page.index("</table>")]
    assert len(re.findall(r"<tr>", table)) == 1 + len(view.layers) + 2
    *_, floor, whole, alone_floor, alone = bars_of(table)
    assert sum(alone) == pytest.approx(100, abs=0.05)
    ratio = view.total.amounts.modelled_us / view.alone.amounts.modelled_us
    assert sum(whole) == pytest.approx(100 * ratio, abs=0.05)
    assert sum(floor) < sum(whole)
    assert sum(alone_floor) < sum(alone)


def test_caches_count_by_the_tokens_that_are_present(lowered):
    full, some = (step_view(lowered, present).total.amounts for present in (None, 100))
    assert full.caches > some.caches > 0
    assert full.weights == some.weights


def test_the_model_s_own_line_stands_before_the_library_s(page):
    """The model's own line comes before the library's. Here the model calls the cache write, and a
    library performs it."""
    site = re.search(r'id="site-1".*?</details>', page, re.DOTALL)[0]
    own, library = re.findall(r"([\w]+\.py):\d+", site)[:2]
    assert (own, library) == ("modeling_qwen3_moe.py", "cache_utils.py")
    assert "past_key_values.update(" in site
    assert "index_copy_(" in site


def test_equal_layers_are_drawn_once_with_their_fused_nodes(lowered, elements, page):
    (graph,) = lowered.graphs
    layer = next(layer for layer in layers(graph) if layer.scope)
    assert layer.scopes == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert layer.title == "model.layers.0 … 2 (3 layers)"
    assert layer.title in page
    # One table is for the layers, and one for the nodes outside of them.
    assert page.count('<table class="flow"') == 2
    chips = [a for _, a in elements.having("data-facts")]
    ops = [a for a in chips if "op" in a["class"].split()]
    assert sum(1 for node in layer.after if "tilewright" in node.meta) == len(ops) == 5
    assert all(a["href"] == f"#site-{a['data-site']}" for a in ops)
    gone = [a for a in chips if "fused" in a["class"].split()]
    assert len(gone) > 20
    assert {a["data-site"] for a in gone} == {a["data-site"] for a in ops}


def test_cache_writes_are_in_view(page):
    drawn = re.findall(r'class="chip([^"]*)"[^>]*>(\w+)<', page)
    writes = [(name, kind.split()) for kind, name in drawn if "writes" in kind.split()]
    assert [name for name, kind in writes if "fused" in kind][:2] == ["index_copy_"] * 2
    assert ("fused_qkv_paged", ["op", "writes"]) in writes
    assert not any(name in ("linear", "cat") for name, _ in writes)


def test_sites_alike_but_for_their_place_have_numbers_of_their_own(lowered):
    """Sites that differ only in their place have numbers of their own. The layer has two sites of
    equal shapes, and each node leads to its own site."""
    site = lowered.matches[0]
    scopes = ("layers.0.self_attn", "layers.0.mlp", "layers.1.mlp")
    one, other, later = (site_kind(replace(site, scope=scope)) for scope in scopes)
    assert one != other == later


def test_a_miss_comes_with_its_guide():
    torch._dynamo.reset()
    lowered = lower(*qkv_idioms.build("out_of_place"))
    page = render_html("missed", lowered)
    assert [miss.code for miss in lowered.misses] == ["FUNCTIONAL_WRITE"]
    assert "FUNCTIONAL_WRITE" in page
    # The text comes from docs/miss-codes.md.
    assert "without the trailing underscore return a new cache" in page


def test_the_file_is_written_whole_or_not_at_all(lowered, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("before")
    tmp_path.joinpath("page.html").chmod(0o644)
    write_html(path, "model", lowered)
    assert path.read_text().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_inspect_writes_the_page(command, tmp_path):
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
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"{path.as_uri()}#site-2"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    opened = re.search(r'<details [^>]*id="site-2"[^>]*>', done.stdout)
    assert opened
    assert 'open=""' in opened[0]


@pytest.mark.parametrize(
    ("us", "said"),
    [(0, "0 µs"), (0.03, "0.03 µs"), (12.34, "12.3 µs"), (999.8, "1000 µs"), (1234, "1.23 ms")],
)
def test_times_are_read_without_exponents(us, said):
    assert readable_time(us) == said


def test_a_page_of_nothing_says_so():
    page = render_html("none", Lowered((), "sm100"))
    assert "Nothing was fused." in page
    assert "NO_GRAPH" in page
