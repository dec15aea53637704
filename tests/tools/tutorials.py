"""A tutorial, run as its reader would: files written, Python executed, commands and their outputs.

What stands before a block says what it is:

    <!-- file NAME -->      its text is written to NAME
    <!-- replace NAME -->   a diff of lines, made in NAME
    <!-- tested -->         Python, executed; blocks of a tutorial share their names
    <!-- printed -->        what the block of Python before it printed
    <!-- run -->            `$ command`, and what it prints

`[...]` in an output stands for anything; times differ.
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

from typer.testing import CliRunner

from tilewright.tools.cli import app

_KINDS = "file|replace|tested|printed|run"
_BLOCK = re.compile(rf"<!-- ({_KINDS})(?: (\S+))? -->\n```\w*\n(.*?)^```$", re.M | re.S)


@dataclass
class Reader:
    """Does what a tutorial says, in the present folder. pytest: runs it, and gives its output.
    forget: patterns and codes of files that a step imported, which is a process to its reader."""

    pytest: Callable[[list[str]], str]
    forget: Callable[[], None]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "tutorial"})
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
        # A file of one length, changed within a second, would be taken from its byte code.
        for cached in Path("__pycache__").glob(f"{Path(name).stem}.*"):
            cached.unlink()
        sys.modules.pop(Path(name).stem, None)

    def _tested(self, _: str, text: str) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, "<tutorial>", "exec"), self.names)
        self.printed = out.getvalue()

    def _printed(self, _: str, text: str) -> None:
        assert_like(text, self.printed)

    def _run(self, _: str, text: str) -> None:
        command, _, shown = text.partition("\n")
        assert command.startswith("$ "), command
        program, *arguments = shlex.split(command[2:])
        assert_like(shown, getattr(self, f"_{program}")(arguments))

    def _tilewright(self, arguments: list[str]) -> str:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    def _pytest(self, arguments: list[str]) -> str:
        return self.pytest(arguments)

    def _cat(self, arguments: list[str]) -> str:
        return Path(arguments[0]).read_text("utf-8")


def blocks(document: str) -> Iterator[tuple[str, str, str]]:
    """(kind, name, text) of each marked block, in order."""
    for block in _BLOCK.finditer(document):
        yield block[1], block[2] or "", block[3]


def assert_like(shown: str, said: str) -> None:
    """An output is as a document shows it."""
    said = "\n".join(line.rstrip() for line in said.strip().splitlines())
    pattern = re.escape(shown.strip())
    pattern = re.sub(r"\\\([\d\\.]+\\ s\\\)", r"\\(\\d+\\.\\d+ s\\)", pattern)
    cut = re.escape("[...]")
    pattern = pattern.replace(f"\\\n{cut}", r"(?:\n.*?)?").replace(cut, ".*?")
    assert re.fullmatch(pattern, said, re.S), f"the tutorial shows\n{shown}\nand it says\n{said}"
