"""Tests plain English: sentences say who does what, and one thing has one word.

The first sentence of a docstring begins with a verb or a noun. The lists below have openings and
words that made readers read a sentence twice.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_packages import LAYERS, ROOT

FOLDERS = (*LAYERS, "src", "benchmarks", "docs", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]

#: First words of docstrings that do not stand alone, such as "The same, of a product."
OPENINGS = re.compile(
    r"(?:Of|The same|So|None of|Nobody|Those|Such|What|Whatever|Whoever|Whose)\b(?! course)"
)
#: Openings that no sentence of a page may have. "So" and "Of the 16" are allowed in pages.
SENTENCES = re.compile(
    r"(?:(?<=[.:!?]\s)|(?<=\n\n)|(?<=^- )|(?<=\| ))"
    r"(?:Of those|The same|So many|None of|Nobody|Those|Whoever|What)\b[^\n|.]*",
    re.MULTILINE,
)
WORDS = re.compile(r"\b(?:nobody|none of which|whoever|manieth)\b", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (place, docstring) of a file's module, classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            line = getattr(node, "lineno", 1)
            yield f"{path.relative_to(ROOT)}:{line}", text


def prose(page: Path) -> str:
    """Returns a page without its blocks of code and its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE)


def badly_begun(text: str) -> str | None:
    """Returns the opening of a docstring if it is neither a verb nor a noun, else None."""
    found = OPENINGS.match(text)
    return found[0] if found else None


def test_docstrings_begin_with_a_verb_or_a_noun():
    begun = [
        f"{place}: {text.splitlines()[0]}"
        for path in FILES
        for place, text in docstrings(path)
        if badly_begun(text)
    ]
    assert begun == []


def test_docstrings_say_who_does_what():
    found = [
        f"{place}: {word}"
        for path in FILES
        for place, text in docstrings(path)
        for word in WORDS.findall(text)
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_say_who_does_what(page):
    text = prose(page)
    assert SENTENCES.findall(text) + WORDS.findall(text) == []


def test_one_word_for_one_thing():
    """Tests that a floor is always a lower bound of a time, and a model always a network. The
    layers of the package and the cost model have names of their own."""
    cost_model = re.compile(
        r"(?:chip's|GPU's|planner's) model\b|(?<!cost )\bmodel of (?:a|the) (?:chip|GPU)\b"
    )
    floors = re.compile(r"\b(?:five|every|which|each|the) floors?\b (?:of the package|imports)")
    for page in PAGES:
        text = prose(page)
        assert cost_model.findall(text) + floors.findall(text) == [], page.name


def test_the_sentences_of_a_bad_page_would_be_seen():
    assert badly_begun("Of so many alike.") == "Of"
    assert badly_begun("The same call with copies.") == "The same"
    assert badly_begun("What a launch needs.") == "What"
    assert badly_begun("Offsets of rows.") is badly_begun("Sorts rows.") is None
    bad = "\n\nWhat is left is code. Of those two, one is wrong.\n\n- The same again.\n"
    assert [found.split()[0] for found in SENTENCES.findall(bad)] == ["What", "Of", "The"]
    assert SENTENCES.findall("\n\nSay what is left. It is the same.\n") == []
    assert WORDS.findall("Memory that nobody reads") == ["nobody"]
