"""The command `tilewright inspect MODEL`, which shows what is fused, what is missed and why, and
the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tilewright.tools.commands.common import (
    Chosen,
    CommandError,
    DebugOption,
    DynamicOption,
    JsonOption,
    ModelArgument,
    PatternsOption,
    TargetOption,
    errors_for_people,
    print_json,
    target_name,
)
from tilewright.tools.commands.legend import explained
from tilewright.tools.console import make_console

if TYPE_CHECKING:
    from tilewright.compiler import Lowered
    from tilewright.tools.kernel_audit import KernelAudit
    from tilewright.tools.report.looked_for import Module
    from tilewright.tools.step.batches import BatchRow


def inspect(
    model: ModelArgument,
    patterns: PatternsOption = None,
    dynamic: DynamicOption = None,
    target: TargetOption = "sm100",
    as_json: JsonOption = False,
    kernels: Annotated[
        bool, typer.Option("--kernels/--no-kernels", help="Compile and audit the kernels.")
    ] = True,
    before: Annotated[bool, typer.Option("--before", help="Print the captured graphs.")] = False,
    after: Annotated[bool, typer.Option("--after", help="Print the rewritten graphs.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the report to this file as one self-contained HTML page."
        ),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            min=1, help="Inspect one of this many ranks that share the tensors of a zoo model."
        ),
    ] = 1,
    ep: Annotated[
        int,
        typer.Option(
            min=1,
            help="Inspect one of this many ranks that share the experts of a zoo model: 1, or the "
            "number of --tp.",
        ),
    ] = 1,
    present: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Count the bytes of this number of tokens in the caches of each sequence.",
        ),
    ] = None,
    census: Annotated[
        bool,
        typer.Option(
            "--census",
            help="Count every product with a weight, every softmax, cache write and top-k, and say "
            "for each whether it is in a match, in a miss, of no interest, or unaccounted.",
        ),
    ] = False,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="1,16,64",
            help="Print only a table of steps with these numbers of sequences; --target may name "
            "several chips, as in sm100,sm90.",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE",
            help="Print what each pattern found or missed in this "
            "module (a path, with `*` as a wildcard).",
        ),
    ] = None,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine",
            help="Inspect the steps of transformers' continuous batching: a step with one token "
            "for each sequence, and a step with many tokens.",
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Show what is fused in MODEL, what is missed and why, and the kernels, without running the
    model.

    This needs no GPU and no weights, because tensors are on the meta device. --tp also shows what a
    rank sends, and the shortest time of a step. --batches prints a table of modelled steps instead.
    """
    from tilewright.codegen.targets import get_target
    from tilewright.compiler.report.savings import savings_of
    from tilewright.compiler.report.step import step_of
    from tilewright.tools.commands.models import (
        audited,
        load_and_lower,
        load_and_lower_engine,
        load_and_lower_rank,
    )
    from tilewright.tools.report.text_report import graph_text, render, render_rank
    from tilewright.tools.step.savings import render_savings
    from tilewright.tools.step.tables import render_step

    with errors_for_people(debug):
        if as_json and (before or after):
            raise CommandError("--json cannot be used together with --before or --after")
        _check_page(html)
        if batches is not None:
            if (tp, ep) != (1, 1) or engine or census or at is not None:
                others = "--tp, --ep, --engine, --census or --at"
                raise CommandError(f"--batches cannot be used together with {others}")
            chosen = Chosen(model, patterns, dynamic, debug)
            _inspect_batches(chosen, batches, target, present, as_json, html)
            return
        rank = None
        if engine:
            if (tp, ep) != (1, 1):
                raise CommandError("--engine cannot be used together with --tp or --ep")
            lowered = load_and_lower_engine(model, patterns, dynamic, target, debug)
        elif (tp, ep) == (1, 1):
            lowered = load_and_lower(model, patterns, dynamic, target, debug)
        else:
            lowered, rank = load_and_lower_rank(model, tp, ep, patterns, dynamic, target, debug)
        module = None if at is None else _module(lowered, at)
        asked = census or module is not None
        kernels = kernels and (as_json or not asked)
        audits = audited(lowered.kernels, lowered.target) if kernels else []
        if html is not None:
            title = model if rank is None else f"{model}, a rank of {tp}, a layer of each kind"
            _write_page(html, title, lowered, audits, present)
        savings = savings_of(lowered, present) if rank is None and not engine else None
        if as_json:
            told: dict[str, Any] = {}
            if rank is None and not engine:
                told = {"step": step_of(lowered, present).as_dict()}
            elif rank is not None:
                told = {"rank": rank.as_dict(get_target(target))}
            told |= {"savings": savings.as_dict()} if savings is not None else {}
            told |= {"census": lowered.census.as_dict()} if census else {}
            told |= {"at": module.as_dict()} if module is not None else {}
            print_json({"model": model} | report_dict(lowered, audits) | told)
            return
        if before or after:
            typer.echo(graph_text(lowered, before=before, after=after))
            return
        console = make_console()
        if asked:
            console.print(*_asked(model, lowered, census, module), sep="\n\n")
            return
        report = render(model, lowered, audits, console.width)
        console.print(report)
        if rank is None and not engine:
            console.print(render_step(step_of(lowered, present)))
            if savings is not None:
                console.print(render_savings(savings))
        elif rank is not None:
            console.print(render_rank(rank, get_target(target), console.width))
        _explain(console, report, sorted({miss.code for miss in lowered.misses}))


