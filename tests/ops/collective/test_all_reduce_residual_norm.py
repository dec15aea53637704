"""Tests the kernel of sums over ranks without GPUs. Each rank is a separate process, and the
interpreter's loads and stores go to memory that all ranks share."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.interpreted import Interpreter, wait_idly
from tilewright.codegen.collective.kernels import ReduceConfig, shared_bytes
from tilewright.codegen.collective.plan import most_tokens
from tilewright.ops import calls
from tilewright.ops.checks import ArgumentError
from tilewright.ops.collective import all_reduce_residual_norm as op
from tilewright.ops.collective import lowering
from tilewright.ops.collective.cases import sample_reduce
from tilewright.ops.collective.lowering import all_reduce_residual_norm_steps
from tilewright.ops.runtime.peers import RankFailedError
from tilewright.ops.runtime.program import Launch, PeerMemory, drive
from tilewright.ops.runtime.replay import repeat
from tilewright.ops.sampling import RowsCase

F16 = torch.float16
CASES = {
    "rows": (RowsCase("", num_tokens=5, n=72, stride=80), ReduceConfig(2, 4), 2),
    "gemma": (RowsCase("", num_tokens=3, norm_offset=1.0, dtype=F16), ReduceConfig(4, 4), 3),
}
CALLS = 3


def parts_of(case, ranks):
    """Returns the arguments of each rank: each has its own part of the sum, and all other arguments
    are the same."""
    whole = op.sample_inputs(case)
    parts = [sample_reduce(case, "cpu", seed=1 + rank)["x"] for rank in range(ranks)]
    return [replace(whole, x=x, group="ranks", num_ranks=ranks) for x in parts]


def be_rank(rank, a, config, memories, addresses, results):
    torch.set_num_threads(1)
    wait_idly()
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
    """Makes three calls one after the other, so that slots are written again. All ranks must get
    the same bits, and the right ones."""
    case, config, ranks = CASES[name]
    parts = parts_of(case, ranks)
    nbytes = shared_bytes(config, ranks, case.dtype.itemsize * case.n)
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


@pytest.fixture
def fake_ranks():
    """Makes this process the first of two ranks that do not exist. Returns the name of the
    group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_without_memory_in_common_the_library_sums(fake_ranks):
    """Without memory that both ranks can access, the library sums. This choice is not remembered: a
    captured call has no such memory, but the next call may have some."""
    a = replace(op.sample_inputs(RowsCase("", n=72)), group=fake_ranks, num_ranks=2)
    machine = Interpreter()
    program = drive(all_reduce_residual_norm_steps(a, machine.target), machine)
    assert [type(step) for step, _ in program.steps] == []
    assert not program.repeatable
    assert program.outcome.name == "norm kernel"
    exact = op.reference(replace(a, x=a.x.double(), residual=a.residual.double()))
    for made, wanted in zip(program.outcome.result, exact, strict=True):
        assert op.OP.tolerances[torch.bfloat16].problem(made, wanted) is None


def test_more_ranks_sum_many_tokens_by_the_library(fake_ranks):
    """With more ranks, the library sums many tokens. Otherwise each rank would read all rows of all
    other ranks."""
    few = most_tokens(4096, 8)
    case = RowsCase("", num_tokens=few, n=4096)
    for tokens, name in ((few, "peer kernel"), (few + 1, "norm kernel")):
        a = sample_reduce(replace(case, num_tokens=tokens), "meta", 0)
        arguments = op.AllReduceResidualNormArguments(**a, group=fake_ranks, num_ranks=8)
        assert op.OP.plan_for(arguments, "sm90").name == name
    assert most_tokens(4096, 2) is None


def test_a_call_is_made_again_through_the_same_memory():
    """The second call is found by its addresses and uses the same shared memory, which is not an
    argument."""
    a = replace(parts_of(RowsCase(""), 2)[0])
    machine = Interpreter(runs=False, peers=PeerMemory(1024, 2048, 0))
    program = drive(all_reduce_residual_norm_steps(a, machine.target), machine)
    again = repeat(program, *op.OP.split(a), machine)
    assert again is not None
    assert len(again(*op.OP.split(a)[0], **op.OP.split(a)[1])) == 2
    assert machine.kernels == ["all_reduce_residual_norm"] * 2


@dataclass
class Broken(Interpreter):
    """An interpreter in which no kernel compiles."""

    def launcher(self, launch):
        raise ValueError("no such kernel")


@pytest.fixture
def broken(monkeypatch):
    """Runs the op as on a GPU for which kernels do not compile. `broken.sums` counts the sums over
    ranks."""
    machine = Broken()
    machine.sums = []
    monkeypatch.setattr(calls, "machine_of", lambda device: machine)
    monkeypatch.setattr(lowering, "_failed", set())
    real = lowering._all_reduce

    def counted(out, x, group):
        machine.sums.append(tuple(x.shape))
        real(out, x, group)

    monkeypatch.setattr(lowering, "_all_reduce", counted)
    return machine


