"""The launches of a call once more, by address: what `Lowering.repeatable` gives for most ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.kernel_launch import split_k_scratch
from tilewright.ops.repeats import Noted

Again = Callable[..., tuple[torch.Tensor, ...]]
SCRATCH = ("workspace_ptr", "counters_ptr")


@dataclass(frozen=True)
class _Step:
    """One launch. known: its values, tensors as addresses; made: (place, which new tensor, offset
    in bytes); split: (places of workspace and counters, tiles, elements of a tile), or None."""

    launch: Any
    known: list[Any]
    made: tuple[tuple[int, int, int], ...]
    split: tuple[int, int, int, int] | None


def launches_again(
    noted: Sequence[Noted],
    arguments: Any,
    outputs: Sequence[torch.Tensor],
    scratch: Sequence[torch.Tensor] = (),
) -> Again | None:
    """What makes the noted launches again and gives new outputs; it holds no tensor.

    arguments: the call's record; outputs: contiguous tensors that the call made; scratch: what it
    made for itself. Split-K scratch is asked for anew. None where a launch was given memory that is
    none of these (a copy of an argument).
    """
    given = {_storage(t) for t in vars(arguments).values() if isinstance(t, torch.Tensor)}
    new = (*outputs, *scratch)
    if not all(tensor.is_contiguous() for tensor in new):
        return None
    numbers = {_storage(t): number for number, t in enumerate(new) if t.numel()}
    steps = [_step(launch, values, given, new, numbers) for launch, values in noted]
    kinds = [(tensor.shape, tensor.dtype) for tensor in new]
    device, count = outputs[0].device, len(outputs)
    if None in steps:
        return None
    kept = [step for step in steps if step is not None]

    def again(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
        for step in kept:
            values = step.known.copy()
            for place, number, offset in step.made:
                values[place] = made[number].data_ptr() + offset
            if step.split is None:
                step.launch(values)
                continue
            first, second, tiles, elements = step.split
            workspace, counters = split_k_scratch(tiles, elements, device)
            values[first], values[second] = workspace.data_ptr(), counters.data_ptr()
            step.launch(values)
        return tuple(made[:count])

    return again


def _step(
    launch: Any,
    values: Sequence[Any],
    given: set[int],
    new: Sequence[torch.Tensor],
    numbers: dict[int, int],
) -> _Step | None:
    made, split = [], None
    if SCRATCH[0] in launch.names:
        first, second = (launch.names.index(name) for name in SCRATCH)
        tiles = values[second].numel()
        split = (first, second, tiles, values[first].numel() // tiles)
    for place, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or (split is not None and place in split[:2]):
            continue
        number = numbers.get(_storage(value))
        if number is not None:
            made.append((place, number, value.data_ptr() - new[number].data_ptr()))
        elif _storage(value) not in given:
            return None
    known = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
    return _Step(launch, known, tuple(made), split)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
