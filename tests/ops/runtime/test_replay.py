"""Tests repeated calls in general: which memory each launch and library call gets, and which calls
are refused."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, Target
from tilewright.ops.runtime import launch as kernel_launch
from tilewright.ops.runtime import replay
from tilewright.ops.runtime.program import (
    Buffer,
    Launch,
    Library,
    NotRepeatable,
    Outcome,
    SplitK,
    drive,
)
from tilewright.ops.runtime.recording import CallKeys
from tilewright.ops.runtime.replay import repeat


@dataclass
class Recorder:
    """A machine that runs no kernel and records the launches.

    launches: the values of each launch.
    made: all new memory, in order.
    """

    target: Target = SM90
    launches: list[tuple] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    slab: torch.Tensor = field(default_factory=lambda: torch.zeros(64, dtype=torch.int32))

    def perform(self, step):
        match step:
            case Buffer(shape, dtype):
                self.made.append(torch.empty(tuple(shape), dtype=dtype))
                return self.made[-1]
            case SplitK(tiles, elements):
                counters = self.slab[:tiles]
                self.slab = self.slab[tiles:]
                self.made += (torch.empty(tiles * elements), counters)
                return tuple(self.made[-2:])
            case Library(function, tensors):
                return function(*tensors)
            case Launch() if 0 not in step.grid:
                self.launches.append(step.given)
                return self.launches.append
        return None

    def maker(self, buffer):
        return partial(self.perform, buffer)


def launch(*values, grid=(1,)):
    kinds = {
        f"v{n}": "*fp32" if isinstance(v, torch.Tensor) else "i32" for n, v in enumerate(values)
    }
    spec = KernelSpec.make("test.kernel", "kernel", {}, kinds)
    return Launch(spec, grid, dict(zip(kinds, values, strict=True)))


def made_again(steps, *args, machine=None):
    """Returns (the result of a call, a function that makes the call again)."""
    machine = machine or Recorder()
    program = drive(steps, machine)
    return program.outcome.result, repeat(program, args, {}, machine)


def is_repeated(steps, *args):
    return made_again(steps, *args)[1] is not None


X = torch.ones(4)


def reading(read):
    """Makes one launch with the value that `read` computes from the call's own scratch memory."""
    out = yield Buffer((4,), torch.float32)
    own = yield Buffer((8,), torch.float32)
    yield launch(read(own), out)
    return Outcome(out, "")


def test_memory_of_unknown_content_is_not_read_again():
    assert is_repeated(reading(lambda own: X), X)
    assert is_repeated(reading(lambda own: X[2:]), X)
    assert is_repeated(reading(lambda own: own[4:]), X)
    assert not is_repeated(reading(lambda own: X.clone()), X)


def test_a_library_may_make_the_result():
    x = torch.ones(4)

    def steps():
        out = yield Library(torch.neg, (x,), Buffer.like(x))
        return Outcome(out.view(2, 2), "")

    _, again = made_again(steps(), x)
    x.mul_(3)
    assert torch.equal(again(x), torch.full((2, 2), -3.0))


def test_what_a_library_makes_is_worked_on_further():
    x = torch.ones(4)

    def steps(result):
        made = yield Library(torch.neg, (x,), Buffer.like(x))
        out = yield Buffer((4,), torch.float32)
        yield Library(copied, (made, out))
        yield Library(torch.Tensor.mul_, (out, made))
        return Outcome(result(made, out), "")

    for result in (lambda made, out: made, lambda made, out: out, lambda made, out: (out, made)):
        first, again = made_again(steps(result), x)
        x.mul_(3)
        for got, before in zip(torch.atleast_2d(again(x)), torch.atleast_2d(first), strict=True):
            assert torch.equal(got, before * torch.where(before < 0, 3, 9))


def test_a_copy_of_what_a_library_makes_is_not_made_again():
    def steps():
        out = yield Library(torch.neg, (X,), Buffer.like(X))
        return Outcome(out.clone(), "")

    assert not is_repeated(steps(), X)


def test_a_result_that_no_launch_fills_is_not_made_again():
    def steps(into_result, grid):
        out = yield Buffer((4,), torch.float32)
        yield launch(X, out if into_result else X, grid=grid)
        return Outcome(out, "")

    assert is_repeated(steps(True, (1,)), X)
    assert not is_repeated(steps(False, (1,)), X)
    assert not is_repeated(steps(True, (0, 1)), X)


