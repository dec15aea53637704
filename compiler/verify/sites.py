"""Measures, for each kind of rewrite, the error of the fused op and the error of the graph that it
replaces. Both are compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler._compat import tracing
from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options
from tilewright.compiler.report import GraphReport, Site, collapse_sites
from tilewright.compiler.verify import clone_inputs, relative_error, same_elements
from tilewright.compiler.verify.float64 import NoFloat64Error, run_in_float64, widen

#: The factor by which a rewrite's error may exceed the graph's own error. The fused op and the
#: graph both round, but in different places.
SLACK = 1.25


@dataclass(frozen=True)
class SiteError:
    """The errors of one kind of rewrite, ||x - exact|| / ||exact||, where `exact` is the result of
    the graph in float64.

    The errors are those of one output or cache: the one that uses the largest share of its allowed
    error. The allowed error is `SLACK` times the graph's own error plus one rounding of the dtype.
    `note` says why nothing was measured; otherwise it is empty.
    """

    pattern: str
    op: str
    scope: str
    count: int
    plain_error: float
    fused_error: float
    allowed: float
    note: str = ""

    @property
    def good(self) -> bool:
        return not self.note and self.fused_error <= self.allowed


def verify_sites(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    patterns: Sequence[str] | None = None,
    dynamic: bool | None = None,
) -> list[SiteError]:
    """Runs the model on its arguments, once as it is and once with each kind of rewrite alone.

    `args` and `kwargs` are real tensors. Caches among them are written as the unfused model writes
    them. Equal sites of different layers are rewritten together. Raises ValueError for meta
    tensors, and passes on any exception of the model.
    """
    chosen = None if patterns is None else tuple(patterns)
    options = Options(inner="eager", patterns=chosen, everywhere=True)
    found: list[SiteError] = []

    def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report = fuse(gm, options)

        def run(*inputs: Any) -> Any:
            found.extend(_graph_errors(report, options, inputs))
            return report.before(*inputs)

        return run

    with torch.no_grad(), tracing.unlimited_compiles():
        compiled = tracing.compile_isolated(model, backend=capture, dynamic=dynamic)
        compiled(*args, **(kwargs or {}))
    return found


def compared(plain: fx.GraphModule, fused: Callable[..., Any], inputs: Sequence[Any]) -> SiteError:
    """Returns the errors of `fused` and of `plain`, for the outputs and the written inputs. `plain`
    is the graph itself, and `fused` is another way to run it. Each runs on copies of the inputs."""
    try:
        exact = _run(lambda *given: run_in_float64(plain, given), inputs, widen)
    except NoFloat64Error as error:
        return SiteError("", "", "", 1, 0.0, 0.0, 0.0, f"no float64 reference: {error}")
    theirs, ours = _run(plain, inputs), _run(fused, inputs)
    triples = list(zip(ours.outputs, theirs.outputs, exact.outputs, strict=True))
    return SiteError("", "", "", 1, *_worst(triples + _changed(inputs, ours, theirs, exact)))


def _graph_errors(report: GraphReport, options: Options, inputs: Sequence[Any]) -> list[SiteError]:
    kinds = collapse_sites(report.matches)
    if not kinds:
        return []
    if any(isinstance(item, torch.Tensor) and item.is_meta for item in inputs):
        raise ValueError("expected tensors with data, got tensors on the meta device")
    try:
        exact = _run(lambda *given: run_in_float64(report.before, given), inputs, widen)
    except NoFloat64Error as error:
        note = f"no float64 reference: {error}"
        return [_error(site, scope, n, (), note) for site, scope, n in kinds]
    plain = _run(report.before, inputs)
    found = []
    for site, scope, count in kinds:
        alone = replace(options, patterns=(site.pattern,), only=(scope,) if scope else None)
        fused = _run(fuse(report.before, alone).after, inputs)
        triples = list(zip(fused.outputs, plain.outputs, exact.outputs, strict=True))
        triples += _changed(inputs, fused, plain, exact)
        found.append(_error(site, scope, count, triples))
    return found


@dataclass(frozen=True)
class _Ran:
    """The floating-point outputs of a run, and the values of its floating-point inputs after the
    run, without weights."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]


def _run(
    run: Callable[..., Any],
    inputs: Sequence[Any],
    convert: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> _Ran:
    given = clone_inputs(inputs, convert, shared=_is_weight)
    outputs = [t for t in _compat.tensors_in(run(*given)) if t.is_floating_point()]
    return _Ran(outputs, _written(given))


def _written(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the inputs that a run may have written, such as caches."""
    return [t for t in _compat.tensors_in(inputs) if t.is_floating_point() and not _is_weight(t)]


def _changed(
    inputs: Sequence[Any], fused: _Ran, plain: _Ran, exact: _Ran
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Returns the changed elements of each input. The other elements of a cache would dilute the
    error."""
    found = []
    runs = zip(_written(inputs), fused.inputs, plain.inputs, exact.inputs, strict=True)
    for before, *after in runs:
        same = [same_elements(tensor.double(), before.double()) for tensor in after]
        changed = ~(same[0] & same[1] & same[2])
        if bool(changed.any()):
            found.append((after[0][changed], after[1][changed], after[2][changed]))
    return found


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter. Parameters are not copied, because they take most of the
    memory, and inference writes none of them."""
    return isinstance(tensor, torch.nn.Parameter)


def _error(
    site: Site,
    scope: str,
    count: int,
    triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    note: str = "",
) -> SiteError:
    """Returns the error of a site. `triples` holds (fused, plain, exact) for each tensor."""
    return SiteError(site.pattern, site.op, scope, count, *_worst(triples), note)


def _worst(
    triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> tuple[float, float, float]:
    """Returns (plain error, fused error, allowed error) of the triple that uses the largest share
    of its allowed error."""
    pairs = [
        (_distance(theirs, truth), _distance(ours, truth), _allowed(theirs, truth))
        for ours, theirs, truth in triples
    ]
    return max(pairs, key=_share, default=(0.0, 0.0, 0.0))


def _share(errors: tuple[float, float, float]) -> float:
    """Returns the fused error as a share of the allowed error."""
    _, fused, allowed = errors
    return fused / allowed if allowed else float("inf" if fused else 0)


def _allowed(plain: torch.Tensor, exact: torch.Tensor) -> float:
    rounding = torch.finfo(plain.dtype).eps if plain.dtype.itemsize > 1 else 0.0
    return SLACK * _distance(plain, exact) + rounding


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the relative error in the 2-norm. If only one of the two has a NaN or an infinity at
    a place, the error is infinite."""
    x, y = a.double(), b.double()
    same = same_elements(x, y)
    if not bool((same | (x.isfinite() & y.isfinite())).all()):
        return float("inf")
    return relative_error(x, y)
