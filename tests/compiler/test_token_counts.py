"""Tests that one compiled model serves any number of tokens, also in CUDA graphs, and never waits
for the GPU.

The model is a small Llama with a paged cache. Without a GPU, the tests cover only recompilation and
the facts that Inductor gets.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

from tests.found import matches_of
from tilewright.codegen.qkv.candidates import candidates
from tilewright.codegen.qkv.plan import fused_choice
from tilewright.compiler import backend, reports
from tilewright.ops.qkv import lowering
from tilewright.ops.runtime import launch as kernel_launch
from tilewright.ops.runtime.program import SplitK

K, HQ, HKV, D, LAYERS = 2048, 4, 1, 128, 2
PAGES, PAGE, CONTEXT = 64, 16, 512
COUNTS = (1, 3, 16, 70, 300)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
CPU_OR_GPU = [
    pytest.param(("cpu", torch.float32, "eager"), id="cpu"),
    pytest.param(("cuda", torch.bfloat16, "inductor"), id="gpu", marks=GPU),
]


@pytest.fixture(autouse=True)
def no_counts(fresh_dynamo):
    counters.clear()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Llama(nn.Module):
    """A small Llama for x [T, K] of one sequence. context [CONTEXT] is the slot of every
    position."""

    def __init__(self, device, dtype):
        super().__init__()
        heads = {"q": HQ, "k": HKV, "v": HKV}
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {n: nn.Linear(K, h * D, bias=False) for n, h in heads.items()}
                | {"o": nn.Linear(HQ * D, K, bias=False)}
            )
            for _ in range(LAYERS)
        )
        self.to(device, dtype).requires_grad_(False)

    def forward(self, x, positions, slots, context, cos, sin, *caches):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        seen = torch.arange(CONTEXT, device=x.device) <= positions.unsqueeze(1)
        for layer, keys, values in zip(self.layers, caches[::2], caches[1::2], strict=True):
            q, k, v = (layer[n](x).view(x.shape[0], -1, D) for n in "qkv")
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            keys.view(-1, HKV, D)[slots] = k
            values.view(-1, HKV, D)[slots] = v
            past, what = (c.view(-1, HKV, D)[context, 0] for c in (keys, values))
            scores = (q @ past.t()).float() * D**-0.5
            weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1).to(x.dtype)
            x = x + layer["o"]((weights @ what).flatten(1))
        return x


class Session:
    """A model and its caches. It processes the requested number of tokens at a time."""

    def __init__(self, device, dtype, seed=0):
        torch.manual_seed(seed)
        self.device, self.dtype = device, dtype
        self.context = torch.randperm(PAGES * PAGE)[:CONTEXT].to(device)
        angles = torch.arange(CONTEXT)[:, None] * 0.01 ** torch.linspace(0, 1, D // 2)
        self.tables = [t.repeat(1, 2).to(device, dtype) for t in (angles.cos(), angles.sin())]
        self.tokens = (torch.randn(CONTEXT, K) * 0.5).to(device, dtype)

    def caches(self):
        shape = (PAGES, PAGE, HKV, D)
        numbers = torch.Generator().manual_seed(1)
        made = (torch.randn(shape, generator=numbers) for _ in range(2 * LAYERS))
        return [t.to(self.device, self.dtype) for t in made]

    def step(self, first, count):
        positions = torch.arange(first, first + count, device=self.device)
        cos, sin = (table[positions] for table in self.tables)
        return self.tokens[positions], positions, self.context[positions], self.context, cos, sin


def assert_near(actual, expected, dtype):
    """Compares bf16 results in the norm, because they differ by rounding."""
    assert actual.isfinite().all()
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert (actual.double() - expected.double()).norm() < limit * expected.double().norm()


def assert_caches_near(ours, eager, untouched, dtype):
    for a, b, before in zip(ours, eager, untouched, strict=True):
        assert_near(a, b, dtype)
        same = (b == before).flatten(2).all(-1)
        assert torch.equal(a[same], before[same])  # slots that are not written keep their bits
        assert not same.all()


@pytest.mark.parametrize("where", CPU_OR_GPU)
def test_any_token_count_after_two_compilations(where):
    device, dtype, inner = where
    model, session = Llama(device, dtype), Session(device, dtype)
    run = torch.compile(model, backend="tilewright", options={"inner": inner})
    eager, ours, untouched = (session.caches() for _ in range(3))
    first = 0
    for number, count in enumerate((*COUNTS, 1, 70)):
        step = session.step(first, count)
        assert_near(run(*step, *ours), model(*step, *eager), dtype)
        assert len(reports()) == min(number + 1, 2), f"{count} tokens compiled anew"
        first += count
    assert_caches_near(ours, eager, untouched, dtype)
    assert [len(matches_of(r, "qkv")) for r in reports()] == [LAYERS, LAYERS]


def static_inputs(compile_):
    """Returns the positions of the inputs that Inductor is told are static, and its graph as
    text."""

    found = []

    def inner(gm, inputs, **kwargs):
        found.append((list(kwargs["static_input_idxs"]), str(gm.graph)))
        raise NotImplementedError("seen enough")

    torch._dynamo.reset()
    device, dtype = "cpu", torch.float32
    model, session = Llama(device, dtype), Session(device, dtype)
    caches = session.caches()
    for cache in caches:
        torch._dynamo.mark_static_address(cache)
    run = compile_(model, partial(compile_fx.compile_fx, inner_compile=inner))
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        pytest.raises(BackendCompilerFailed, match="seen enough"),
    ):
        run(*session.step(0, 16), *caches)
    (seen,) = found
    return seen


def test_weights_and_marked_caches_stay_where_they_are(monkeypatch):
    """Weights and marked caches are static inputs. Otherwise Inductor's CUDA graphs would copy the
    weights at each step, and refuse the caches."""

    def stock(model, compiler):
        return torch.compile(model, backend=lambda gm, inputs: compiler(gm, inputs))

    def ours(model, compiler):
        monkeypatch.setattr(backend._compat, "compile_fx", compiler)
        return torch.compile(model, backend="tilewright", options={"strict": True})

    expected, _ = static_inputs(stock)
    assert len(expected) == 4 * LAYERS + 2 * LAYERS
    found, graph = static_inputs(ours)
    assert found == expected
    assert graph.count("tilewright.fused_qkv_paged") == LAYERS


@pytest.fixture
def gpu():
    """Returns the model and the session on the GPU, and the compiled model."""
    model, session = Llama("cuda", torch.bfloat16), Session("cuda", torch.bfloat16)
    return model, session, torch.compile(model, backend="tilewright")


def captured(run, buffers, caches):
    """Returns a CUDA graph of one step over `buffers`, and its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*buffers, *caches)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(*buffers, *caches)
    return graph, output