def test_a_call_that_says_so_is_not_made_again():
    """A call may say that it must not be repeated. Its steps are not kept, so that their memory may
    be freed."""

    def steps():
        out = yield Buffer((4,), torch.float32)
        yield NotRepeatable("tuning may choose another kernel for the next call")
        yield launch(X, out)
        return Outcome(out, "")

    assert not is_repeated(steps(), X)
    assert drive(steps(), Recorder()).steps == ()
    kept = drive(steps(), Recorder(), keep=True)
    assert len(kept.steps) == 2
    assert repeat(kept, (X,), {}, Recorder()) is None


def copied(x, out):
    out.copy_(x)


@pytest.mark.parametrize("shared", [False, True])
def test_a_library_sees_an_argument_whose_storage_begins_elsewhere_by_then(shared):
    """An argument's storage may begin elsewhere in the repeated call: the key has only the address,
    so the argument may be at another offset of another storage."""
    memory = torch.arange(16.0)
    whole = torch.frombuffer(memory.numpy(), dtype=torch.float32)
    x, other = whole[8:12], whole[:4]
    args = (other, x) if shared else (x,)

    def steps():
        out = yield Buffer((4,), torch.float32)
        yield Library(copied, (x.as_strided((2,), (2,), 9), out[:2]))
        yield Library(copied, (x[2:], out[2:]))
        return Outcome(out, "")

    out, again = made_again(steps(), *args)
    assert torch.equal(again(*args), out)
    moved = torch.frombuffer(memory.numpy()[8:], dtype=torch.float32)[:4]
    late = (other, moved) if shared else (moved,)
    keys = CallKeys({"a": "Tensor", "b": "Tensor"})
    assert keys(args, {}) == keys(late, {})
    assert moved.storage_offset() != x.storage_offset()
    memory.add_(100)
    second = again(*late)
    assert second.tolist() == [109.0, 111.0, 110.0, 111.0]


def test_a_launch_gets_arguments_as_they_lay_and_all_else_anew():
    machine = Recorder()

    def steps():
        scratch = yield Buffer((8,), torch.float32)
        empty = yield Buffer((0,), torch.float32)
        more = yield Buffer((5,), torch.float64)
        out = yield Buffer((3,), torch.float32)
        yield launch(X, scratch[2:], empty, more, out, 7)
        return Outcome(out, "")

    first, again = made_again(steps(), X, machine=machine)
    machine.made.clear()
    out = again(X)
    result, scratch = machine.made
    assert out is result is not first
    assert scratch.nbytes == 2 * replay.ALIGNMENT
    start = scratch.data_ptr()
    own = [start + 8, 0, start + replay.ALIGNMENT, result.data_ptr()]
    assert machine.launches[1] == [X.data_ptr(), *own, 7]


def test_what_fills_no_result_may_have_scratch_memory():
    machine = Recorder()

    def steps():
        own = yield Buffer((2,), torch.float32)
        yield launch(X, own)
        return Outcome(None, "")

    _, again = made_again(steps(), X, machine=machine)
    assert again(X) is None
    assert machine.launches[1] == [X.data_ptr(), machine.made[-1].data_ptr()]


def test_split_k_scratch_is_asked_for_at_each_launch():
    """Counters of split-K are requested at each launch. In a captured graph, each launch must have
    its own."""
    machine = Recorder()

    def steps():
        parts = []
        for size in (2, 0, 3):
            parts.append((yield Buffer((size,), torch.float32)))
        for part in parts[::2]:
            workspace, counters = yield SplitK(2, 5)
            yield launch(X, workspace, counters, part)
        return Outcome(tuple(parts), "")

    first, again = made_again(steps(), X, machine=machine)
    machine.made.clear()
    result = again(X)
    assert [t.shape for t in result] == [t.shape for t in first]
    taken = [t for t in machine.made if not any(t is out for out in result)]
    assert [t.numel() for t in taken] == [10, 2, 10, 2]
    for values, split, part in zip(
        machine.launches[2:], (taken[:2], taken[2:]), result[::2], strict=True
    ):
        assert values == [t.data_ptr() for t in (X, *split, part)]
    assert len({values[2] for values in machine.launches[2:]}) == 2


