"""Runs the fused graph beside the original once, and falls back where they disagree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.compiler._compat import tensors_in
from tilewright.compiler.options import Options
from tilewright.compiler.report import GraphReport

log = logging.getLogger("tilewright")

# Relative error (2-norm) a fused graph may show against the original: both round to the dtype, in
# different places, and a whole model amplifies that.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
EIGHT_BITS = 0.25


class VerificationError(RuntimeError):
    """Under `strict`, a fused graph whose results differ from the original's."""


@dataclass(frozen=True)
class Difference:
    """One output or mutated input. error: ||fused - original|| / ||original||."""

    what: str
    error: float
    allowed: float

    @property
    def bad(self) -> bool:
        return not self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.what}: relative error {self.error:.2e}, allowed {self.allowed:.0e}"


def compare_graphs(report: GraphReport, inputs: Sequence[Any]) -> list[Difference]:
    """Runs both graphs eagerly on copies of the inputs; outputs and inputs are compared after."""
    ours, theirs = clone_inputs(inputs), clone_inputs(inputs)
    fused = report.after(*ours)
    plain = report.before(*theirs)
    outputs = _differences("output", tensors_in(fused), tensors_in(plain))
    return outputs + _differences("input", tensors_in(ours), tensors_in(theirs), tensors_in(inputs))


def verified(
    report: GraphReport,
    compiled: Callable[..., Any],
    options: Options,
    mismatch: Callable[[str], None],
) -> Callable[..., Any]:
    """`compiled`, which on its first call is compared with the original graph.

    On a mismatch: VerificationError under `strict`, else a warning, `mismatch(why)`, and the
    original from then on.
    """
    chosen: list[Callable[..., Any]] = []

    def run(*inputs: Any) -> Any:
        if not chosen:
            bad = [d for d in compare_graphs(report, inputs) if d.bad]
            if bad:
                message = "the fused graph differs: " + "; ".join(map(str, bad))
                if options.strict:
                    raise VerificationError(message)
                log.warning("%s; running the original", message)
                mismatch(message)
            chosen.append(report.before.forward if bad else compiled)
        return chosen[0](*inputs)

    return run


def clone_inputs(
    inputs: Sequence[Any],
    convert: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    shared: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> list[Any]:
    """Copies of the inputs that share storage as the inputs do: each storage is cloned once.

    convert: changes the dtype of a storage's elements. shared: says which tensors are not copied.
    """
    storages: dict[int, torch.Tensor] = {}
    copies: list[Any] = []
    for item in inputs:
        if not isinstance(item, torch.Tensor) or shared(item):
            copies.append(item)
            continue
        key = item.untyped_storage().data_ptr()
        if key not in storages:
            whole = torch.empty(0, dtype=item.dtype, device=item.device)
            whole.set_(item.untyped_storage())
            storages[key] = convert(whole.clone())
        held, dtype = storages[key], convert(torch.empty(0, dtype=item.dtype)).dtype
        held = held if held.dtype == dtype else held.view(dtype)
        copies.append(held.as_strided(item.size(), item.stride(), item.storage_offset()))
    return copies


def _differences(
    what: str,
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor] | None = None,
) -> list[Difference]:
    """Each tensor of ours against theirs. before: the tensors before the run, to compare only what
    changed: a step writes few slots of a cache, and the others would dilute the error.
    """
    found = []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not a.dtype.is_floating_point:
            same = torch.equal(a, b)
            found.append(Difference(f"{what} {i}", 0.0 if same else float("inf"), 0.0))
            continue
        x, y = a.double(), b.double()
        if before is None:
            # Garbage that a mask hides is NaN times zero in the graph, and not looked at by an op.
            x = torch.where(y.isnan(), y, x)
        else:
            old = before[i].double()
            changed = ~(same_elements(x, old) & same_elements(y, old))
            x, y = x[changed], y[changed]
        allowed = TOLERANCE.get(a.dtype, EIGHT_BITS)
        found.append(Difference(f"{what} {i}", relative_error(x, y), allowed))
    return found


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """||x - y|| / ||y|| in the 2-norm, of float64 tensors; equal elements add nothing."""
    scale = torch.linalg.vector_norm(torch.where(y.isfinite(), y, 0.0)).item()
    error = torch.linalg.vector_norm(torch.where(same_elements(x, y), 0.0, x - y)).item()
    return error / (scale or 1.0)


def same_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Equality element by element; NaN equals NaN, which uninitialised caches may hold."""
    return (a == b) | (a.isnan() & b.isnan())
