"""The console that all commands print to."""

from __future__ import annotations

from rich.console import Console

# The width for pipes and files. A terminal keeps its own width.
PIPE_WIDTH = 100


def make_console(stderr: bool = False) -> Console:
    """Returns a console without markup. It is 100 columns wide if it is not a terminal."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console
