"""Runs the fused graph once next to the original, and returns to the original if their results
disagree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.compiler import _compat
from tilewright.compiler._compat import tensors_in
from tilewright.compiler.options import Options
from tilewright.compiler.report import GraphReport
from tilewright.ops.formats.fp8 import FP8_DTYPES

log = logging.getLogger("tilewright")

# The relative error (2-norm) that a fused graph may have against the original. Both graphs round to
# the dtype, in different places, and a whole model amplifies the difference.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
EIGHT_BITS = 0.25
_NONE = torch.zeros(0, dtype=torch.float64)


class VerificationError(RuntimeError):
    """Raised under `strict` if the results of a fused graph differ from those of the original
    graph."""


@dataclass(frozen=True)
class Difference:
    """The difference in one output or written input.

    error: ||fused - original|| / ||original||.
    hidden: whether the elements are NaN in the original, so that they were compared in a run on
        inputs without NaN.
    """

    what: str
    error: float
    allowed: float
    hidden: bool = False

    @property
    def bad(self) -> bool:
        return not self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.what}: relative error {self.error:.2e}, allowed {self.allowed:.0e}"


def compare_graphs(report: GraphReport, inputs: Sequence[Any]) -> list[Difference]:
    """Runs both graphs eagerly on copies of the inputs, and compares the outputs and the inputs
    after the runs.

    Uninitialised memory that a mask hides may give NaN in the original (NaN times zero), while the
    fused op does not read it. Therefore both graphs run a second time, on inputs without NaN, to
    compare the outputs at elements that are NaN in the original.
    """
    found, unknown = _compare(report, clone_inputs(inputs), clone_inputs(inputs), inputs)
    if any(bool(where.any()) for where in unknown):
        runs = (report.after, report.before)
        ours, theirs = (tensors_in(run(*clone_inputs(inputs, without_nan))) for run in runs)
        found += _hidden(unknown, ours, theirs)
    return found


def _compare(
    report: GraphReport, ours: list[Any], theirs: list[Any], inputs: Sequence[Any]
) -> tuple[list[Difference], list[torch.Tensor]]:
    """Returns the differences of one run on two copies of the inputs, and masks of the NaN in the
    original's outputs."""
    fused, plain = tensors_in(report.after(*ours)), tensors_in(report.before(*theirs))
    found = _differences("output", fused, plain)
    found += _differences("input", *map(_plain, (ours, theirs, inputs)))
    return found, [_nan(tensor) for tensor in plain]


def _hidden(
    unknown: Sequence[torch.Tensor],
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
) -> list[Difference]:
    """Returns the differences between outputs of runs on inputs without NaN, at the elements that
    were NaN before. Skips elements that are NaN in the original again, and outputs of another
    shape."""
    found = []
    for i, (where, a, b) in enumerate(zip(unknown, ours, theirs, strict=True)):
        if not bool(where.any()):
            continue
        known = torch.zeros_like(where)
        if a.shape == b.shape == where.shape:
            known = where & ~_nan(b)
        x, y = (tensor.double()[known] if bool(known.any()) else _NONE for tensor in (a, b))
        judged = f"{int(known.sum())} of {int(where.sum())} elements"
        what = f"output {i}, on inputs without NaN, at {judged} that are NaN in the original"
        allowed = TOLERANCE.get(a.dtype, EIGHT_BITS)
        found.append(Difference(what, relative_error(x, y), allowed, hidden=True))
    return found


def without_nan(storage: torch.Tensor) -> torch.Tensor:
    """Returns a tensor [n] in which random numbers replace NaN and infinite numbers. The random
    numbers are the same in every call. A tensor whose only such numbers are -inf, as in a mask,
    stays as it is."""
    if storage.dtype not in (*TOLERANCE, *FP8_DTYPES):
        return storage
    wide = storage.double()
    bad = ~wide.isfinite()
    if not bool((bad & (wide != float("-inf"))).any()):
        return storage
    fresh = torch.randn(int(bad.sum()), generator=torch.Generator().manual_seed(0))
    wide[bad] = fresh.to(wide)
    return wide.to(storage.dtype)


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    return tensor.double().isnan()


