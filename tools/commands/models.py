"""Contains functions for the commands that take a MODEL: they load the MODEL, lower it, and audit
its kernels."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from tilewright.codegen.names import did_you_mean
from tilewright.codegen.targets import PRODUCTS, find_target, gpu_targets
from tilewright.compiler import Kernel, Lowered, lower
from tilewright.patterns.language import registered
from tilewright.tools.commands.common import Chosen, CommandError, users_code
from tilewright.tools.console import make_console
from tilewright.tools.kernel_audit import KernelAudit, audit_kernels
from tilewright.tools.models.user_errors import one_line
from tilewright.tools.zoo import LoadedModel, load_model

if TYPE_CHECKING:
    from tilewright.tools.models.sharding import Rank
    from tilewright.tools.step.batches import BatchRow


def load(model: str, **options: Any) -> LoadedModel:
    """Returns the model that a command was given. Raises CommandError."""
    with users_code(model):
        return load_model(model, **options)


def load_and_lower(
    model: str, patterns: str | None, dynamic: bool | None, target: str, debug: bool
) -> Lowered:
    """Loads and lowers MODEL. Text that its code prints goes to stderr. Raises CommandError."""
    check_target(target)
    with contextlib.redirect_stdout(sys.stderr):
        loaded = load(model)
        chosen = pattern_names(patterns)
        with traced(model, debug):
            return lower(
                loaded.model,
                loaded.args,
                loaded.kwargs,
                patterns=chosen,
                dynamic=dynamic,
                target=target,
            )


def lowered_as(model: str, loaded: LoadedModel, target: str, debug: bool) -> Lowered:
    """Lowers a loaded MODEL for a target. Raises CommandError."""
    check_target(target)
    with traced(model, debug):
        return lower(loaded.model, loaded.args, loaded.kwargs, target=target)


def lowered_batches(
    chosen: Chosen, sizes: Sequence[int], targets: Sequence[str], present: int | None
) -> tuple[list[BatchRow], Lowered]:
    """Returns the steps of a MODEL at each batch size on each target, and the first step as
    lowered. A user's function gets the batch size as `batch`. Raises CommandError."""
    from tilewright.compiler.report.step import step_of
    from tilewright.tools.step.batches import BatchRow, weight_bytes

    for target in targets:
        check_target(target)
    rows, first = [], None
    with contextlib.redirect_stdout(sys.stderr):
        for size in sizes:
            loaded = load(chosen.model, batch=size)
            names, weights = pattern_names(chosen.patterns), weight_bytes(loaded.model)
            for target in targets:
                torch._dynamo.reset()
                with traced(f"{chosen.model}, batch {size}, {target}", chosen.debug):
                    made = lower(
                        loaded.model,
                        loaded.args,
                        loaded.kwargs,
                        patterns=names,
                        dynamic=chosen.dynamic,
                        target=target,
                    )
                rows.append(BatchRow.of(step_of(made, present), size, weights))
                first = first or made
    assert first is not None
    rows.sort(key=lambda row: list(targets).index(row.target))
    return rows, first


def load_and_lower_rank(
    model: str,
    tp: int,
    ep: int,
    patterns: str | None,
    dynamic: bool | None,
    target: str,
    debug: bool,
) -> tuple[Lowered, Rank]:
    """Does the same as :func:`load_and_lower` for one rank of a sharded zoo model. Raises
    CommandError."""
    from tilewright.tools.models.sharding import load_sharded, one_rank_of, rank_of

    check_target(target)
    with contextlib.redirect_stdout(sys.stderr), users_code(model), one_rank_of(tp):
        loaded, layers = load_sharded(model, tp, ep)
        options: dict[str, Any] = {"patterns": pattern_names(patterns), "dynamic": dynamic}
        with traced(model, debug):
            lowered = lower(loaded.model, loaded.args, loaded.kwargs, target=target, **options)
        return lowered, rank_of(loaded, lowered, layers, tp, ep)


def load_and_lower_engine(
    model: str, patterns: str | None, dynamic: bool | None, target: str, debug: bool
) -> Lowered:
    """Does the same as :func:`load_and_lower` for the two steps of continuous batching. Raises
    CommandError."""
    from tilewright.tools.models.engine import engine_steps, one_step

    check_target(target)
    with contextlib.redirect_stdout(sys.stderr), users_code(model):
        loaded = load(model)
        # Because the two steps differ in the number of tokens, Dynamo would make this number a
        # symbol.
        options: dict[str, Any] = {
            "patterns": pattern_names(patterns),
            "dynamic": False if dynamic is None else dynamic,
        }
        with engine_steps(loaded.model) as steps, traced(model, debug):
            lowered = [
                lower(one_step, (loaded.model, step), target=target, **options)
                for step in steps.values()
            ]
    graphs = tuple(graph for each in lowered for graph in each.graphs)
    breaks = tuple(text for each in lowered for text in each.graph_breaks)
    return Lowered(graphs, target, tuple(dict.fromkeys(breaks)))


def check_target(name: str) -> None:
    known = [target.name for target in gpu_targets()]
    found = find_target(name)
    if found is None or not found.is_gpu:
        near = did_you_mean(name, (*known, *PRODUCTS))
        raise CommandError(f"--target: expected one of {', '.join(known)}, got {name!r}{near}")


def pattern_names(listed: str | None) -> list[str] | None:
    """Returns the names in `--patterns`, or None if the option is not given. Call it after the
    model is loaded, because the model's file may register patterns."""
    names = None if listed is None else [name.strip() for name in listed.split(",")]
    try:
        registered(names)
    except ValueError as error:
        raise CommandError(f"--{error}") from error
    return names


@contextlib.contextmanager
def traced(name: str, debug: bool) -> Iterator[None]:
    """Turns any error in the block into a CommandError. The block traces the model."""
    with contextlib.ExitStack() as stack:
        if not debug:  # the CommandError below is enough; torch would log a whole traceback
            logging.disable(logging.ERROR)
            stack.callback(logging.disable, logging.NOTSET)
        stack.enter_context(waiting(f"tracing {name}"))
        try:
            yield
        except Exception as error:  # a model's own code may raise anything
            raise CommandError(f"{name}: cannot be traced: {one_line(error)}") from error


def audited(kernels: Sequence[Kernel], target: str, **options: Any) -> list[KernelAudit]:
    """Compiles and audits every kernel, with a progress bar on a terminal."""
    try:
        with progress("compiling kernels", len(kernels)) as advance:
            return audit_kernels(kernels, target, done=advance, **options)
    except OSError as error:
        message = f"cannot compile: no folder to write to: {error}"
        raise CommandError(f"{message}; set TMPDIR to another folder") from error


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows `what` and the elapsed time on stderr while the block runs, on terminals only."""
    console = make_console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task(what, total=None)
        yield


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Any]:
    """Shows a progress bar on stderr, on terminals only; yields a function that advances it by
    one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = make_console(stderr=True)
    hidden = not console.is_terminal or not total
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
