"""Tests when ranks ask each other for memory, and when they do without it. The asking itself needs
GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import _symmetric_memory

from tilewright.ops.runtime import peers

WANTED = SimpleNamespace(
    group="ranks", form="2 x bf16[64] x4", kind="", nbytes=128, programs=4, flags=(4, 2, 2)
)


def wanted(**changes):
    return SimpleNamespace(**vars(WANTED) | changes)


@pytest.fixture
def asked(monkeypatch):
    """Counts how often the ranks were asked. `asked.group` and `asked.capturing` may be set."""
    found = SimpleNamespace(count=0, group=object(), capturing=False, answer=(1024, 2048, 1))

    def apart(function):
        found.count += 1
        return found.answer

    found.apart = apart
    monkeypatch.setattr(peers, "_shared", {})
    monkeypatch.setattr(peers, "group_named", lambda name: found.group)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    return found


def memory(asked, step=WANTED):
    return peers.peer_memory(step, 0, lambda: None, asked.apart, None)


def test_ranks_agree_once_for_a_form(asked):
    assert memory(asked) == memory(asked) == asked.answer
    assert asked.count == 1
    memory(asked, wanted(form="2 x bf16[128] x4"))
    assert asked.count == 2


def test_a_kernel_of_another_kind_is_compiled_on_all_ranks_before_one_runs(asked):
    """All ranks compile a new kind of kernel before any rank runs it. Otherwise no rank runs it: if
    a kernel failed on one rank later, the other ranks would wait in theirs."""
    memory(asked)
    other = wanted(kind="norm none")
    for answer, given in ((True, asked.answer), (False, None)):
        asked.answer, before = answer, asked.count
        kind = wanted(kind=f"{other.kind} {answer}")
        assert memory(asked, kind) == memory(asked, kind)
        assert memory(asked, kind) == (given if given is None else memory(asked))
        assert asked.count == before + 1
    asked.capturing = True
    assert memory(asked, other) is None
    assert memory(asked) is not None


def test_a_capture_asks_nobody_and_the_next_call_does(asked):
    asked.capturing = True
    assert memory(asked) is None
    assert asked.count == 0
    asked.capturing = False
    assert memory(asked) == asked.answer
    asked.capturing = True
    assert memory(asked) == asked.answer


def test_that_there_is_none_is_remembered(asked):
    asked.answer = None
    assert memory(asked) is None
    assert memory(asked) is None
    assert asked.count == 1


def test_another_group_of_the_name_is_asked_again(asked):
    memory(asked)
    asked.group = object()
    memory(asked)
    assert asked.count == 2


def test_a_group_that_is_not_there_has_no_size():
    assert peers.group_size("no such group") is None
    assert not peers.is_group("no such group", object())


def test_what_one_rank_cannot_do_no_rank_does(monkeypatch):
    """If one rank cannot do something, no rank does it. Each rank says whether it can share memory,
    and how much. The smallest answer counts."""
    others = []

    def all_reduce(answers, kind, group):
        for other in others:
            answers.copy_(torch.minimum(answers, other))

    monkeypatch.setattr(peers.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(peers, "_device", lambda index: torch.device("cpu"))
    assert peers._all_can(True, "form", None, 0)
    assert not peers._all_can(False, "form", None, 0)
    mark = peers.zlib.crc32(b"another release")
    others.append(torch.tensor([1, mark, -mark]))
    assert not peers._all_can(True, "form", None, 0)
    others[:] = [torch.tensor([0, 2**40, 2**40])]
    assert not peers._all_can(True, "form", None, 0)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Uses the CPU's memory in place of a GPU's, and a group whose ranks always agree."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(peers, "_all_can", lambda can, *_: can)
    monkeypatch.setattr(peers, "_kept", [])
    empty = torch.empty
    monkeypatch.setattr(_symmetric_memory, "empty", lambda n, dtype, device: empty(n, dtype=dtype))
    theirs = torch.zeros(WANTED.flags, dtype=torch.int64)
    met = SimpleNamespace(buffer_ptrs=[4096, 8192], rank=1, get_buffer=lambda *_: theirs)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda own, group: met)
    found = SimpleNamespace(theirs=theirs, watched=[])
    found.watch = lambda others, rank: found.watched.append((rank, others))
    found.this_process = lambda rank: (rank, 10 + rank)
    monkeypatch.setattr(peers, "_gathered", lambda own, group, device: [(0, 10), own])
    monkeypatch.setattr(peers.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(peers, "_pinned", lambda shape: empty(shape, dtype=torch.int64))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return found


def test_memory_is_zero_and_kept(on_the_cpu):
    addresses, sent, rank = peers._agreed_memory(WANTED, None, 0, lambda: None, on_the_cpu)
    ((own, _, table, counts),) = peers._kept
    assert rank == 1
    assert (addresses, sent) == (table.data_ptr(), counts.data_ptr())
    assert table.tolist() == [4096, 8192]
    assert counts.tolist() == [0] * WANTED.programs
    assert own.tolist() == [0] * WANTED.nbytes


def test_a_rank_waits_for_one_that_did_not_send_what_it_has(on_the_cpu):
    """A rank waits if it has not received a row that another rank owes it. The test covers the last
    value of either slot, and where the count of rows starts again at zero."""
    peers._agreed_memory(WANTED, None, 0, lambda: None, on_the_cpu)
    ((rank, ((numbers, waits),)),) = on_the_cpu.watched
    assert (rank, numbers) == (1, (0, 10))
    there = on_the_cpu.theirs
    here = peers._kept[0][0].view(torch.int64).view(WANTED.flags)
    assert not waits()
    there[2, 1, 1] = 7
    assert waits()
    here[2, 1, 0] = 7
    assert not waits()
    here[2, 0, 0] = 8  # the other rank was ahead when it ended
    assert not waits()
    here[3, 1, 0], there[3, 1, 1] = 2**31 - 1, -(2**31) + 1
    assert waits()
    here[3, 1, 0] = -(2**31) + 1
    assert not waits()


def test_ranks_that_cannot_be_watched_share_memory_nonetheless(on_the_cpu, caplog):
    on_the_cpu.watch = lambda *_: 1 / 0
    assert peers._agreed_memory(WANTED, None, 0, lambda: None, on_the_cpu)
    assert "cannot notice the end of a rank of group ranks: ZeroDivisionError" in caplog.text


def test_a_collective_that_fails_on_one_rank_is_raised(on_the_cpu, monkeypatch):
    """An error in a collective of one rank is raised. The other ranks are in the same collective,
    or will reach it. If this rank went on alone, ranks would meet in different collectives."""
    monkeypatch.setattr(peers, "_gathered", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        peers._agreed_memory(WANTED, None, 0, lambda: None, on_the_cpu)


def test_a_gpu_that_fails_while_it_is_asked_is_no_gpu_that_says_nothing(on_the_cpu, monkeypatch):
    """A GPU that fails differs from a GPU that does not answer: copies that were under way never
    arrive, and the next copy raises an error."""
    peers._agreed_memory(WANTED, None, 0, lambda: None, on_the_cpu)
    ((_, ((_, waits),)),) = on_the_cpu.watched
    calls = []
    monkeypatch.setattr(peers, "_AGAIN_S", 0.0)
    monkeypatch.setattr(peers._Waits, "_copy", lambda _: calls.append(1) or 1 / (2 - len(calls)))
    with pytest.raises(ZeroDivisionError):
        waits()
    assert len(calls) == 2


def test_another_kind_of_kernel_is_tried_and_told(on_the_cpu, caplog):
    assert peers._agreed_kernel(WANTED, None, 0, lambda: None)
    assert not peers._agreed_kernel(WANTED, None, 0, lambda: 1 / 0)
    assert "NCCL instead: ZeroDivisionError" in caplog.text


def test_a_kernel_that_does_not_compile_is_told_and_logged(on_the_cpu, caplog):
    def compiled():
        raise ValueError("no such kernel")

    assert peers._agreed_memory(WANTED, None, 0, compiled, None) is None
    assert "NCCL instead: ValueError: no such kernel" in caplog.text
    assert peers._kept == []
