"""A piece of a run of random programs, which runs in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tests.programs import exported, in_place, modes, outside
from tests.programs.families import FAMILIES
from tests.programs.run import quiet, task
from tests.programs.tally import Tally

#: Families whose programs are not randomly changed models. Each has a separate judge.
OTHERS: dict[str, Callable[[Iterable[int]], Tally]] = {
    "outside": outside.run,
    "exported": exported.run_all,
    "modes": modes.run,
    "in_place": in_place.run,
}


def run_task(family: str, first: int, stop: int, dynamo_every: int) -> Tally:
    """Runs the seeds of a family in a separate process."""
    if family in FAMILIES:
        return task(family, first, stop, dynamo_every)
    torch.set_num_threads(1)
    with quiet():
        return OTHERS[family](range(first, stop))
