"""The console that all commands print to."""

from __future__ import annotations

from rich.console import Console

# The number of columns of output to a pipe or a file. On a terminal, the console is as wide as the
# terminal.
PIPE_WIDTH = 100


def make_console(stderr: bool = False) -> Console:
    """Returns a console that prints markup as plain text. If the output is not a terminal, the
    console is 100 columns wide."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console
