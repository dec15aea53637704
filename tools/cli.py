"""The command line: `tilewright COMMAND`. Each command has a file in `tools/commands/`.

Reports go to stdout. Progress, the model's own prints and errors go to stderr, so that `--json` can
be piped. Exit code 0 means that all is well, 1 that the command ran and found something wrong, and
2 that it could not run.
"""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from tilewright.tools.commands.bench import bench
from tilewright.tools.commands.cache import cache
from tilewright.tools.commands.diff import diff
from tilewright.tools.commands.doctor import doctor
from tilewright.tools.commands.explain import explain
from tilewright.tools.commands.inspect import inspect
from tilewright.tools.commands.kernels import kernels
from tilewright.tools.commands.verify import verify
from tilewright.tools.commands.zoo import zoo

app = typer.Typer(
    name="tilewright",
    help="A graph compiler that finds the operations that a serving engine would fuse by hand, "
    "fuses them, and emits the kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (inspect, kernels, verify, diff, explain, zoo, doctor, cache, bench):
    app.command()(command)


def main() -> None:
    """Runs the `tilewright` script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilewright {importlib.metadata.version('tilewright')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass
