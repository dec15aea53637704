"""Tests repeated LoRA calls, which have the addresses of an earlier call. They run the same kernels
with new results and scratch memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter, steps_of
from tilewright.codegen.lora.kernels import TiledShrink
from tilewright.ops.lora import expand, shrink
from tilewright.ops.lora.cases import LoraCase
from tilewright.ops.lora.lowering import shrink_steps
from tilewright.ops.runtime.program import drive
from tilewright.ops.runtime.replay import repeat

OPS = {"shrink": shrink.OP, "expand": expand.OP}
ROWS = LoraCase("rows", num_rows=6, none_every=3, hidden=24, ranks=(4, 2, 3))
SINGLE = replace(ROWS, rows="single", num_rows=3, num_adapters=1)
CASES = {
    "rows": ROWS,
    "groups": replace(ROWS, rows="groups", sizes=(2, 3), ids=(1, -1), spare=2),
    "sequences": replace(ROWS, rows="sequences", num_rows=640, num_sequences=10),
    "sorted": replace(ROWS, num_rows=600),
    "single": SINGLE,
    "only_v": replace(SINGLE, ranks=(0, 0, 9)),
    "packed": replace(ROWS, packed=True, bases="packed", base_rows=2),
}


def results_of(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("op", OPS)
def test_the_second_call_runs_the_kernels_of_the_first(op, name):
    """The second call reads the present contents, and writes new memory with the layout of the
    first."""
    op, machine = OPS[op], Interpreter()
    a = op.sample_inputs(CASES[name])
    args, kwargs = op.split(a)
    program = drive(steps_of(op, a, machine.target), machine)
    again = repeat(program, args, kwargs, machine)
    assert len(machine.kernels) == (2 if name == "sorted" else 1)
    first = results_of(program.outcome.result)
    kept = [out.clone() for out in first]
    args[0].neg_()
    second = results_of(again(*args, **kwargs))
    half = len(machine.kernels) // 2
    assert machine.kernels[:half] == machine.kernels[half:]
    wanted = drive(steps_of(op, a, machine.target), machine).outcome.result
    for old, new, before, want in zip(first, second, kept, results_of(wanted), strict=True):
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        assert torch.equal(old, before)
        assert torch.equal(new, want)
    assert not all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_a_repeat_gets_memory_in_which_split_k_exchanges_sums():
    config = TiledShrink(16, 16, 2, 4, 2)
    machine, op = Interpreter(), OPS["shrink"]
    a = op.sample_inputs(CASES["single"])
    args, kwargs = op.split(a)
    program = drive(shrink_steps(a, machine.target, config), machine)
    again = repeat(program, args, kwargs, machine)
    a.a.neg_()
    assert torch.equal(again(*args, **kwargs), -program.outcome.result)


def test_a_call_whose_ids_are_copied_is_not_repeated():
    """A kernel reads contiguous ids. If a call has to copy its ids, it is not repeated, because the
    copy belongs to this call only."""
    machine, op = Interpreter(), OPS["shrink"]
    a = op.sample_inputs(ROWS)
    wide = torch.stack((a.expert_ids, a.expert_ids), 1)
    for ids, repeated in ((a.expert_ids, True), (wide[:, 0], False)):
        given = replace(a, expert_ids=ids)
        program = drive(shrink_steps(given, machine.target), machine)
        args, kwargs = op.split(given)
        assert (repeat(program, args, kwargs, machine) is not None) == repeated
