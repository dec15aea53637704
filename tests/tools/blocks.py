"""Runs a page as its reader would: writes files, executes Python, runs commands and compares
outputs.

A comment before each block of code says what the block is:

    <!-- file NAME -->      its text is written to NAME
        <!-- replace NAME -->   a diff that is applied to NAME
    <!-- tested -->         Python, executed; blocks of a page share their names
        <!-- gpu -->            Python that needs a GPU: executed only if there is one
    <!-- printed -->        the expected output of the block of Python before it
    <!-- run -->            `$ command` and its expected output; or commands, one per line

This module does not run blocks with these comments:

    <!-- from FILE -->           a part of a file, which test_docs.py compares
    <!-- example NAME -->        a pattern's smallest model, which test_docs.py draws
    <!-- checked by FILE -->     an output that a test in FILE compares
    <!-- shown: REASON -->       what cannot be run, and why

`[...]` in an output matches any text, such as times.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from tilewright.tools.cli import app

_KINDS = "file|replace|tested|gpu|printed|run"
_BLOCK = re.compile(rf"<!-- ({_KINDS})(?: (\S+))? -->\n```\w*\n(.*?)^```$", re.M | re.S)


@dataclass
class Reader:
    """Does what a tutorial says, in the current folder.

    pytest: a function that runs pytest and returns its output.
    forget: a function that unregisters the patterns and codes of the files that a step imported,
        because a reader would run each step in a new process.
    """

    pytest: Callable[[list[str]], str]
    forget: Callable[[], None]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str = ""
    done: list[str] = field(default_factory=list)

    def read(self, document: Path) -> None:
        for kind, name, text in blocks(document.read_text("utf-8")):
            self.done.append(kind)
            self.forget()
            getattr(self, f"_{kind}")(name, text)

    def _file(self, name: str, text: str) -> None:
        Path(name).write_text(text, "utf-8")

    def _replace(self, name: str, text: str) -> None:
        lines = text.splitlines()
        was = "\n".join(line[1:] for line in lines if line.startswith("-"))
        now = "\n".join(line[1:] for line in lines if line.startswith("+"))
        source = Path(name).read_text("utf-8")
        assert source.count(was) == 1, f"{name}: {was}"
        Path(name).write_text(source.replace(was, now), "utf-8")
        # If a changed file has the same length and second, Python would still use its old byte
        # code.
        for cached in Path("__pycache__").glob(f"{Path(name).stem}.*"):
            cached.unlink()
        sys.modules.pop(Path(name).stem, None)

    def _tested(self, _: str, text: str) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, "<page>", "exec"), self.names)
        self.printed = out.getvalue()

    def _gpu(self, name: str, text: str) -> None:
        if torch.cuda.is_available():
            self._tested(name, text)

    def _printed(self, _: str, text: str) -> None:
        assert_like(text, self.printed)

    def _run(self, _: str, text: str) -> None:
        command, _, shown = text.partition("\n")
        if command.startswith("$ "):
            assert_like(shown, self._command(command[2:]))
        else:
            for line in text.splitlines():
                self._command(line)

    def _command(self, line: str) -> str:
        program, *arguments = shlex.split(line, comments=True)
        said: str = getattr(self, f"_{program}")(arguments)
        return said

    def _tilewright(self, arguments: list[str]) -> str:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    def _pytest(self, arguments: list[str]) -> str:
        return self.pytest(arguments)

    def _cat(self, arguments: list[str]) -> str:
        return Path(arguments[0]).read_text("utf-8")


def blocks(document: str) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, name, text) of each marked block, in order."""
    for block in _BLOCK.finditer(document):
        yield block[1], block[2] or "", block[3]


#: A fenced block, with the line before it.
_ANY_BLOCK = re.compile(r"^([^\n]*)\n```(\w*)\n(.*?)^```$", re.M | re.S)
_UNRUN = r"from \S+|example \S+|checked by \S+|shown: \S.*"


def unmarked(document: str) -> list[str]:
    """Returns the first line of each block that has no comment of these kinds."""
    mark = re.compile(rf"<!-- (?:(?:{_KINDS})(?: \S+)?|{_UNRUN}) -->")
    found = _ANY_BLOCK.findall("\n" + document)
    return [text.partition("\n")[0] for before, _, text in found if not mark.fullmatch(before)]


def assert_like(shown: str, said: str) -> None:
    """Asserts that an output is as a document shows it."""
    said = "\n".join(line.rstrip() for line in said.strip().splitlines())
    shown = "\n".join(line.rstrip() for line in shown.strip().splitlines())
    pattern = re.escape(shown)
    pattern = re.sub(r"\\\([\d\\.]+\\ s\\\)", r"\\(\\d+\\.\\d+ s\\)", pattern)
    cut = re.escape("[...]")
    pattern = pattern.replace(f"\\\n{cut}", r"(?:\n.*?)?").replace(cut, ".*?")
    assert re.fullmatch(pattern, said, re.S), f"the page shows\n{shown}\nand it says\n{said}"
