"""The kernel of sums over ranks without GPUs: each rank is a process of its own, and the
interpreter's loads and stores go to memory that all of them have."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter
from tilewright.codegen.collective.specs import ReduceConfig, shared_bytes
from tilewright.ops.collective import all_reduce_residual_norm as op
from tilewright.ops.collective.cases import ReduceCase, sample_reduce
from tilewright.ops.collective.lowering import all_reduce_residual_norm_steps
from tilewright.ops.collective.operands import reduce_problem
from tilewright.ops.runtime.program import PeerMemory, drive

CASES = {
    "packed": (ReduceCase("", num_tokens=5, n=72), ReduceConfig(True, 2, 4), 2),
    "flags": (ReduceCase("", num_tokens=5, n=72, stride=80), ReduceConfig(False, 2, 4), 2),
    "half": (ReduceCase("", num_tokens=3, n=64, dtype=torch.float16), ReduceConfig(True, 3, 4), 3),
    "gemma": (ReduceCase("", num_tokens=2, norm_offset=1.0), ReduceConfig(False, 1, 4), 3),
}
CALLS = 3


def parts_of(case, ranks):
    """What each rank gives to the op: a part of its own, and the same for the rest."""
    whole = op.sample_inputs(case)
    parts = [sample_reduce(case, "cpu", seed=1 + rank)["x"] for rank in range(ranks)]
    return [replace(whole, x=x, group="ranks", num_ranks=ranks) for x in parts]


def be_rank(rank, a, config, memories, addresses, results):
    torch.set_num_threads(1)
    sent = torch.zeros(config.blocks, dtype=torch.int32)
    machine = Interpreter(peers=PeerMemory(addresses, sent, rank))
    for call in range(CALLS):
        given = replace(a, x=a.x * 2**call)
        program = drive(all_reduce_residual_norm_steps(given, machine.target, config), machine)
        for kept, made in zip(results[rank][call], program.outcome.result, strict=True):
            kept.copy_(made)
    assert machine.kernels == ["all_reduce_residual_norm"] * CALLS


@pytest.mark.parametrize("name", CASES)
def test_ranks_get_the_same_bits_and_the_right_ones(name):
    """Three calls one after the other: slots are written again."""
    case, config, ranks = CASES[name]
    parts = parts_of(case, ranks)
    nbytes = shared_bytes(reduce_problem(parts[0], ranks), config)
    memories = [torch.zeros(nbytes, dtype=torch.uint8).share_memory_() for _ in parts]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    shape = (CALLS, 2, case.num_tokens, case.n)
    results = [torch.zeros(shape, dtype=case.dtype).share_memory_() for _ in parts]
    forked = multiprocessing.get_context("fork")
    running = [
        forked.Process(target=be_rank, args=(rank, a, config, memories, addresses, results))
        for rank, a in enumerate(parts)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=60)
        process.kill()
    assert [process.exitcode for process in running] == [0] * ranks
    assert all(torch.equal(results[0], other) for other in results[1:])
    tolerance = op.OP.tolerances[case.dtype]
    for call in range(CALLS):
        total = sum(part.x.double() * 2**call for part in parts)
        alone = replace(parts[0], x=total, residual=parts[0].residual.double(), group="")
        exact = op.reference(replace(alone, num_ranks=1))
        for made, wanted in zip(results[0][call], exact, strict=True):
            assert tolerance.problem(made, wanted) is None, (call, tolerance.problem(made, wanted))
