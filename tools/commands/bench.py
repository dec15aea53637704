"""The command `tilewright bench`, which runs the project's own benchmarks from a checkout, or
measures a step of any model."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tilewright.codegen.names import did_you_mean
from tilewright.tools.commands.common import (
    CommandError,
    DebugOption,
    JsonOption,
    errors_for_people,
    print_json,
    target_name,
    writable_folder,
)
from tilewright.tools.commands.profile import Wanted
from tilewright.tools.console import make_console

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="The names of the benchmarks to run; without a name, list them.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw the stored results as SVG, and run nothing."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Measure a step of this MODEL on this machine, kernel by kernel."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --profile: read this trace of torch.profiler instead of measuring.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="With --trace: the chip on which the trace was recorded.", callback=target_name
        ),
    ] = None,
    present: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --profile: the number of tokens in the caches of each sequence."
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --profile: the number of layers of a zoo model; default: all."
        ),
    ] = None,
    cuda_graph: Annotated[
        bool, typer.Option(help="With --profile: replay the step as a CUDA graph.")
    ] = True,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run the benchmarks of the checkout from which tilewright is installed, or draw their stored
    results.

    Each benchmark takes its own options when it is run as `python benchmarks/NAME.py`. --profile
    shows how far a step of MODEL (as for `inspect`) is from the memory floor, kernel by kernel.
    """
    with errors_for_people(debug):
        if profile is not None:
            wanted = Wanted(profile, trace, target, present, layers, cuda_graph)
            _profile(wanted, as_json, debug)
            return
        if trace is not None:
            raise CommandError(
                "--trace needs --profile MODEL, which names the model that was recorded"
            )
        if not FOLDER.is_dir():
            raise CommandError(
                f"the benchmarks are in a checkout of the project, and {FOLDER} does not exist"
            )
        known = _benchmarks()
        unknown = sorted(set(names or ()) - set(known))
        if unknown:
            near = did_you_mean(unknown[0], known)
            listed = ", ".join(known)
            raise CommandError(f"no benchmark {', '.join(unknown)}; there are {listed}{near}")
        if plot is not None:
            _draw(writable_folder(plot, "--plot"), names or list(known), as_json)
        elif names:
            _run(names)
        else:
            _list(known, as_json)


def _profile(wanted: Wanted, as_json: bool, debug: bool) -> None:
    from tilewright.tools.commands.profile import measured
    from tilewright.tools.step.tables import render_profile

    profile, step = measured(wanted, debug)
    if as_json:
        print_json({"profile": {"model": wanted.model, "target": step.target} | profile.as_dict()})
    else:
        make_console().print(render_profile(profile, step))


def _benchmarks() -> dict[str, str]:
    """Returns the scripts that can be run, with the first line of the docstring of each."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text("utf-8")
        if "__main__" in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return found


def _list(known: dict[str, str], as_json: bool) -> None:
    results = FOLDER / "results"
    rows = [
        {"name": name, "question": says, "kept": (results / f"{name}.json").is_file()}
        for name, says in known.items()
    ]
    if as_json:
        print_json({"benchmarks": rows})
        return
    table = Table("name", "question", "kept", box=None, pad_edge=False, header_style="dim")
    for row in rows:
        table.add_row(str(row["name"]), str(row["question"]), "yes" if row["kept"] else "")
    make_console().print(table)


def _run(names: list[str]) -> None:
    import torch

    for name in names:
        if "cuda" in (FOLDER / f"{name}.py").read_text("utf-8") and not torch.cuda.is_available():
            raise CommandError(f"{name} needs an NVIDIA GPU, and there is none here")
        done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py")], check=False)
        if done.returncode:
            raise CommandError(f"{name} ended with exit code {done.returncode}")


def _draw(folder: Path, names: list[str], as_json: bool) -> None:
    from tilewright.tools.report.plots import draw_results

    try:
        drawn = draw_results(FOLDER / "results", names, folder)
    except ImportError as error:
        raise CommandError(f"plots need matplotlib: pip install matplotlib ({error})") from error
    if as_json:
        print_json({"plots": [str(path) for path in drawn]})
        return
    for path in drawn:
        typer.echo(str(path))
