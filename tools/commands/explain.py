"""The command `tilewright explain CODE`, which says what a miss code means and what to do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from tilewright.codegen.names import did_you_mean
from tilewright.tools.commands.common import (
    CommandError,
    JsonOption,
    errors_for_people,
    print_json,
    users_code,
)
from tilewright.tools.console import make_console
from tilewright.tools.models.loading import import_place
from tilewright.tools.report.miss_guide import miss_guide


def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="[CODE]", help="A miss code; without one, list all codes."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A file.py or a module that registers further codes, as a file of patterns may.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a miss CODE means, with an example and what to do."""
    with errors_for_people(debug=False):
        guide = miss_guide({} if source is None else _codes_of(source))
        chosen = list(guide.values()) if code is None else [guide[_known(code, list(guide))]]
        if as_json:
            print_json({"codes": [asdict(entry) for entry in chosen]})
            return
        console = make_console()
        if code is None:
            table = Table("code", "meaning", box=None, pad_edge=False, header_style="dim")
            for entry in chosen:
                table.add_row(entry.code, entry.meaning)
            console.print(table)
            return
        console.print(f"{chosen[0].code}: {chosen[0].meaning}\n", style="bold")
        if chosen[0].text:
            from rich.markdown import Markdown

            console.print(Markdown(chosen[0].text))


def _codes_of(source: str) -> Mapping[str, str]:
    """Imports a user's file or module, and returns all codes that are then registered.

    source: the name of the file or module. It may end with the name of a function, as in the
    argument MODEL of other commands (`file.py:function`); that part is ignored.
    """
    from tilewright.patterns.language import CODES

    place = source.partition(":")[0]
    with contextlib.redirect_stdout(sys.stderr), users_code(place):
        import_place(place)
    return CODES


def _known(code: str, codes: list[str]) -> str:
    wanted = code.upper().replace("-", "_")
    if wanted in codes:
        return wanted
    near = did_you_mean(wanted, codes)
    raise CommandError(
        f"no miss code {code!r}{near} (tilewright explain lists them; --from FILE adds your own)"
    )
