"""Any call made again: which memory each launch and library call gets, and what is refused."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tilewright.ops.runtime import launch as kernel_launch
from tilewright.ops.runtime import replay
from tilewright.ops.runtime.recording import (
    address_key,
    call_library,
    made_by_library,
    note_launch,
    noted_scratch,
    noting_launches,
)
from tilewright.ops.runtime.replay import call_again


def noted(reads, out, scratch=None):
    """What a call notes that has one launch."""
    with noting_launches() as calls:
        if scratch is not None:
            noted_scratch(scratch)
        note_launch(lambda values: None, (reads, out))
    return calls


def test_memory_of_unknown_content_is_not_read_again():
    x, out, own = torch.ones(4), torch.empty(4), torch.empty(8)
    assert call_again(noted(x, out), (x,), {}, out) is not None
    assert call_again(noted(x.clone(), out), (x,), {}, out) is None
    assert call_again(noted(own[4:], out, scratch=own), (x,), {}, out) is not None


def test_a_library_may_make_the_result():
    x = torch.ones(4)
    with noting_launches() as calls:
        out = made_by_library(torch.neg, x)
    again = call_again(calls, (x,), {}, out.view(2, 2))
    x.mul_(3)
    assert torch.equal(again(x), torch.full((2, 2), -3.0))
    with noting_launches() as calls:
        half = made_by_library(torch.neg, x)
    assert call_again(calls, (x,), {}, half.clone()) is None


def test_a_result_that_no_launch_fills_is_not_made_again():
    x, out = torch.ones(4), torch.empty(4)
    assert call_again(noted(x, x), (x,), {}, out) is None
    assert call_again([], (x,), {}, out) is None


def test_a_launch_of_a_result_that_a_library_makes_is_not_made_again():
    x = torch.ones(4)
    with noting_launches() as calls:
        out = made_by_library(torch.neg, x)
    calls.insert(0, (lambda values: None, (x, out)))
    assert call_again(calls, (x,), {}, out) is None


def copied(x, out):
    out.copy_(x)


@pytest.mark.parametrize("shared", [False, True])
def test_a_library_sees_an_argument_whose_storage_begins_elsewhere_by_then(shared):
    """The key has addresses, so an argument may lie at another offset of another storage."""
    memory = torch.arange(16.0)
    whole = torch.frombuffer(memory.numpy(), dtype=torch.float32)
    x, other = whole[8:12], whole[:4]
    args = (other, x) if shared else (x,)
    out = torch.empty(4)
    with noting_launches() as calls:
        call_library(copied, x.as_strided((2,), (2,), 9), out[:2])
        call_library(copied, x[2:], out[2:])
    again = call_again(calls, args, {}, out)
    assert torch.equal(again(*args), out)
    moved = torch.frombuffer(memory.numpy()[8:], dtype=torch.float32)[:4]
    late = (other, moved) if shared else (moved,)
    assert address_key(args, {}) == address_key(late, {})
    assert moved.storage_offset() != x.storage_offset()
    memory.add_(100)
    second = again(*late)
    assert second.tolist() == [109.0, 111.0, 110.0, 111.0]


def addresses_of(result, scratch, x, empty):
    """What a launch of these gets when it is made again, and the new result."""
    seen = []
    with noting_launches() as calls:
        noted_scratch(scratch)
        noted_scratch(empty)
        note_launch(seen.append, (x, scratch[2:], empty, result, 7))
    again = call_again(calls, (x,), {}, result)
    return again(x), seen


def test_a_launch_gets_arguments_as_they_lay_and_all_else_anew(monkeypatch):
    made = []
    empty = torch.empty

    def kept(*args, **kwargs):
        made.append(empty(*args, **kwargs))
        return made[-1]

    x, old, own, nothing = torch.ones(4), torch.empty(3), torch.empty(8), torch.empty(0)
    monkeypatch.setattr(torch, "empty", kept)
    out, (values,) = addresses_of(old, own, x, nothing)
    result, scratch = made
    assert out is result
    assert scratch.nbytes == replay.ALIGNMENT
    assert values == [x.data_ptr(), scratch.data_ptr() + 8, 0, result.data_ptr(), 7]


def test_split_k_scratch_is_asked_for_at_each_launch(monkeypatch):
    """In a captured graph each launch must have counters of its own."""
    slab = torch.zeros(64, dtype=torch.int32)
    taken = []

    def scratch(tiles, elements, device):
        taken.append((torch.empty(tiles * elements), slab[len(taken) * 8 :][:tiles]))
        return taken[-1]

    monkeypatch.setattr(kernel_launch, "_split_k_scratch", scratch)
    seen, x, out = [], torch.ones(4), (torch.empty(2), torch.empty(0), torch.empty(3))
    with noting_launches() as calls:
        for part in (out[0], out[2]):
            workspace, counters = kernel_launch.split_k_scratch(2, 5, x.device)
            note_launch(seen.append, (x, workspace, counters, part))
    again = call_again(calls, (x,), {}, out)
    result = again(x)
    assert [t.shape for t in result] == [t.shape for t in out]
    assert len(taken) == 4
    for values, (workspace, counters), part in zip(seen, taken[2:], result[::2], strict=True):
        want = [x, workspace, counters, part]
        assert values == [t.data_ptr() for t in want]


@pytest.mark.parametrize("out", [torch.empty(4, 4).t(), torch.empty(8)[4:]])
def test_a_result_unlike_a_new_one_is_not_made_again(out):
    x = torch.ones(4)
    assert call_again(noted(x, out), (x,), {}, out) is None


def test_each_result_must_be_filled():
    x, out = torch.ones(4), (torch.empty(4), torch.empty(4))
    assert call_again(noted(x, out[0]), (x,), {}, out) is None


def test_what_makes_a_call_again_holds_no_tensor():
    x, out, own = torch.ones(4), torch.empty(4), torch.empty(8)
    with noting_launches() as calls:
        noted_scratch(own)
        call_library(copied, x, own[:4])
        note_launch(list, (own, out))
    again = call_again(calls, (x,), {}, out)
    assert again is not None
    watched = [weakref.ref(tensor) for tensor in (x, out, own)]
    del x, out, own, calls
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def fails_half_way(x):
    with noting_launches():
        noted_scratch(x)
        raise ValueError("half way")


def test_what_a_call_noted_before_it_failed_is_forgotten():
    x = torch.ones(4)
    with noting_launches() as outer:
        with pytest.raises(ValueError, match="half way"):
            fails_half_way(x)
        note_launch(list, (x,))
    assert [values for _, values in outer] == [(x,)]
    note_launch(list, (x,))
    assert len(outer) == 1


def test_the_key_tells_devices_apart():
    """Memory that one GPU gave back may get its address on another."""
    x, other = torch.empty(0), torch.empty(0, device="meta")
    assert x.data_ptr() == other.data_ptr()
    assert address_key((x,), {}) != address_key((other,), {})


class Compiled:
    """Stands for a compiled kernel; logs the values of its launches."""

    metadata = SimpleNamespace(global_scratch_size=0)

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *values: self.log.append((grid, values))


def test_what_is_launched_and_noted_is_launched_again(monkeypatch):
    """From `launch` on, nothing but the compiled kernel and the CUDA runtime is replaced."""
    log = []
    cuda = {
        "current_device": lambda: 0,
        "device": lambda index: nullcontext(),
        "current_stream": lambda index: SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": lambda: False,
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(kernel_launch, "compiled_kernel", lambda spec, index: Compiled(log))
    monkeypatch.setattr(kernel_launch, "_slabs", {0: torch.zeros(4096, dtype=torch.int32)})
    monkeypatch.setattr(kernel_launch, "_counters", {})
    spec = SimpleNamespace(signature=(("x", "*fp32"), ("w", ""), ("c", ""), ("out", ""), ("n", "")))
    x, out = torch.ones(4), torch.empty(4)
    with noting_launches() as calls:
        workspace, counters = kernel_launch.split_k_scratch(3, 2, x.device)
        values = {"x": x, "w": workspace, "c": counters, "out": out, "n": 5}
        kernel_launch.launch(spec, (7,), values, x.device)
        kernel_launch.launch(spec, (0, 2), values, x.device)
    first = x.data_ptr(), counters.data_ptr()
    again = call_again(calls, (x,), {}, out)
    result = again(x)
    (grid, given), (same, addresses) = log
    assert grid == same == (7, 1, 1)
    assert [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in given][::2] == [*first, 5]
    assert addresses[::2] == (*first, 5)
    assert addresses[3] == result.data_ptr() != out.data_ptr()
