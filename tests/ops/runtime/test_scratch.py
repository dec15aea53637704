"""Tests counters that launches keep across calls: in CUDA graphs, memory pools, streams and
threads.

An engine warms up a step on a separate stream and in a memory pool, and captures it once for each
of two sets of buffers. It replays the two graphs in turn. All this happens in a thread that is not
the main thread.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.mlp.linear_residual import OP
from tilewright.ops.mlp.lowering import linear_residual_steps
from tilewright.ops.runtime import launch
from tilewright.ops.runtime.program import Planner, SplitK, drive

CPU = torch.device("cpu")
SLAB = 4096


@dataclass
class Cuda:
    """Stands for the CUDA runtime: the current device, stream and pool of each thread. `captured`
    has the streams that are captured, each as (device, stream)."""

    captured: set[tuple[int, int]] = field(default_factory=set)
    made_in: list[object] = field(default_factory=list)
    own: threading.local = field(default_factory=threading.local)

    def current_device(self) -> int:
        return getattr(self.own, "device", 0)

    @contextmanager
    def device(self, index):
        before, self.own.device = self.current_device(), index
        yield
        self.own.device = before

    def current_stream(self, index=None):
        index = self.current_device() if index is None else index
        return Stream(getattr(self.own, "streams", {}).get(index, 0))

    def use(self, stream: int, device: int = 0) -> None:
        self.own.streams = getattr(self.own, "streams", {}) | {device: stream}

    def is_current_stream_capturing(self) -> bool:
        device = self.current_device()
        return (device, self.current_stream(device).cuda_stream) in self.captured

    def new_slab(self, count: int, index: int) -> torch.Tensor:
        assert not self.captured, "a slab is made while a stream is captured"
        self.made_in.append(getattr(self.own, "pool", None))
        return torch.zeros(count, dtype=torch.int32)


@dataclass
class Stream:
    cuda_stream: int


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    for name in ("current_device", "device", "current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    state = {"_counters": {}, "_slabs": {}, "_every_slab": [], "_new_slab": found.new_slab}
    state |= {"_SLAB_COUNTERS": SLAB, "_ENOUGH_COUNTERS": SLAB // 2, "_STREAM_COUNTERS": 64}
    # Stands for memory of a graph's own pool, which the graph zeroes in each replay.
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch, "empty", lambda *n, device=None, **o: empty(*n, **o))
    monkeypatch.setattr(torch, "zeros", lambda *n, device=None, **o: zeros(*n, **o))
    for name, value in state.items():
        monkeypatch.setattr(launch, name, value)
    return found


def counters(tiles, device=CPU):
    return launch._split_k_scratch(tiles, 4, device)[1]


def lines(tensor):
    """Returns the cache lines that contain the counters, as (memory, line)."""
    start = tensor.untyped_storage().data_ptr()
    first = tensor.data_ptr() - start
    return {(start, (first + 4 * n) // 128) for n in range(tensor.numel())}


def are_apart(tensors):
    """Whether no two of the tensors share a cache line."""
    found = [lines(tensor) for tensor in tensors]
    return len(set().union(*found)) == sum(map(len, found))


def in_slabs(tensor):
    slabs = [s.untyped_storage().data_ptr() for s in launch._every_slab]
    return tensor.untyped_storage().data_ptr() in slabs


def test_a_stream_keeps_its_counters_and_captured_launches_have_their_own(cuda):
    eager = counters(20)
    assert counters(20).data_ptr() == eager.data_ptr()
    cuda.captured.add((0, 0))
    captured = [counters(20) for _ in range(4)]
    cuda.captured.clear()
    cuda.use(7)
    other = counters(20)
    assert are_apart([eager, other, *captured])
    assert all(map(in_slabs, (eager, other, *captured)))


def test_a_slab_is_not_of_the_pool_in_which_a_step_is_warmed_up(cuda):
    """A slab is not allocated in the pool in which a step is warmed up. The pool may be freed, and
    with it everything that the caller's thread allocated."""
    cuda.own.pool = "the caller's"
    counters(20)
    assert cuda.made_in == [None]


