"""Defines the hooks of mkdocs.yml that make pages of documents outside docs/, and of every linked
file.

A link in a document is a path in the repository, as a git host reads it. The hooks find the file in
the repository, and replace the path by the path of the site's page. README.md and similar files are
pages at the top of the site. Any other file outside docs/ that a page links to becomes a page with
its text in colour.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
#: The page of each document at the top of the repository.
TOP = {name: name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
SOURCES = "source"

# A link or picture. Group 1 is the text before the path, 2 the path, 3 its anchor.
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Puts the release at the foot of each page."""
    import tilewright

    config["copyright"] = f"tilewright {tilewright.__version__}, Apache-2.0"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the documents at the top, and a page for each file that a document links to."""
    from mkdocs.structure.files import File, InclusionLevel

    for name, page in TOP.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for path in sorted(linked_files()):
        found = {"content": _source_page(path), "inclusion": InclusionLevel.NOT_IN_NAV}
        files.append(File.generated(config, page_of(path), **found))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page's text with the site's links."""
    if page.file.src_uri.startswith(f"{SOURCES}/"):
        return markdown
    return with_site_links(markdown, page.file.src_uri)


def on_post_page(output: str, **_: Any) -> str:
    """Returns the page with a name for the search dialog, which the theme leaves without one."""
    return output.replace('role="dialog">', 'role="dialog" aria-label="Search">')


def on_post_template(output_content: str, **_: Any) -> str:
    """Returns the page for an unknown address, 404.html, with a name for the search dialog."""
    return on_post_page(output_content)


def linked_files() -> set[str]:
    """Returns every file of the repository that a document links to and that is no page itself."""
    documents = [*(ROOT / DOCS).rglob("*.md"), *(ROOT / name for name in TOP)]
    found: set[str] = set()
    for document in documents:
        place = document.relative_to(ROOT).as_posix()
        targets = (_resolved(link, place) for link in _links(document.read_text("utf-8")))
        found |= {t for t in targets if t and (ROOT / t).is_file()}
    return {t for t in found if t not in TOP and not t.startswith(f"{DOCS}/")}


def with_site_links(markdown: str, page: str) -> str:
    """Returns the text of a page in which links to files of the repository lead to the files'
    pages."""
    place = page if page in TOP else f"{DOCS}/{page}"

    def turned(link: re.Match[str]) -> str:
        target = _resolved(link[2], place)
        if target is None or not (ROOT / target).is_file():
            return link[0]
        path = os.path.relpath(page_of(target), os.path.dirname(page) or ".")
        return f"{link[1]}{path}{link[3] or ''}"

    return "".join(
        part if part.startswith("```") else _LINK.sub(turned, part)
        for part in _FENCE.split(markdown)
    )


def page_of(path: str) -> str:
    """Returns the path of a file's page (or picture) in the site's sources."""
    if path in TOP:
        return TOP[path]
    if path.startswith(f"{DOCS}/") and not path.endswith(".py"):
        return path.removeprefix(f"{DOCS}/")
    return f"{SOURCES}/{path}.md"


def _links(markdown: str) -> Iterator[str]:
    for part in _FENCE.split(markdown):
        if not part.startswith("```"):
            yield from (link[2] for link in _LINK.finditer(part))


def _resolved(link: str, place: str) -> str | None:
    """Returns the file of a link, by its path in the repository; None for an address elsewhere."""
    if "://" in link or link.startswith("mailto:"):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(place), link))


def _source_page(path: str) -> str:
    """Returns a file's text as a page. Its block begins with more tildes than any file has, so that
    the text cannot end the block."""
    text = (ROOT / path).read_text("utf-8")
    kind = Path(path).suffix.removeprefix(".") or "text"
    head = "---\nsearch: {boost: 0.1}\n---\n\n"  # the search lists documents before files
    return f"{head}# {path}\n\n~~~~~~~~{kind}\n{text.rstrip()}\n~~~~~~~~\n"
