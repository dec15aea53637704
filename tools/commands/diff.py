"""The command `tilewright diff A B`, which shows the differences of two snapshots or saved
reports."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tilewright.tools.commands.common import (
    FAILED,
    CommandError,
    JsonOption,
    errors_for_people,
    print_json,
)
from tilewright.tools.console import make_console
from tilewright.tools.report.snapshot import SnapshotError, compare, read_lines

FileArgument = typer.Argument(
    help="A snapshot, a report saved with --json, or a file that the option `report` wrote."
)


def diff(
    a: Annotated[Path, FileArgument],
    b: Annotated[Path, FileArgument],
    as_json: JsonOption = False,
) -> None:
    """Compare two snapshots or saved reports: sites lost, gained and changed.

    The output shows, for example, what another version of torch or transformers changes for a
    model. The exit code is 1 if the two differ.
    """
    with errors_for_people(debug=False):
        try:
            changes = compare(read_lines(a), read_lines(b))
        except SnapshotError as error:
            raise CommandError(str(error)) from error
        if as_json:
            print_json({"changes": [asdict(change) for change in changes]})
        else:
            console = make_console()
            for change in changes:
                style = "red" if change.after < change.before else "green"
                console.print(
                    str(change), style=style, soft_wrap=True
                )  # long lines stay searchable
            if not changes:
                console.print(f"{a} and {b} hold the same sites")
    if changes:
        raise typer.Exit(FAILED)
