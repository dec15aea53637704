"""Tests the check of each call for inputs that share memory. Whenever two inputs share memory, the
check must find them."""

from __future__ import annotations

import random

import pytest
import torch

from tilewright.compiler.safety.overlap import InputMemory, unfused_where_inputs_meet

INPUTS, WRITTEN = 7, 3


def some_view(pool: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Returns a few elements of a pool: a run of elements, every second element, or columns of a
    matrix."""
    start, length = draw.randrange(200), draw.randrange(0, 24)
    columns = draw.randrange(5)
    run = pool[start : start + length]
    return draw.choice([run, run[::2], pool.view(16, 16)[3:9, columns : columns + 2]])


def elements(tensor: torch.Tensor) -> set[int]:
    first = tensor.data_ptr()
    size = tensor.element_size()
    places = torch.arange(256).as_strided(tensor.shape, tensor.stride())
    return {first + size * place for place in places.flatten().tolist()}


def share(inputs, together) -> bool:
    """Whether two inputs have an element in common, and at least one of them is written."""
    held = [elements(tensor) for tensor in inputs]
    return any(
        held[i] & held[j]
        for i in range(WRITTEN)
        for j in range(INPUTS)
        if i != j and (i, j) not in together
    )


@pytest.mark.parametrize("seed", range(20))
def test_calls_are_unfused_exactly_where_a_written_input_meets_another(seed):
    draw = random.Random(seed)
    pools = [torch.zeros(256) for _ in range(4)]
    pairs = [(i, j) for i in range(WRITTEN) for j in range(INPUTS) if i != j]
    chosen = draw.sample(pairs, draw.randrange(4))
    together = frozenset(chosen) | {(j, i) for i, j in chosen}
    names = tuple(f"input_{i}" for i in range(INPUTS))
    memory = InputMemory(tuple(range(INPUTS)), frozenset(range(WRITTEN)), together, (), names)
    run = unfused_where_inputs_meet(
        memory, lambda *inputs: "fused", lambda *inputs: "unfused", lambda why: None
    )
    inputs = [some_view(draw.choice(pools), draw) for _ in range(INPUTS)]
    seen = []
    for _ in range(60):
        for index in draw.sample(range(INPUTS), draw.randrange(INPUTS)):
            inputs[index] = some_view(draw.choice(pools), draw)
        seen.append(run(*inputs))
        assert seen[-1] == ("unfused" if share(inputs, together) else "fused")
    assert len(set(seen)) == 2, "both kinds of calls were tried"
