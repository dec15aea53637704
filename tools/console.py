"""The console that all commands print to."""

from __future__ import annotations

from rich.console import Console

# The width for pipes and files; a terminal has its own.
PIPE_WIDTH = 100


def make_console(stderr: bool = False) -> Console:
    """A console without markup; 100 columns wide where it is no terminal."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console
