"""The command `tilewright bench --profile MODEL`, which compares the measured time of a step with
the step's floor. The step is recorded on this machine or on another one."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.codegen.targets import detect_target, key_of
from tilewright.tools.commands.common import CommandError
from tilewright.tools.zoo import is_zoo_name

if TYPE_CHECKING:
    from tilewright.compiler.report.step import Step
    from tilewright.tools.step.profile import Profile
    from tilewright.tools.zoo import LoadedModel

RECORDED_STEPS = 10


@dataclass(frozen=True)
class Wanted:
    """A request for a profile.

    trace: the file with the trace; None to record one on this GPU.
    target: the chip on which the trace was recorded.
    present: the number of tokens in the caches.
    layers: the number of layers of a zoo model; None for all of them.
    """

    model: str
    trace: Path | None
    target: str | None
    present: int | None
    layers: int | None
    cuda_graph: bool


def measured(wanted: Wanted, debug: bool) -> tuple[Profile, Step]:
    """Returns the profile and its step. Raises CommandError."""
    target = _target(wanted)
    from tilewright.compiler.report.step import step_of
    from tilewright.tools.commands.models import load, lowered_as
    from tilewright.tools.step.profile import TraceError, profile_of

    with contextlib.redirect_stdout(sys.stderr):
        loaded = load(wanted.model, **(_options(wanted) if is_zoo_name(wanted.model) else {}))
        step = step_of(lowered_as(wanted.model, loaded, target, debug), wanted.present)
        if wanted.trace is not None:
            trace, steps = _read(wanted.trace), None
        else:
            trace, steps = _recorded(wanted, loaded, debug), RECORDED_STEPS
    try:
        return profile_of(trace, step, steps), step
    except TraceError as error:
        raise CommandError(f"{wanted.trace or wanted.model}: {error}") from error


def _target(wanted: Wanted) -> str:
    if wanted.trace is not None:
        if wanted.target is None:
            raise CommandError(
                "--trace needs --target, which names the chip on which the trace was recorded"
            )
        return wanted.target
    chip = detect_target()
    if chip is None:
        raise CommandError(
            "--profile needs an NVIDIA GPU, and there is none here; --trace FILE --target NAME "
            "reads a trace that was recorded on another machine"
        )
    present = key_of(chip)
    if wanted.target not in (None, present, chip.name):
        raise CommandError(f"--target: this GPU is {present}, got {wanted.target!r}")
    return present


def _options(wanted: Wanted) -> dict[str, Any]:
    options: dict[str, Any] = {} if wanted.layers is None else {"layers": wanted.layers}
    return options if wanted.trace is not None else options | {"device": "cuda"}


def _recorded(wanted: Wanted, loaded: LoadedModel, debug: bool) -> dict[str, Any]:
    import torch

    from tilewright.tools.commands.models import traced
    from tilewright.tools.step.record import record

    given = [t for t in (*loaded.args, *loaded.kwargs.values()) if isinstance(t, torch.Tensor)]
    away = next((t.device for t in given if t.device.type != "cuda"), None)
    if away is not None:
        raise CommandError(
            f"{wanted.model}: --profile runs the model, but its arguments are on {away}"
        )
    with traced(wanted.model, debug):
        return record(loaded, RECORDED_STEPS, wanted.cuda_graph)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"--trace: cannot read {path}: {error}") from error
    return found if isinstance(found, dict) else {}