@pytest.mark.parametrize(
    ("size", "seen"),
    [((4, 4), torch.t), ((8,), lambda t: t[4:]), ((8,), lambda t: t[:4])],
    ids=["transposed", "from the middle", "a part"],
)
def test_a_result_unlike_a_new_one_is_not_made_again(size, seen):
    def steps(see):
        out = yield Buffer(size, torch.float32)
        yield launch(X, out)
        return Outcome(see(out), "")

    assert is_repeated(steps(lambda out: out), X)
    assert not is_repeated(steps(seen), X)


def test_each_result_must_be_filled():
    def steps(filled):
        one = yield Buffer((4,), torch.float32)
        other = yield Buffer((4,), torch.float32)
        for out in (one, other)[:filled]:
            yield launch(X, out)
        return Outcome((one, other), "")

    assert not is_repeated(steps(1), X)
    assert is_repeated(steps(2), X)


def test_what_makes_a_call_again_holds_no_tensor():
    watched = []

    def steps(x):
        own = yield Buffer((8,), torch.float32)
        out = yield Buffer((4,), torch.float32)
        yield Library(copied, (x, own[:4]))
        yield launch(own, x[2:], out)
        watched.extend(weakref.ref(tensor) for tensor in (x, out, own))
        return Outcome(out, "")

    class Forgetful(Recorder):
        """An interpreter that keeps no memory."""

        def perform(self, step):
            answer = super().perform(step)
            self.made.clear()
            self.launches.clear()
            return answer

    x = torch.ones(4)
    again = made_again(steps(x), x, machine=Forgetful())[1]
    assert again is not None
    del x
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_the_key_tells_devices_apart():
    """The key distinguishes devices. Memory that one GPU freed may have the same address as memory
    on another GPU."""
    x, other = torch.empty(0), torch.empty(0, device="meta")
    assert x.data_ptr() == other.data_ptr()
    keys = CallKeys({"x": "Tensor"})
    assert keys((x,), {}) != keys((other,), {})


class Compiled:
    """Stands for a compiled kernel, and logs the values of its launches."""

    metadata = SimpleNamespace(global_scratch_size=0)

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *values: self.log.append((grid, values))


def test_what_a_gpu_launched_it_launches_again(monkeypatch):
    """A repeated call launches what the GPU launched before. Only the compiled kernel and the CUDA
    runtime are replaced."""
    log = []
    cuda = {
        "current_device": lambda: 0,
        "device": lambda index: nullcontext(),
        "current_stream": lambda index: SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": lambda: False,
    }
    state = {"compiled_kernel": lambda spec, index: Compiled(log), "_counters": {}}
    state |= {"_slabs": {0: torch.zeros(4096, dtype=torch.int32)}, "_ENOUGH_COUNTERS": 0}
    stand_ins = [(torch.cuda, cuda), (kernel_launch, state)]
    for module, name, value in [(m, n, v) for m, named in stand_ins for n, v in named.items()]:
        monkeypatch.setattr(module, name, value)

    def steps():
        out = yield Buffer((4,), torch.float32)
        workspace, counters = yield SplitK(3, 2)
        yield launch(X, workspace, counters, out, 5, grid=(7,))
        yield launch(X, out, grid=(0, 2))
        return Outcome(out, "")

    first, again = made_again(steps(), X, machine=kernel_launch.machine_of(X.device))
    result = again(X)
    (grid, given), (same, addresses) = log
    assert grid == same == (7, 1, 1)
    assert [v.data_ptr() for v in given[:4:2]] == list(addresses[:4:2])
    assert given[4] == addresses[4] == 5
    assert addresses[3] == result.data_ptr() != first.data_ptr()


def test_counters_that_captured_launches_have_stay_theirs(monkeypatch):
    """Counters of captured launches are never given to other launches. A graph may be replayed
    after the slab is used up, and it holds no tensor of the slab."""
    state = {"_slabs": {}, "_every_slab": [], "apart": lambda make: make()}
    state["_new_slab"] = lambda count, index: torch.zeros(64, dtype=torch.int32)
    for name, value in state.items():
        monkeypatch.setattr(kernel_launch, name, value)
    places = {kernel_launch._taken(32, 0).data_ptr() for _ in range(6)}  # the tensors are not kept
    assert len(places) == 6
    assert len(state["_every_slab"]) == 3
