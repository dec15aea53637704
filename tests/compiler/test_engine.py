"""Tests continuous batching with tilewright: for all kinds of requests, the tokens equal those of
`generate()`.

Most tests run steps without a compiler, since they test the memory and the plan of a step. Padded
steps have the shapes of compiled steps.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as memory
from transformers.generation.continuous_batching import offloading_manager

from tests.compiler.engine_models import (
    MODELS,
    NEW,
    PAGE,
    SMALL,
    WINDOW,
    built,
    generated,
    greedy,
    plain,
    prompts,
)
from tests.compiler.engine_steps import Replayed, Steps, batch, tokens
from tilewright.compiler.serving import BatchingConfig, paged_attention

pytestmark = pytest.mark.usefixtures("heap_before")


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate(enabled, monkeypatch, name):
    steps = Steps(monkeypatch)
    assert batch(enabled(name), plain()) == generated(name)
    assert min(steps.decode, steps.varlen, steps.prompts_alone) > 0


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss", "Mistral", "DeepseekV3"])
def test_so_are_those_of_padded_steps(enabled, padded, monkeypatch, name):
    steps = Steps(monkeypatch)
    assert batch(enabled(name), BatchingConfig(**SMALL), warmup=True) == generated(name)
    assert min(steps.decode, steps.varlen) > 0


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mistral", "DeepseekV3"])
def test_two_steps_at_once_have_the_same_tokens(enabled, two_at_once, monkeypatch, name):
    steps = Steps(monkeypatch)
    config = plain(use_async_batching=True)
    assert batch(enabled(name), config) == generated(name)
    assert min(steps.decode, steps.varlen) > 0
    config = plain(use_async_batching=True, num_blocks=8 if name == "DeepseekV3" else 22)
    assert batch(built(name), config, max_new_tokens=20) == generated(name, new=20)


@pytest.mark.parametrize("as_compiled", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mistral", "DeepseekV3"])
def test_replayed_steps_have_the_same_tokens(enabled, replayed, monkeypatch, name, as_compiled):
    monkeypatch.setattr(paged_attention, "is_compiling", lambda: as_compiled)
    assert batch(enabled(name), plain()) == generated(name)  # graphs, and two steps at once
    assert Replayed.count > 10


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_forks_and_log_probabilities_are_those_of_transformers(enabled, name):
    model = built(name)
    lengths, how = (20, 33), greedy()
    how.num_return_sequences = 3  # the constructor refuses this for greedy search
    theirs = model.generate_batch(
        prompts(lengths), generation_config=how, warmup=False,
        continuous_batching_config=ContinuousBatchingConfig(
            **{**SMALL, "max_blocks_per_request": 0}, return_logprobs=True
        ),
    )  # fmt: skip
    ours = enabled(name).generate_batch(
        prompts(lengths), generation_config=how, warmup=False,
        continuous_batching_config=plain(return_logprobs=True),
    )  # fmt: skip
    assert tokens(ours) == tokens(theirs) == [t for t in generated(name, lengths) for _ in range(3)]
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=1e-4
        )


def test_forks_of_latents_are_copied(enabled):
    lengths, how = (20, 33), greedy()
    how.num_return_sequences = 3
    found = enabled("DeepseekV3").generate_batch(
        prompts(lengths), generation_config=how, continuous_batching_config=plain(), warmup=False
    )
    assert tokens(found) == [t for t in generated("DeepseekV3", lengths) for _ in range(3)]


@pytest.mark.parametrize("space", [0.0, 0.01], ids=["again", "to-the-host"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "DeepseekV3"])
def test_requests_that_are_put_off_come_back(enabled, monkeypatch, name, space):
    put_off = []
    original = memory.PagedAttentionCache.evict_cached_blocks
    monkeypatch.setattr(
        memory.PagedAttentionCache,
        "evict_cached_blocks",
        lambda self: put_off.append(self) or original(self),
    )
    # The engine pins the host's memory for the device, which is not possible on a CPU.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **how: empty(*a, **how))
    copied = []
    restore = offloading_manager.OffloadingManager._offload_to_cpu
    monkeypatch.setattr(
        offloading_manager.OffloadingManager,
        "_offload_to_cpu",
        lambda self, *a: copied.append(restore(self, *a)) or copied[-1],
    )
    config = plain(
        num_blocks=8 if name == "DeepseekV3" else 22, cpu_offload_space=space, safety_margin=0.0
    )
    lengths = (30, 40, 25, 30, 20)
    found = batch(enabled(name), config, lengths=lengths, max_new_tokens=25)
    assert found == generated(name, lengths, 25)
    assert put_off
    assert copied
    assert any(copied) == (space > 0)


def test_pages_behind_a_window_are_given_back(enabled, monkeypatch):
    steps = Steps(monkeypatch)
    batch(enabled("Gemma3"), plain(), lengths=(100, 1), max_new_tokens=40)
    # A step reads its 48 tokens and the window before them. These keys may begin and end in the
    # middle of a page, so there may be two more pages.
    assert steps.most["sliding_attention"] <= -(-(48 + WINDOW) // PAGE) + 2
    assert steps.most["full_attention"] >= 140 // PAGE


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mistral", "DeepseekV3"])
def test_memory_stays_the_same_over_many_requests(enabled, name):
    model = enabled(name)
    config = plain(num_blocks=40)
    free = []
    with model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=config, warmup=False
    ) as manager:
        for turn in range(6):
            names = manager.add_requests(prompts((30, 5 + turn, 17, 60 - turn)), max_new_tokens=6)
            left = set(names)
            while left:
                result = manager.get_result(timeout=1)
                left -= {result.request_id} if result else set()
            cache = manager.batch_processor.cache
            cache.evict_cached_blocks()
            cache.pool.try_to_free_sectors()
            free.append(cache.compute_free_capacity())
            assert [owner.block_table for owner in cache.cache_allocators.values()] == [
                {} for _ in cache.cache_allocators
            ]
    assert free == [1.0] * 6


def test_a_prefix_that_is_kept_is_shared(enabled, monkeypatch):
    shared = []
    original = memory.PagedAttentionCache.search_prefix_match

    def search(self, request_id, prompt_ids):
        shared.append(original(self, request_id, prompt_ids))
        return shared[-1]

    monkeypatch.setattr(memory.PagedAttentionCache, "search_prefix_match", search)
    model, config = enabled("Llama"), plain()
    for _ in range(2):
        found = model.generate_batch(
            prompts(), generation_config=greedy(), continuous_batching_config=config,
            warmup=False, persistent_manager=True,
        )  # fmt: skip
        assert tokens(found) == generated("Llama")
    model.destroy_cached_continuous_batching_manager()
    assert max(shared) >= 64


def test_a_request_that_is_cancelled_leaves_the_others_alone(enabled):
    model = enabled("Gemma3")
    want = generated("Gemma3")
    with model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=plain(), warmup=False
    ) as manager:
        first = manager.add_request(prompts()[4], max_new_tokens=400, streaming=True)
        others = manager.add_requests(prompts()[5:8])
        started = manager.get_result(timeout=20)
        manager.cancel_request(first)
        found = {}
        while len(found) < len(others):
            result = manager.get_result(timeout=20)
            assert result is not None
            if result.request_id in others:
                found[result.request_id] = result.generated_tokens
        last = manager.add_request(prompts()[8], max_new_tokens=NEW)
        while (result := manager.get_result(timeout=20)).request_id != last:
            assert result is not None
        assert first not in manager.batch_processor.scheduler.active_requests
    assert started is not None
    assert [found[name] for name in others] == want[5:8]
    assert result.generated_tokens == want[8]


def test_after_an_exception_in_a_step_the_next_batch_is_right(enabled, monkeypatch):
    model = enabled("Llama")
    calls = []

    class Failing(torch.nn.Module):
        def __call__(self, input_ids, scores):
            calls.append(scores)
            if len(calls) == 3:
                raise RuntimeError("a processor's own")
            return scores

    original = type(model)._get_logits_processor
    monkeypatch.setattr(
        type(model),
        "_get_logits_processor",
        lambda self, config: [*original(self, config), Failing()],
    )
    failed = model.generate_batch(
        prompts(), generation_config=greedy(), continuous_batching_config=plain(), warmup=False
    )
    errors = {result.error for result in failed.values()}
    assert errors == {"a processor's own"}
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.undo()
    assert batch(model, plain()) == generated("Llama")
