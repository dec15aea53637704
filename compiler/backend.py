"""Implements `torch.compile(model, backend="tilewright")`, and `lower`, which reports what this
backend would do."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import fx

from tilewright.codegen.names import did_you_mean
from tilewright.compiler import _compat, environment
from tilewright.compiler import artifacts as _artifacts  # noqa: F401  registers them
from tilewright.compiler._compat import inductor, tracing
from tilewright.compiler.fuse import TOLD, fuse, target_name
from tilewright.compiler.graph_breaks import listen_for_breaks, noting_breaks, why_graph_ended
from tilewright.compiler.options import Options, check_mode, without
from tilewright.compiler.report import GraphReport, Lowered, break_miss, unless_cut
from tilewright.compiler.report.failures import StrictError, raise_strictly
from tilewright.compiler.safety.modes import modes_of
from tilewright.compiler.safety.overlap import unfused_where_inputs_meet
from tilewright.compiler.safety.ranks import (
    SHARED,
    RankSums,
    compiling,
    disagreement,
)
from tilewright.compiler.verify import verified
from tilewright.patterns.language import CAPTURE, REPORT_IT, Miss, Stage

log = logging.getLogger("tilewright")
LOG = "TILEWRIGHT_LOG"


def _set_level(given: str) -> None:
    """Sets the log level, which is given by name or number. Any other text only causes a warning,
    because an environment variable must not keep a model from compiling."""
    logging.basicConfig()
    level = int(given) if given.isdecimal() else logging.getLevelName(given.strip().upper())
    if isinstance(level, int):
        log.setLevel(level)
    else:
        near = did_you_mean(given, LEVELS)
        log.warning("%s: expected one of %s, got %r%s", LOG, ", ".join(LEVELS), given, near)


LEVELS = ("debug", "info", "warning", "error", "critical")
if named := os.environ.get(LOG):
    _set_level(named)
for problem in environment.problems(os.environ):
    log.warning("%s", problem)

WITHOUT_GRAD = "call the model under torch.no_grad(), or after model.requires_grad_(False)"

_REPORTS: deque[GraphReport] = deque(maxlen=64)


def tilewright(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles a graph as a Dynamo backend: fuses what it finds, and then passes the graph to
    Inductor.

    `options` are the options of :class:`tilewright.compiler.options.Options`. `mode` is a mode of
    Inductor, such as `reduce-overhead`. Raises ValueError for a bad option or mode. If a graph has
    no match, or tilewright fails on it, the graph compiles exactly as with the inner compiler
    alone, and the report says so.
    """
    chosen = Options.of(options)
    check_mode(mode)
    with compiling(gm) as shared:
        if chosen.verify and shared:
            # A rank that finds a mismatch goes back to the original graph. If one rank went back
            # alone, the other ranks would wait for its sums for ever, so the sums over ranks stay
            # unfused.
            chosen = without(chosen, SHARED)
        return _compiled(gm, example_inputs, chosen, mode, shared)


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    chosen: Options,
    mode: str | None,
    shared: Sequence[RankSums],
) -> Callable[..., Any]:
    """Returns the function that runs a graph, and publishes the report. `shared` holds the sums
    over ranks in the graph."""
    found = _fuse_or_not(gm, example_inputs, chosen)
    breaks = why_graph_ended(gm)
    if _trains(gm, example_inputs):
        breaks = []  # the graph would stay unfused even without the breaks
    missed = [break_miss(text) for text in breaks]
    raise_strictly(missed, chosen)
    report, compiled = _compile(found, example_inputs, chosen, mode)
    if why := disagreement(shared, report):
        log.warning("sums over ranks are not fused: %s", why)
        found = _fuse_or_not(gm, example_inputs, without(chosen, SHARED))
        report, compiled = _compile(found, example_inputs, chosen, mode)
        missed.append(Miss(SHARED, "RANKS", Stage.HAZARDS, why))
    report = replace(report, misses=(*unless_cut(report.misses, bool(breaks)), *missed))
    _publish(report, chosen, breaks)
    published = _REPORTS[-1]
    if not (chosen.verify and report.matches):
        return compiled

    def note(text: str) -> None:
        _correct(published, replace(published, notes=(*published.notes, text)))

    return verified(report, compiled, chosen, lambda why: _publish(_unfused(gm, why), chosen), note)


