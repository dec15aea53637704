"""Continuous batching by tilewright on a GPU: CUDA graphs, two batches at once, streams, threads.

The same tests run with one model on a CPU, without graphs; `test_engine.py` tests other models
there. On a CPU the model has float32, and each token must be the best one. On a GPU it has
bfloat16, whose rounding may choose another of two nearly equal tokens; then the tokens are judged
by the scores of the same weights in float32: none may be far from the best, and on average they may
be at most about twice as far from it as those of transformers' own engine.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

from transformers import ContinuousBatchingConfig

from tests.compiler.engine_models import (
    ENGINE,
    NEW,
    WIDE,
    greedy,
    made,
    prompts,
)
from tilewright.compiler import reports
from tilewright.compiler.serving import BatchingConfig, disable, enable

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
MODELS = ("Llama", "Qwen3Moe", "Gemma3", "GptOss", "DeepseekV3")
SERVED = [("Llama", "cpu"), *(pytest.param((name, "cuda"), marks=GPU) for name in MODELS)]


@dataclass
class Served:
    """A model on a device, and the same weights in float32."""

    name: str
    device: str
    model: Any
    exact: Any

    def settings(self, compiled: bool = False, **changed: Any) -> BatchingConfig:
        config = BatchingConfig(**ENGINE | changed)
        if not compiled:
            config.varlen_compile_config = config.decode_compile_config = None
        return config

    def distances(self, ids: list[int], tokens: list[int]) -> torch.Tensor:
        """Returns how far the score of each token is below the best score, in standard deviations
        of the scores."""
        given = torch.tensor([ids + tokens], device=self.device)
        scores = self.exact(given).logits[0, len(ids) - 1 : -1].float()
        chosen = scores.gather(1, torch.tensor(tokens, device=self.device)[:, None])[:, 0]
        return (scores.amax(1) - chosen) / scores.std()


@pytest.fixture(scope="module", params=SERVED, ids=lambda pair: "-".join(pair))
def served(request: Any) -> Iterator[Served]:
    """Returns an enabled model. Dynamo forgets its graphs after its last test."""
    name, device = request.param
    torch._dynamo.reset()
    exact = made(name, WIDE).to(torch.bfloat16).float().to(device)
    model = copy.deepcopy(exact)
    if device == "cuda":
        model.to(torch.bfloat16)
    assert enable(model)
    with torch.no_grad():
        yield Served(name, device, model, exact)
    disable(model)
    torch._dynamo.reset()


def answers(results: dict[str, Any]) -> list[list[int]]:
    assert {result.error for result in results.values()} == {None}
    return [result.generated_tokens for result in results.values()]


def check(served: Served, given: list[list[int]], found: list[list[int]], new: int = NEW) -> float:
    """Checks that each token is the best one, apart from rounding. Returns the mean distance."""
    assert [len(tokens) for tokens in found] == [new] * len(given)
    far = torch.cat([served.distances(*pair) for pair in zip(given, found, strict=True)])
    if served.device == "cpu":
        assert far.max() < 1e-4
    else:
        assert (far == 0).float().mean() >= 0.9
        # A different choice of experts changes everything after it.
        assert (far > 0.5).float().mean() <= (0.0 if served.name in ("Llama", "Gemma3") else 0.05)
    return far.mean().item()


def test_tokens_are_those_of_float32(served):
    """Tests prompts in several steps, mixed steps and shared prefixes. On a GPU the steps are
    compiled."""
    compiled = served.device == "cuda"
    before = len(reports())
    with served.model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=served.settings(compiled)
    ) as manager:
        config = manager.continuous_batching_config
        assert config.use_async_batching == compiled
        assert config.use_cuda_graph == (compiled, compiled)
        warm = len(reports())
        ours = taken(manager, prompts(), NEW)
        again = taken(manager, prompts(), NEW)
        pairs = getattr(manager.batch_processor.inputs_and_outputs, "io_pairs", ())
        graphs = [pair.device_io.graphs._storage for pair in pairs]
    mean = check(served, prompts(), ours)
    check(served, prompts(), again)
    if not compiled:
        return
    assert len(graphs) == 2
    assert min(map(len, graphs)) >= 4
    assert (warm > before, len(reports())) == (True, warm)  # nothing is compiled after the warm-up
    if served.name == "DeepseekV3":  # transformers' own engine cannot run it
        return
    disable(served.model)
    theirs = served.model.generate_batch(
        prompts(), generation_config=greedy(), warmup=False,
        continuous_batching_config=ContinuousBatchingConfig(
            **ENGINE | {"max_blocks_per_request": 0}, auto_switch_to_flash=False
        ),
    )  # fmt: skip
    assert enable(served.model)
    assert mean <= 2 * check(served, prompts(), answers(theirs)) + 0.01


def taken(manager: Any, given: list[list[int]], new: int) -> list[list[int]]:
    """Adds requests to a manager, and returns their tokens."""
    names = manager.add_requests(given, max_new_tokens=new)
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=60)
        assert result is not None
        assert result.error is None
        if result.request_id in names and result.is_finished():
            found[result.request_id] = result.generated_tokens
    return [found[name] for name in names]


def test_forks_are_those_of_one_request(served):
    given, how = prompts((20, 33)), greedy()
    how.num_return_sequences = 3
    results = served.model.generate_batch(
        given, generation_config=how, continuous_batching_config=served.settings(), warmup=False
    )
    check(served, [ids for ids in given for _ in range(3)], answers(results))


def test_out_of_pages_requests_come_back(served):
    """The requests need more pages than there are. Some are computed again or copied back."""
    lengths, new = (90, 100, 95, 80, 100), 60
    for space in (0.0, 0.01) if served.device == "cuda" else (0.0,):
        results = served.model.generate_batch(
            prompts(lengths), generation_config=greedy(max_new_tokens=new), warmup=False,
            continuous_batching_config=served.settings(cpu_offload_space=space, safety_margin=0.0),
        )  # fmt: skip
        check(served, prompts(lengths), answers(results), new)


def test_memory_stays_the_same_over_many_requests(served):
    free, used = [], []
    with served.model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=served.settings()
    ) as manager:
        for turn in range(6):
            given = prompts((30, 25 + turn, 17, 60 - turn))
            check(served, given, taken(manager, given, 6), 6)
            cache = manager.batch_processor.cache
            cache.evict_cached_blocks()
            cache.pool.try_to_free_sectors()
            free.append(cache.compute_free_capacity())
            gc.collect()
            if served.device == "cuda":
                torch.cuda.synchronize()
                used.append(torch.cuda.memory_allocated())
    assert free == [1.0] * 6
    # In the first rounds, graphs for their sizes are captured.
    assert max(used[3:], default=0) <= min(used[2:3], default=0) + 2**20


def test_a_cancelled_request_leaves_the_others_alone(served):
    given = prompts()
    with served.model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=served.settings()
    ) as manager:
        first = manager.add_request(given[4], max_new_tokens=400, streaming=True)
        assert manager.get_result(timeout=60) is not None
        manager.cancel_request(first)
        found = taken(manager, given[5:8], NEW)
        assert first not in manager.batch_processor.scheduler.active_requests
    check(served, given[5:8], found)


def test_stopped_in_the_middle_it_starts_again(served):
    given = prompts()
    manager = served.model.init_continuous_batching(greedy(), served.settings())
    manager.start()
    manager.add_requests(given[:5], max_new_tokens=300, streaming=True)
    assert manager.get_result(timeout=60) is not None
    manager.stop(hard_stop=True)
    assert not manager.is_running()
    results = served.model.generate_batch(
        given, generation_config=greedy(), continuous_batching_config=served.settings()
    )
    check(served, given, answers(results))


def test_after_an_exception_in_a_processor_the_next_batch_is_right(served, monkeypatch):
    """On a GPU, the second call of a step is captured, so an exception may come within a
    capture."""
    calls = []

    class Failing(torch.nn.Module):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            calls.append(scores.shape)
            if len(calls) == 2:
                raise RuntimeError("a processor's own")
            return scores

    kind = type(served.model)
    original = kind._get_logits_processor
    monkeypatch.setattr(
        kind, "_get_logits_processor", lambda self, config: [*original(self, config), Failing()]
    )
    failed = served.model.generate_batch(
        prompts(), generation_config=greedy(), warmup=False,
        continuous_batching_config=served.settings(),
    )  # fmt: skip
    errors = {result.error for result in failed.values()}
    # The end of a failed capture may raise another error.
    assert errors == {"a processor's own"} or (served.device == "cuda" and None not in errors)
    monkeypatch.undo()
    results = served.model.generate_batch(
        prompts(), generation_config=greedy(), continuous_batching_config=served.settings()
    )
    check(served, prompts(), answers(results))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_float32_runs_as_transformers_runs_it(caplog):
    """No attention kernel supports float32, and a capture cannot record the reference."""
    model = made("Llama", WIDE)
    assert enable(model)  # on the CPU
    model.cuda()
    results = model.generate_batch(
        prompts(), generation_config=greedy(), warmup=False,
        continuous_batching_config=ContinuousBatchingConfig(
            **ENGINE | {"max_blocks_per_request": 0}, auto_switch_to_flash=False
        ),
    )  # fmt: skip
    check(Served("Llama", "cuda", model, model), prompts(), answers(results))
    assert "no kernel for torch.float32" in caplog.text
    disable(model)
    assert not enable(model)
