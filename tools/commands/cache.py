"""The command `tilewright cache`, which lists the contents of the kernel cache, and makes the cache
smaller."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.tools.commands.common import (
    FAILED,
    CommandError,
    JsonOption,
    errors_for_people,
    print_json,
)
from tilewright.tools.console import make_console

if TYPE_CHECKING:
    from tilewright.codegen.build.cache.upkeep import Pruned, Survey

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def cache(
    prune_now: Annotated[
        bool,
        typer.Option(
            "--prune", help="Remove leftovers, and the entries that were used longest ago."
        ),
    ] = False,
    max_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --prune: make the cache at most this large, such as 500MB; default: "
            "TILEWRIGHT_CACHE_SIZE, or 2GiB.",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="With --prune: remove entries that were not used "
            "within this time, such as 30d or 12h.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the kernel cache: its folder, its entries and its size. With --prune, make it smaller.

    The exit code is 1 if tilewright does not use the folder. The output then has the reason.
    """
    from tilewright.codegen.build.cache import cache_dir
    from tilewright.codegen.build.cache.folder import refusal
    from tilewright.codegen.build.cache.upkeep import prune, survey

    with errors_for_people(debug=False):
        folder = cache_dir()
        problem = refusal(folder)
        bound, age = _bound(max_size), _age(older_than)
        if not prune_now and (max_size is not None or older_than is not None):
            raise CommandError("--max-size and --older-than can be used only together with --prune")
        if prune_now and problem is not None:
            raise CommandError(f"--prune: {folder} is not used: {problem}")
        pruned = prune(folder, bound, age) if prune_now else None
    found = _as_dict(folder, problem, bound, survey(folder), pruned)
    if as_json:
        print_json(found)
    else:
        _print(found)
    if problem is not None:
        raise typer.Exit(FAILED)


def _bound(max_size: str | None) -> int:
    from tilewright.codegen.build.cache.upkeep import parse_size, size_bound

    try:
        return size_bound() if max_size is None else parse_size(max_size)
    except ValueError as error:
        raise CommandError(str(error) if max_size is None else f"--max-size: {error}") from error


def _age(text: str | None) -> float | None:
    if text is None:
        return None
    found = _AGE.match(text.strip())
    if found is None:
        raise CommandError(f"--older-than: expected an age such as 30d or 12h, got {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


def _kinds(found: Survey) -> list[dict[str, Any]]:
    from tilewright.codegen.build.cache.upkeep import KINDS

    sizes = {kind: [e.size for e in found.entries if e.kind == kind] for kind in KINDS}
    return [{"kind": k, "entries": len(s), "bytes": sum(s)} for k, s in sizes.items() if s]


def _as_dict(
    folder: Path, problem: str | None, bound: int, found: Survey, pruned: Pruned | None
) -> dict[str, Any]:
    from tilewright.codegen.build.cache.folder import others_are_trusted

    return {
        "folder": str(folder),
        "problem": problem,
        "others_trusted": others_are_trusted(),
        "bound_bytes": bound,
        "entries": len(found.entries),
        "bytes": found.size,
        "kinds": _kinds(found),
        "stale": len(found.stale),
        "pruned": None
        if pruned is None
        else {"entries": pruned.entries, "bytes": pruned.size, "stale": pruned.stale},
    }


def _print(found: Mapping[str, Any]) -> None:
    console = make_console()
    console.print(f"folder   {found['folder']}")
    if found["problem"] is not None:
        console.print(f"problem  not used: {found['problem']}", style="red")
    if found["others_trusted"]:
        console.print("trust    everyone who can write to this folder (TILEWRIGHT_CACHE_TRUST=1)")
    for row in found["kinds"]:
        console.print(f"{row['kind']:<8} {row['entries']} entries, {_mib(row['bytes'])}")
    total = f"{found['entries']} entries, {_mib(found['bytes'])} of {_mib(found['bound_bytes'])}"
    console.print(f"size     {total}")
    if found["stale"]:
        console.print(f"stale    {found['stale']} leftovers of processes that were killed")
    if gone := found["pruned"]:
        size = _mib(gone["bytes"])
        console.print(f"pruned   {gone['entries']} entries, {size}; {gone['stale']} leftovers")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