def _frame_broke(breaks: list[str], options: Mapping[str, Any]) -> bool:
    """Reports breaks in a frame that has no graph. Returns whether `strict` makes them errors."""
    try:
        chosen = Options.of(options)
    except ValueError:  # the compilation of a graph raises it
        chosen = Options()
    misses = tuple(break_miss(text) for text in breaks)
    empty = fx.GraphModule({}, fx.Graph())
    _publish(GraphReport((empty, empty), (), misses), chosen, breaks)
    return any(chosen.raises_for(miss) for miss in misses)


# The warnings that were given since torch._dynamo.reset(). A graph break causes one warning for
# each place. A warning about a whole graph is given once for each text. A recompilation for other
# sizes makes the same text as the first compilation, so it gives no second warning.
_WARNED: set[Miss | str] = set()
tilewright.reset = _WARNED.clear  # type: ignore[attr-defined]
listen_for_breaks(tilewright, _frame_broke)
if not entry_points(group="torch_dynamo_backends", name="tilewright"):
    # This code runs if the sources are on Python's path but not installed. Dynamo registers
    # installed backends itself, and refuses a name that is already registered.
    torch._dynamo.register_backend(tilewright)


def reports() -> tuple[GraphReport, ...]:
    """Returns the reports of the latest 64 graphs that the backend compiled in this process, from
    the oldest to the newest.

    The reports are text and numbers (:meth:`GraphReport.without_graphs`). They keep no graph,
    tensor or model alive.
    """
    return tuple(_REPORTS)


def _needing_grad(inputs: Sequence[Any]) -> str:
    """Returns text such as `3 parameters and 1 input need grad`. Returns an empty text if no input
    needs grad."""
    tensors = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
    parameters = sum(isinstance(t, torch.nn.Parameter) for t in tensors)
    counts = {"parameter": parameters, "input": len(tensors) - parameters}
    said = [f"{n} {noun}{'s' if n > 1 else ''}" for noun, n in counts.items() if n]
    return f"{' and '.join(said)} {'need' if len(tensors) > 1 else 'needs'} grad" if said else ""


