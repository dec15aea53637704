"""When ranks ask each other for memory, and when they do without; the asking itself needs GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tilewright.ops.runtime import peers

WANTED = SimpleNamespace(group="ranks", form="2 x bf16[64] x4", nbytes=64, programs=4)


@pytest.fixture
def asked(monkeypatch):
    """How often the ranks were asked; `asked.group` and `asked.capturing` may be set."""
    found = SimpleNamespace(count=0, group=object(), capturing=False, answer=(1024, 2048, 1))

    def apart(function):
        found.count += 1
        return found.answer

    found.apart = apart
    monkeypatch.setattr(peers, "_shared", {})
    monkeypatch.setattr(peers, "group_named", lambda name: found.group)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    return found


def memory(asked, wanted=WANTED):
    return peers.peer_memory(wanted, 0, lambda: None, asked.apart)


def test_ranks_agree_once_for_a_form(asked):
    assert memory(asked) == memory(asked) == asked.answer
    assert asked.count == 1
    memory(asked, SimpleNamespace(**vars(WANTED) | {"form": "2 x bf16[128] x4"}))
    assert asked.count == 2


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


def test_what_one_rank_cannot_do_no_rank_does(monkeypatch):
    """Each says whether it can, and with what; the least of all answers counts."""
    others = []

    def all_reduce(answers, kind, group):
        for other in others:
            answers.copy_(torch.minimum(answers, other))

    monkeypatch.setattr(peers.dist, "all_reduce", all_reduce)
    real = torch.tensor
    monkeypatch.setattr(peers.torch, "tensor", lambda data, dtype, device: real(data, dtype=dtype))
    assert peers._all_can(True, "form", None, 0)
    assert not peers._all_can(False, "form", None, 0)
    mark = peers.zlib.crc32(b"another release")
    others.append(real([1, mark, -mark]))
    assert not peers._all_can(True, "form", None, 0)
    others[:] = [real([0, 2**40, 2**40])]
    assert not peers._all_can(True, "form", None, 0)