def verified(
    report: GraphReport,
    compiled: Callable[..., Any],
    options: Options,
    mismatch: Callable[[str], None],
    note: Callable[[str], None],
) -> Callable[..., Any]:
    """Returns a function that runs `compiled` and compares its first call with the original graph.

    On a mismatch, the returned function raises VerificationError under `strict`. Otherwise it
    warns, calls `mismatch(why)`, and runs the original from then on. If the graphs agree, the
    returned function calls `note` with a line that says how closely they agree, and which outputs
    were compared on other inputs than the given ones.
    """
    chosen: list[Callable[..., Any]] = []

    def run(*inputs: Any) -> Any:
        if not chosen:
            found = compare_graphs(report, inputs)
            bad = [d for d in found if d.bad]
            if not bad:
                note(_agreed(found))
            if bad:
                message = "the fused graph differs: " + "; ".join(map(str, bad))
                if options.strict:
                    raise VerificationError(message)
                log.warning("%s; running the original", message)
                mismatch(message)
            chosen.append(report.before.forward if bad else compiled)
        return chosen[0](*inputs)

    return run


def _agreed(found: Sequence[Difference]) -> str:
    """Returns a line that says how closely the graphs agree."""
    judged = [difference for difference in found if not difference.hidden]
    worst = max(judged, key=lambda difference: difference.error, default=None)
    farthest = f", the farthest {worst}" if worst is not None else ""
    said = f"{len(judged)} outputs and inputs agree with the original graph's{farthest}"
    return "verified: " + "; ".join([said, *(str(d) for d in found if d.hidden)])


def _plain(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the plain tensors among inputs. For a subclass, returns the tensors inside it."""
    return [part for tensor in tensors_in(inputs) for part in _compat.parts_of(tensor)]


def clone_inputs(
    inputs: Sequence[Any],
    convert: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    shared: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> list[Any]:
    """Returns copies of inputs that share storage as the originals do. Each storage is cloned once.

    `convert` changes the dtype of a storage's elements. `shared` says which tensors are not copied.
    The tensors inside a subclass are copied, but not converted.
    """
    storages: dict[tuple[int, bool], torch.Tensor] = {}

    def copied(item: torch.Tensor, into: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if _compat.is_subclass(item):
            return _compat.with_parts(item, lambda part: copied(part, lambda tensor: tensor))
        key = item.untyped_storage().data_ptr(), into is convert
        if key not in storages:
            whole = torch.empty(0, dtype=item.dtype, device=item.device)
            whole.set_(item.untyped_storage())
            storages[key] = into(whole.clone())
        held, dtype = storages[key], into(torch.empty(0, dtype=item.dtype)).dtype
        held = held if held.dtype == dtype else held.view(dtype)
        return held.as_strided(item.size(), item.stride(), item.storage_offset())

    return [
        item if not isinstance(item, torch.Tensor) or shared(item) else copied(item, convert)
        for item in inputs
    ]


def _differences(
    what: str,
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor] | None = None,
) -> list[Difference]:
    """Returns the differences of `ours` from `theirs`.

    `before` has the tensors before the run. If it is given, the function compares only elements
    that changed. A step writes few slots of a cache, and the other slots would dilute the error.
    """
    found = []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not a.dtype.is_floating_point:
            same = torch.equal(a, b)
            found.append(Difference(f"{what} {i}", 0.0 if same else float("inf"), 0.0))
            continue
        x, y = a.double(), b.double()
        if before is None:
            # `compare_graphs` compares these elements on other inputs.
            x = torch.where(y.isnan(), y, x)
        else:
            old = before[i].double()
            changed = ~(same_elements(x, old) & same_elements(y, old))
            x, y = x[changed], y[changed]
        allowed = TOLERANCE.get(a.dtype, EIGHT_BITS)
        found.append(Difference(f"{what} {i}", relative_error(x, y), allowed))
    return found


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """Returns ||x - y|| / ||y|| in the 2-norm for float64 tensors. Equal elements add nothing to
    the error."""
    scale = torch.linalg.vector_norm(torch.where(y.isfinite(), y, 0.0)).item()
    error = torch.linalg.vector_norm(torch.where(same_elements(x, y), 0.0, x - y)).item()
    return error / (scale or 1.0)


def same_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a mask of equal elements. NaN equals NaN, because uninitialised caches may hold
    it."""
    return (a == b) | (a.isnan() & b.isnan())