def _trains(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether grad mode is on when a graph begins, and a gradient flows to an input that needs a
    gradient."""
    if not torch.is_grad_enabled() or not _needing_grad(inputs):
        return False
    return bool(modes_of(gm.graph, grad=True).recorded)


def _unfused(gm: fx.GraphModule, note: str, misses: tuple[Miss, ...] = ()) -> GraphReport:
    return GraphReport((gm, gm), (), misses, (note,))


def _fuse_or_not(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> GraphReport:
    if _trains(gm, inputs):
        needing = _needing_grad(inputs)
        note = f"nothing was fused: {needing}, and fused ops compute no gradients; {WITHOUT_GRAD}"
        log.warning(note)
        return _unfused(gm, note)
    try:
        return fuse(gm, options)
    except _compat.DynamoError:
        raise  # Dynamo restarts its analysis by raising
    except Exception as error:
        if options.strict:
            raise
        log.exception("tilewright failed; the graph is compiled without fusion")
        note = f"tilewright raised {type(error).__name__}, so the graph compiled unfused: {error}"
        return _unfused(gm, note, (_failure_of_the_graph(error),))


def _failure_of_the_graph(error: Exception) -> Miss:
    """Returns the miss for a failure that belongs to the whole graph and to no single site."""
    what = f"tilewright failed on the graph as a whole: {type(error).__name__}: {error}"
    return Miss("tilewright", "INTERNAL", Stage.ANCHORED, what, hint=REPORT_IT)


def _compile(
    report: GraphReport, inputs: Sequence[Any], options: Options, mode: str | None
) -> tuple[GraphReport, Callable[..., Any]]:
    """Returns the report on a graph, and the compiled graph, which is fused if that works."""
    if not report.matches:
        return report, _inner(report.before, inputs, options, mode)
    try:
        compiled = _inner(report.after, inputs, options, mode)
        if report.inputs is not None and report.inputs.written:
            before = report.before
            compiled = unfused_where_inputs_meet(
                report.inputs,
                compiled,
                before.forward,
                lambda why: _publish(_unfused(before, why), options),
            )
        return report, compiled
    except _compat.DynamoError:
        raise
    except Exception as error:
        if options.strict:
            raise
        log.exception("the inner compiler failed on the fused graph; compiling without fusion")
        note = f"the inner compiler raised {type(error).__name__}; compiled unfused: {error}"
        return _unfused(report.before, note), _inner(report.before, inputs, options, mode)


def _inner(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None
) -> Callable[..., Any]:
    if options.inner == "eager":
        return _compat.forward_of(gm)
    patches = {**(inductor.mode_patches(mode) or {}), **(options.inner_options or {})}
    return _compat.compile_fx(gm, list(example_inputs), config_patches=patches)


def _correct(published: GraphReport, now: GraphReport) -> None:
    """Replaces a published report by a newer report on the same graph."""
    for place, known in enumerate(_REPORTS):
        if known is published:
            _REPORTS[place] = now
    for note in now.notes[len(published.notes) :]:
        log.info("%s", note)


def _publish(report: GraphReport, options: Options, breaks: Sequence[str] = ()) -> None:
    report = replace(report, target=target_name(options), graph_breaks=tuple(breaks))
    _REPORTS.append(report.without_graphs())
    _trace(report)
    if line := _lost_line(report):
        _warn_once(line)
    for note in report.notes:
        if note.startswith(TOLD):
            _warn_once(note)
    for miss in report.misses:
        if miss.pattern == CAPTURE and miss not in _WARNED:
            _WARNED.add(miss)
            log.warning("%s", miss)
    for line in report.text.splitlines() if report.matches or report.misses else ():
        log.info("%s", line)
    if options.report is not None:
        try:
            with open(options.report, "a", encoding="utf-8") as file:
                file.write(json.dumps(report.data) + "\n")
        except OSError as error:  # the model still compiles
            log.warning("options['report']: nothing could be written: %s", error)


def _lost_line(report: GraphReport) -> str:
    """Returns a line about the lost misses of a graph. Returns an empty text if there are none."""
    lost = [miss for miss in report.misses if miss.is_lost and miss.pattern != CAPTURE]
    if not lost:
        return ""
    tally: Counter[str] = Counter()
    for miss in lost:
        tally[miss.code] += miss.count
    counts = ", ".join(f"{code} x{n}" for code, n in sorted(tally.items()))
    if not report.matches:
        return f"nothing was fused ({counts}); the first: {lost[0]}"
    fused = f"{len(report.matches)} {'site' if len(report.matches) == 1 else 'sites'} fused"
    return (
        f"{fused}, {sum(tally.values())} lost ({counts}); the first: {lost[0]}; "
        f"{LOG}=info or tilewright.reports() shows all"
    )


def _warn_once(line: str) -> None:
    if line not in _WARNED:
        _WARNED.add(line)
        log.warning("%s", line)


def _trace(report: GraphReport) -> None:
    """Writes the artifacts that tlparse shows next to the artifacts of Dynamo and Inductor."""
    inductor.trace_artifact("tilewright_report", "json", lambda: json.dumps(report.data))
    inductor.trace_artifact("tilewright_report_text", "string", lambda: report.text)
    inductor.trace_artifact(
        "tilewright_graph",
        "string",
        lambda: str(report.after.print_readable(print_output=False, include_stride=True)),
    )


def lower(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    patterns: Sequence[str] | None = None,
    dynamic: bool | None = None,
    target: str = "sm100",
    strict: bool | Sequence[str] = False,
    tune: bool = False,
) -> Lowered:
    """Traces a model and reports what tilewright does to it, without compiling or running the
    model.

    model: the model. Its parameters may be meta tensors.
    args: the positional arguments of a call. Meta tensors are enough.
    kwargs: the keyword arguments of the call.
    patterns: the option of this name in `Options`.
    dynamic: the argument of this name of torch.compile.
    target: the chip for which kernels are planned, by its name or the name of a product (`h100`).
    strict: the option of this name in `Options`.
    tune: the option of this name in `Options`. Lowerings are measured only if the GPU of this
        machine is the target.

    Returns a :class:`Lowered`. No traced graph runs, so the function does not write caches that are
    passed as arguments. After a graph break, the Python code between two graphs does run, with
    zeros in place of the first graph's results. If that code raises an error, the error is reported
    as part of the break.

    Raises TypeError if the model cannot be called, if `args` is not a tuple or list, or if `kwargs`
    is not a dictionary by name. Raises ValueError for unknown patterns or targets. Raises
    StrictError if `strict` makes a miss an error. Exceptions that Dynamo or the model raises before
    there is a graph are passed on.
    """
    _check_call(model, args, kwargs)
    if dynamic not in (None, True, False):
        raise TypeError(f"dynamic: expected a bool or None, got {dynamic!r}")
    options = Options.of(
        {
            "inner": "eager",
            "patterns": patterns,
            "target": target,
            "strict": strict,
            "tune": tune,
            "everywhere": True,  # nothing runs: the report is about the target
        }
    )
    found: list[GraphReport] = []
    wants_grad = torch.is_grad_enabled()

    def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report = _fuse_or_not(gm, example_inputs, options)
        needing = _needing_grad(example_inputs) if wants_grad else ""
        if needing and report.matches and not any(known.notes for known in found):
            note = f"{needing}, and nothing is fused while gradients are recorded: {WITHOUT_GRAD}"
            report = replace(report, notes=(*report.notes, note))
        found.append(report)
        return _stand_in(gm)

    after: list[str] = []
    with (
        noting_breaks(capture) as breaks,
        torch.no_grad(),
        tracing.unlimited_compiles(),
        tracing.autocast_off_on_meta(),
        tracing.numbers_fake_on_meta(),
    ):
        compiled = tracing.compile_isolated(model, backend=capture, dynamic=dynamic)
        try:
            compiled(*args, **(kwargs or {}))
        except Exception as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, StrictError):
                raise inner from inner.__cause__
            if not found or (options.strict and isinstance(error, _compat.BackendCompilerFailed)):
                raise
            # The Python code between two graphs failed on the zeros that replace the results of the
            # first graph.
            log.debug("the model stopped after a graph", exc_info=True)
            what = "the code after this graph failed on zeros in place of the graph's results"
            after = [f"{what}: {_in_a_line(error)}"]
    lowered = Lowered(tuple(found), target_name(options), (*breaks, *after))
    raise_strictly(lowered.misses, options)
    return lowered


def _check_call(model: Any, args: Any, kwargs: Any) -> None:
    """Raises TypeError if the model cannot be called, if `args` is not a tuple or list, or if
    `kwargs` is not a dictionary by name. The message names the argument."""
    if not callable(model):
        whole = isinstance(model, tuple) and len(model) == 3
        hint = (
            "; pass its parts separately, as in lower(*made) for made = (model, args, kwargs)"
            if whole
            else ""
        )
        got = f"a tuple of {len(model)}" if isinstance(model, tuple) else type(model).__name__
        raise TypeError(f"model: expected a module or function, got {got}{hint}")
    if not isinstance(args, (tuple, list)):
        got = "one tensor" if isinstance(args, torch.Tensor) else type(args).__name__
        raise TypeError(f"args: expected a tuple of arguments, got {got}; write (x,) for one")
    named = kwargs is None or (
        isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)
    )
    if not named:
        got = type(kwargs).__name__
        raise TypeError(f"kwargs: expected a dictionary of arguments by name, got {got}")


def _in_a_line(error: Exception) -> str:
    what = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {what}" if what else type(error).__name__


def _stand_in(gm: fx.GraphModule) -> Callable[..., Any]:
    """Returns a function to run instead of the graph. It returns zeros as outputs, and returns
    inputs as they are."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    output = next(iter(reversed(gm.graph.nodes)))

    def forward(*inputs: Any) -> Any:
        given = dict(zip(placeholders, inputs, strict=True))

        def made(node: fx.Node) -> Any:
            return (
                given[node]
                if node in given
                else _compat.zeros_like_fake(node.meta["example_value"])
            )

        return fx.node.map_arg(output.args[0], made)

    return forward


__all__ = ["StrictError", "lower", "reports", "tilewright"]