def test_a_warm_up_leaves_enough_for_the_captures_behind_it(cuda):
    """A warm-up leaves enough counters for the captures after it. Two graphs have many launches
    each, and each is warmed up first. Their replays zero no counters."""
    taken = []
    for _ in range(4):
        counters(20)  # the warm-up
        cuda.captured.add((0, 0))
        taken += [counters(20) for _ in range(SLAB // 2 // 32)]
        cuda.captured.clear()
    assert all(map(in_slabs, taken))
    assert are_apart(taken)


def test_a_capture_that_finds_no_slab_zeroes_counters_of_its_own(cuda):
    """If a capture finds no slab, it zeroes counters of its own. In a capture, nothing may be
    allocated or waited for: `new_slab` would fail the test."""
    cuda.captured.add((0, 0))
    one, other = counters(20), counters(20)
    assert are_apart([one, other])
    assert not launch._every_slab
    cuda.captured.clear()
    counters(20)
    cuda.captured.add((0, 0))
    many = [counters(32) for _ in range(2 * SLAB // 32)]
    assert {in_slabs(t) for t in many} == {True, False}
    assert are_apart(many)


def test_the_capture_is_asked_of_the_call_s_own_device(cuda):
    """The stream of the call's own device decides whether a capture is under way. The current
    device may be another one."""
    other = torch.device("cuda", 1)
    first = counters(20, other)
    cuda.captured.add((1, 0))
    assert counters(20, other).data_ptr() != first.data_ptr()
    cuda.captured.clear()
    cuda.captured.add((0, 0))
    again = counters(20, other)
    assert again.data_ptr() == first.data_ptr()
    assert cuda.current_device() == 0


def test_threads_on_streams_of_their_own_share_no_counters(cuda):
    """Threads on separate streams share no counters. They ask at the same time, and none of them is
    the main thread."""
    count = 24
    ready = threading.Barrier(count)

    def ask(stream):
        cuda.use(stream)
        ready.wait()
        return [counters(20) for _ in range(3)]

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(ask, range(count)))
    assert are_apart([first for first, *_ in found])
    assert all({t.data_ptr() for t in own} == {own[0].data_ptr()} for own in found)


# --- on a GPU -------------------------------------------------------------------------------------

T, K, N, LAYERS = 2, 4096, 512, 6  # K is split, because there are few columns


def layers():
    generator = torch.Generator("cuda").manual_seed(0)
    shape = {"device": "cuda", "generator": generator, "dtype": torch.bfloat16}
    return [
        (torch.randn(N, K, **shape) / 64, torch.randn(K, N, **shape) / 23) for _ in range(LAYERS)
    ]


def step(weights, x):
    """Computes a chain of linears. Each reads the result of the linear before it."""
    op = torch.ops.tilewright.linear_residual
    for down, up in weights:
        inner = op(x, down, torch.zeros(T, N, device="cuda", dtype=x.dtype))
        x = op(inner, up, x)
    return x


@pytest.mark.parametrize("target", [SM90, SM100], ids=lambda target: target.name)
def test_linears_of_the_step_below_split_their_sums(target):
    """Checks that the linears of the step below split their sums. Sums that are not split use no
    counters, so the tests on a GPU would not reach them."""
    shapes = (T, K), (N, K), (T, N)
    given = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    steps = linear_residual_steps(OP.arguments(*given), target)
    program = drive(steps, Planner(target), keep=True)
    assert any(isinstance(step, SplitK) for step, _ in program.steps)


def replay_pairs(rounds):
    """Replays two graphs in turn on one stream. Each graph has its own set of buffers, and both use
    one pool. Returns how often a result differed from the result of the call without a graph."""
    weights = layers()
    generator = torch.Generator("cuda").manual_seed(1)
    given = [torch.randn(T, K, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    right = [step(weights, x).clone() for x in given]
    stream, pool = torch.cuda.Stream(), torch.cuda.MemPool()
    pairs = []
    for _ in range(2):
        x = torch.zeros(T, K, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            step(weights, x)  # the warm-up
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        mode = {"capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, stream=stream, pool=pool.id, **mode):
            out = step(weights, x)
        pairs.append((x, graph, out))
    wrong = 0
    for turn in range(rounds):
        x, graph, out = pairs[turn % 2]
        with torch.cuda.stream(stream):
            x.copy_(given[turn % 4])
            graph.replay()
            wrong += not torch.equal(out, right[turn % 4])
        if turn % 5 == 0:  # calls without a graph in between, on another stream
            wrong += not torch.equal(step(weights, given[0]), right[0])
    return wrong


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


@pytest.mark.gpu
@needs_gpu
def test_two_pairs_of_buffers_replayed_in_turn_give_what_calls_do():
    with torch.no_grad():
        assert replay_pairs(60) == 0


@pytest.mark.gpu
@needs_gpu
def test_a_thread_that_is_not_the_main_one_captures_and_replays():
    def run():
        with torch.no_grad():
            return replay_pairs(20)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == 0