@pytest.mark.parametrize("norm", ["rms", "weightless"])
def test_a_rank_whose_norm_kernel_fails_sums_once_as_the_others_do(fake_ranks, broken, norm):
    """A rank whose norm kernel fails sums once, like the others. If the reference called a second
    collective, the other ranks' next collective would meet it."""
    case = RowsCase("", n=72, norm=norm, norm_offset=1.0)
    a = replace(op.sample_inputs(case), group=fake_ranks, num_ranks=2)
    args, kwargs = op.OP.split(a)
    run = calls.Calls(op.OP, "cuda")
    exact = op.reference(replace(a, x=a.x.double(), residual=a.residual.double()))
    for count in (1, 2):
        for made, wanted in zip(run(*args, **kwargs), exact, strict=True):
            assert op.OP.tolerances[torch.bfloat16].problem(made, wanted) is None
        assert broken.sums == [tuple(a.x.shape)] * count


def test_a_rank_whose_kernel_fails_when_the_others_run_it_raises(fake_ranks, broken):
    """A rank raises if its kernel fails while the others run theirs. The others wait in their
    kernel, and a collective of this rank alone would not end their wait."""
    broken.peers = PeerMemory(1024, 2048, 0)
    a = replace(op.sample_inputs(RowsCase("", n=72)), group=fake_ranks, num_ranks=2)
    args, kwargs = op.OP.split(a)
    run = calls.Calls(op.OP, "cuda")
    for _ in range(2):
        with pytest.raises(RankFailedError, match="ranks wait for it: ValueError: no such"):
            run(*args, **kwargs)
    assert broken.sums == []


def test_a_collective_that_fails_is_not_called_again(fake_ranks, broken, monkeypatch):
    sums = []

    def failing(out, x, group):
        sums.append(group)
        raise RuntimeError("closed by a peer")

    monkeypatch.setattr(lowering, "_all_reduce", failing)
    a = replace(op.sample_inputs(RowsCase("", n=72)), group=fake_ranks, num_ranks=2)
    args, kwargs = op.OP.split(a)
    with pytest.raises(RankFailedError, match="closed by a peer"):
        calls.Calls(op.OP, "cuda")(*args, **kwargs)
    assert len(sums) == 1


def test_alone_the_reference_takes_over(broken):
    a = op.sample_inputs(RowsCase("", n=72))
    args, kwargs = op.OP.split(a)
    for made, wanted in zip(
        calls.Calls(op.OP, "cuda")(*args, **kwargs), op.reference(a), strict=True
    ):
        assert torch.equal(made, wanted)


def test_memory_of_a_group_that_is_gone_is_not_written_again(monkeypatch):
    """The memory of a group that no longer exists is not written again. Another group of the same
    name may have other ranks, so a remembered call asks for memory again."""
    a = parts_of(RowsCase(""), 2)[0]
    held = [True]
    machine = Interpreter(runs=False, peers=PeerMemory(1024, 2048, 0, lambda: held[0]))
    monkeypatch.setattr(calls, "machine_of", lambda device: machine)
    monkeypatch.setattr(
        "tilewright.ops.collective.all_reduce_residual_norm.obstacle", lambda name: None
    )
    launched = []
    real = machine.launcher

    def launcher(launch: Launch):
        launched.append(launch.values["peers_ptr"])
        return real(launch)

    machine.launcher = launcher
    args, kwargs = op.OP.split(a)
    run = calls.Calls(op.OP, "cuda")
    for _ in range(3):
        run(*args, **kwargs)
    assert launched == [1024, 1024]  # the third call repeats the second
    held[0], machine.peers = False, PeerMemory(4096, 8192, 1)
    run(*args, **kwargs)
    assert launched == [1024, 1024, 4096]


def test_ranks_without_symmetric_memory_take_the_reference(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/here", rank=0, world_size=1)
    try:
        a = replace(parts_of(RowsCase(""), 2)[0], group=dist.group.WORLD.group_name)
        report = op.OP.plan_for(a, "sm90")
    finally:
        dist.destroy_process_group()
    assert report.name == "reference"
    assert "talk through gloo, which has no symmetric memory" in report.reason


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"residual": torch.zeros(5, 63).bfloat16()}, "residual"),
        ({"residual": torch.zeros(5, 64)}, "residual"),
        ({"norm_weight": torch.zeros(63)}, "norm_weight"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"num_ranks": 0}, "num_ranks"),
        ({"num_ranks": 2}, "group"),
        ({"group": "ranks"}, "group"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(change, argument):
    with pytest.raises(ArgumentError) as raised:
        op.OP.call(replace(op.sample_inputs(RowsCase("")), **change))
    assert raised.value.argument == argument