def _inspect_batches(
    chosen: Chosen,
    batches: str,
    targets: str,
    present: int | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Prints a table of a model's steps at several batch sizes and on several chips."""
    from tilewright.tools.commands.models import lowered_batches
    from tilewright.tools.step.batches import render_batches

    chips = [target_name(name.strip()) or name for name in targets.split(",")]
    rows, first = lowered_batches(chosen, sizes_of(batches), chips, present)
    if html is not None:
        _write_page(html, chosen.model, first, [], present, rows)
    if as_json:
        data = {"present": present, "rows": [row.as_dict() for row in rows]}
        print_json({"model": chosen.model, "batches": data})
    else:
        make_console().print(render_batches(chosen.model, rows))


def sizes_of(listed: str) -> list[int]:
    """Parses the batch sizes of `--batches`. Raises CommandError."""
    try:
        sizes = [int(size) for size in listed.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise CommandError(
            f"--batches: expected numbers of at least 1, such as 1,16,64, got {listed!r}"
        )
    return sizes


def _module(lowered: Lowered, at: str) -> Module:
    from tilewright.tools.report.looked_for import Module, NoSuchModuleError

    try:
        return Module(lowered, at)
    except NoSuchModuleError as error:
        raise CommandError(f"--at: {error}") from error


def _asked(model: str, lowered: Lowered, census: bool, module: Module | None) -> Iterator[Group]:
    from tilewright.tools.report.census_text import render_census, render_module

    if census:
        yield render_census(model, lowered.census)
    if module is not None:
        yield render_module(module)


def _explain(console: Console, report: Group, codes: Sequence[str]) -> None:
    """Prints the meanings of the short forms in a report, and the command that explains each of its
    codes."""
    with console.capture() as captured:
        console.print(report)
    terms = list(explained(Text.from_ansi(captured.get()).plain))
    terms += [(code, f"what to do: tilewright explain {code}") for code in codes]
    if not terms:
        return
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for shown, meaning in terms:
        table.add_row(Text(f"  {shown}", style="dim"), Text(meaning, style="dim"))
    console.print(Text("\nIn words", style="bold"))
    console.print(table)


def report_dict(lowered: Lowered, audits: Sequence[KernelAudit]) -> dict[str, Any]:
    """Returns the report as JSON-ready data. Each kernel has its audit."""
    report = lowered.as_dict()
    outcomes = {outcome.kernel.spec.name: outcome.as_dict() for outcome in audits}
    report["kernels"] = [k | outcomes.get(k["name"], {}) for k in report["kernels"]]
    return report


def _check_page(path: Path | None) -> None:
    if path is not None and not path.resolve().parent.is_dir():
        raise CommandError(f"--html: no such folder: {path.resolve().parent}")


def _write_page(
    path: Path,
    model: str,
    lowered: Lowered,
    audits: Sequence[KernelAudit],
    present: int | None,
    batches: Sequence[BatchRow] = (),
) -> None:
    from tilewright.tools.report.html_report import write_html

    try:
        write_html(path, model, lowered, audits, present, batches)
    except OSError as error:
        raise CommandError(f"--html: cannot write {path}: {error.strerror}") from error
