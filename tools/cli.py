"""The command line: `tilewright COMMAND MODEL`. One function per command.

Reports go to stdout. Whatever else is said (progress, a model's own prints, errors) goes to stderr,
so that `--json` can be piped. Exit code 0: the report was made; 2: it could not be.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilewright.codegen.targets import TARGETS
from tilewright.compiler import Lowered, lower
from tilewright.patterns.language import registered
from tilewright.tools.kernel_audit import KernelAudit, audit_kernels
from tilewright.tools.text_report import make_console, render
from tilewright.tools.zoo import LoadedModel, ModelError, load_model, zoo_names

USAGE_ERROR = 2

app = typer.Typer(
    name="tilewright",
    help="A graph compiler: finds what a serving engine would have fused by hand, fuses it, "
    "emits the kernel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class CommandError(Exception):
    """Ends a command with one line on stderr."""


def main() -> None:
    """The `tilewright` script."""
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


MODEL_HELP = (
    "module:function or file.py:function, a function without arguments that returns "
    f"(model, args, kwargs); or a zoo name: {', '.join(zoo_names())}."
)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    patterns: Annotated[
        str | None,
        typer.Option(help="Comma-separated patterns to use; with a leading '-', to leave out."),
    ] = None,
    dynamic: Annotated[
        bool | None,
        typer.Option("--dynamic/--no-dynamic", help="As in torch.compile; default: its own."),
    ] = None,
    target: Annotated[str, typer.Option(help="The chip to plan for: sm100 or sm90.")] = "sm100",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels/--no-kernels", help="Compile and audit the kernels.")
    ] = True,
    debug: Annotated[bool, typer.Option("--debug", help="Full traces of errors.")] = False,
) -> None:
    """Show what is fused in MODEL, what is missed and why, and the kernels, without running it.

    Needs no GPU and no weights: meta tensors do.
    """
    with _errors_for_people(debug):
        chosen = _pattern_names(patterns)
        _check_target(target)
        with contextlib.redirect_stdout(sys.stderr):
            loaded = _load(model)
            _check_patterns(chosen)
            lowered = _lower(model, loaded, debug, patterns=chosen, dynamic=dynamic, target=target)
        audits = _audit(lowered) if kernels else []
        if as_json:
            typer.echo(json.dumps({"model": model} | _as_dict(lowered, audits), indent=2))
        else:
            console = make_console()
            console.print(render(model, lowered, audits, console.width))


def _as_dict(lowered: Lowered, audits: Sequence[KernelAudit]) -> dict[str, Any]:
    """The report's own JSON, each kernel with its audit."""
    report = lowered.as_dict()
    outcomes = {outcome.kernel.spec.name: outcome.as_dict() for outcome in audits}
    report["kernels"] = [k | outcomes.get(k["name"], {}) for k in report["kernels"]]
    return report


def _pattern_names(listed: str | None) -> list[str] | None:
    return None if listed is None else [name.strip() for name in listed.split(",")]


def _check_target(name: str) -> None:
    gpus = [target.name for target in TARGETS.values() if target.is_gpu]
    if name not in gpus:
        raise CommandError(f"--target: expected one of {', '.join(gpus)}, got {name!r}")


def _check_patterns(names: Sequence[str] | None) -> None:
    # After the model is loaded: its file may register patterns of its own.
    try:
        registered(names)
    except ValueError as error:
        raise CommandError(f"--{error}") from error


def _load(model: str) -> LoadedModel:
    try:
        return load_model(model)
    except ModelError as error:
        raise CommandError(str(error)) from error
    except SystemExit as error:
        raise CommandError(f"{model}: its code ended the process (exit {error.code})") from error


def _lower(name: str, loaded: LoadedModel, debug: bool, **options: Any) -> Lowered:
    with contextlib.ExitStack() as stack:
        if not debug:  # torch logs whole traces of what is reported here in one line
            logging.disable(logging.ERROR)
            stack.callback(logging.disable, logging.NOTSET)
        try:
            return lower(loaded.model, loaded.args, loaded.kwargs, **options)
        except Exception as error:  # a model's own code may raise anything
            reason = f"{type(error).__name__}: {_gist(str(error))}"
            raise CommandError(f"{name}: cannot be traced: {reason}") from error


def _gist(message: str) -> str:
    """One line of an error message; of Dynamo's long ones the error it met, and where."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no message"]
    met = re.search(r"^\s*Explanation: .*: got (\w+\(.*\))$", message, re.MULTILINE)
    frames = re.findall(r'File "([^"]+)", line (\d+)', message.partition("from user code")[2])
    where = " ({}:{})".format(*frames[-1]) if frames else ""
    return f"{lines[0]}{': ' + met[1] if met else ''}{where}"


def _audit(lowered: Lowered) -> list[KernelAudit]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = make_console(stderr=True)
    hidden = not console.is_terminal or not lowered.kernels
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden
    ) as progress:
        task = progress.add_task("compiling kernels", total=len(lowered.kernels))
        return audit_kernels(lowered.kernels, lowered.target, done=lambda: progress.advance(task))


@contextlib.contextmanager
def _errors_for_people(debug: bool) -> Iterator[None]:
    """One line on stderr and exit code 2; the trace before it only under --debug."""
    try:
        yield
    except CommandError as error:
        if debug:
            traceback.print_exception(error)
        line = "; ".join(part.strip() for part in str(error).splitlines() if part.strip())
        typer.echo(f"tilewright: {line}", err=True)
        raise typer.Exit(USAGE_ERROR) from error
