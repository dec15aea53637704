"""Contains what the commands share: options, error messages and output.

Nothing here imports torch, so that `--help`, and the commands without a MODEL, start at once. Code
that imports torch is in `models.py`, which a command imports when it is run.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.codegen.targets import find_target, gpu_targets, key_of
from tilewright.tools.zoo import FORMS_OF_A_MODEL, ZOO, ModelError

FAILED = 1
USAGE_ERROR = 2

MODEL_HELP = (
    "module:function or file.py:function, a function without arguments that returns "
    "(model, args, kwargs); the folder of a checkpoint or its config.json (weights are not "
    "needed); "
    f"or a zoo name: {', '.join(ZOO)}, {FORMS_OF_A_MODEL}."
)
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
PatternsOption = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated names of patterns to use; a leading '-' leaves a pattern out."
    ),
]
DynamicOption = Annotated[
    bool | None,
    typer.Option(
        "--dynamic/--no-dynamic",
        help="The argument `dynamic` of torch.compile; by default, torch.compile's own default.",
    ),
]


def target_name(given: str | None) -> str | None:
    """Returns the name of the target or product that `given` means, as `key_of` returns it. Returns
    an unknown name, and None, unchanged."""
    target = find_target(given)
    return given if target is None else key_of(target)


TARGETS_HELP = f"{', '.join(t.name for t in gpu_targets())}, or a product, such as h100"
TargetOption = Annotated[
    str, typer.Option(help=f"The chip to plan for: {TARGETS_HELP}.", callback=target_name)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the full traces of errors.")]


@dataclass(frozen=True)
class Chosen:
    """A MODEL that a command was given, and the options with which it is traced."""

    model: str
    patterns: str | None
    dynamic: bool | None
    debug: bool


class CommandError(Exception):
    """Ends a command with one line on stderr."""


@contextlib.contextmanager
def errors_for_people(debug: bool) -> Iterator[None]:
    """Turns a CommandError in the block into a line on stderr and exit code 2. Shows the traceback
    only under --debug."""
    try:
        yield
    except CommandError as error:
        if debug:
            traceback.print_exception(error)
        line = "; ".join(part.strip() for part in str(error).splitlines() if part.strip())
        typer.echo(f"tilewright: {line}", err=True)
        raise typer.Exit(USAGE_ERROR) from error


def print_json(data: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


@contextlib.contextmanager
def users_code(name: str) -> Iterator[None]:
    """Turns a ModelError in the block into a CommandError, and also a SystemExit. The block imports
    or calls a user's code."""
    try:
        yield
    except ModelError as error:
        raise CommandError(str(error)) from error
    except SystemExit as error:
        raise CommandError(f"{name}: its code ended the process (exit {error.code})") from error


def writable_folder(path: Path, option: str) -> Path:
    """Returns the folder. Makes it if it is missing. Raises CommandError if the folder cannot be
    written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".tilewright-write-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CommandError(f"{option}: cannot write to {path}: {error.strerror}") from error
    return path