def fill(buffers, step):
    for buffer, value in zip(buffers, step, strict=True):
        buffer.copy_(value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
class TestGraphs:
    @pytest.fixture(autouse=True)
    def split_k(self, monkeypatch):
        """Makes few tokens take split-K kernels, whatever the plan says."""
        planned = lowering.planned_lowering

        def chosen(call, target):
            tokens = call.a.x.shape[0]
            configs = candidates(call.problem, tokens, target)
            split = [c for c in configs if getattr(c, "split_k", 1) > 1]
            assert split or tokens > 128
            if not split:
                return planned(call, target)
            return fused_choice(call.problem, split[0], 0.0)

        monkeypatch.setattr(lowering, "planned_lowering", chosen)

    @pytest.mark.parametrize("count", [1, 16, 70])
    def test_a_captured_step_writes_where_the_buffers_say_at_replay(self, gpu, count):
        model, session, run = gpu
        eager, ours, untouched = (session.caches() for _ in range(3))
        buffers = [t.clone() for t in session.step(0, count)]
        graph, output = captured(run, buffers, ours)
        for cache, kept in zip(ours, untouched, strict=True):
            cache.copy_(kept)  # undoes the writes of the warm-up
        for number in range(4):
            step = session.step(number * count, count)
            fill(buffers, step)
            graph.replay()
            assert_near(output, model(*step, *eager), torch.bfloat16)
        assert_caches_near(ours, eager, untouched, torch.bfloat16)

    def test_two_graphs_of_one_model_may_run_side_by_side(self, gpu):
        model, session, run = gpu
        steps = [session.step(0, 16), session.step(100, 16)]
        caches = [session.caches() for _ in steps]
        expected = [model(*step, *session.caches()) for step in steps]
        pairs = [captured(run, s, c) for s, c in zip(steps, caches, strict=True)]
        streams = [torch.cuda.Stream() for _ in pairs]
        torch.cuda.synchronize()
        for _ in range(30):
            for (graph, _), stream in zip(pairs, streams, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(5):
                        graph.replay()
            torch.cuda.synchronize()
            for (_, output), right in zip(pairs, expected, strict=True):
                assert_near(output, right, torch.bfloat16)
                output.fill_(torch.nan)
            torch.cuda.synchronize()

    def test_captured_launches_share_no_counters(self):
        device = torch.device("cuda", torch.cuda.current_device())
        machine, split = kernel_launch.machine_of(device), SplitK(48, 16)
        taken = [machine.perform(split)[1]]
        for _ in range(2):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                taken += [machine.perform(split)[1] for _ in range(2)]
        places = sorted(t.data_ptr() for t in taken)
        assert all(b - a >= 48 * 4 for a, b in pairwise(places))
        assert all(int(t.sum()) == 0 for t in taken)

    def test_inductors_own_cuda_graphs(self, gpu):
        model, session, _ = gpu
        # The warm-up makes the slabs and counters again, in the memory pool of the graph or outside
        # of it.
        kernel_launch._slabs.clear()
        kernel_launch._counters.clear()
        run = torch.compile(
            model,
            backend="tilewright",
            dynamic=False,
            options={"inner_options": {"triton.cudagraphs": True}},
        )
        eager, ours, untouched = (session.caches() for _ in range(3))
        for cache in ours:
            torch._dynamo.mark_static_address(cache)
        first = 0
        for count in (1, 1, 1, 16, 16, 1, 16, 1):
            step = session.step(first, count)
            torch.compiler.cudagraph_mark_step_begin()
            output = run(*step, *ours).clone()
            assert_near(output, model(*step, *eager), torch.bfloat16)
            first += count
        assert_caches_near(ours, eager, untouched, torch.bfloat16)
        assert counters["inductor"]["cudagraph_skips"] == 0
        manager = torch._inductor.cudagraph_trees.get_container(0).tree_manager
        assert manager is not None
        assert len(list(manager.get_roots())) > 0

    @pytest.mark.parametrize("count", COUNTS)
    def test_a_warm_step_never_waits_for_the_gpu(self, gpu, count):
        _, session, run = gpu
        step, caches = session.step(0, count), session.caches()
        run(*step, *caches)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                run(*step, *caches)
            with pytest.raises(RuntimeError, match="synchroniz"):
                step[0].sum().item()  # in this mode, any wait for the GPU raises an error
        finally:
            torch.cuda.set_sync_debug_mode("default")
