"""Tests continuous batching with tilewright: for all kinds of requests, the tokens equal those of
`generate()`.

Most tests run steps without a compiler, since they test the memory and the plan of a step. Padded
steps have the shapes of compiled steps.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

import transformers
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as memory
from transformers.generation.continuous_batching import (
    continuous_api,
    initialization,
    input_outputs,
    model_runner,
    offloading_manager,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
)

from tests.compiler.engine_models import (
    ENGINE,
    LENGTHS,
    MODELS,
    NEW,
    ONE_LAYER,
    PAGE,
    SIZES,
    SMALL,
    VOCABULARY,
    WIDE,
    WINDOW,
    built,
    generated,
    generated_by,
    greedy,
    made,
    plain,
    prompts,
)
from tilewright.codegen.build import compile_for
from tilewright.codegen.targets import get_target
from tilewright.compiler import backend, reports
from tilewright.compiler.serving import (
    BatchingConfig,
    allocators,
    defer_stop_check,
    disable,
    enable,
    paged_attention,
    undefer_stop_check,
)
from tilewright.compiler.serving import relied_on as relied
from tilewright.compiler.serving.steps import in_engine
from tilewright.ops import calls


@pytest.fixture(autouse=True)
def heap_before():
    """Excludes objects older than the test from garbage collection, because an engine collects
    garbage twice when it stops."""
    gc.freeze()


@pytest.fixture
def enabled(request):
    """Returns a function from names to models that are enabled for the test."""
    models = []

    def make(name: str) -> Any:
        models.append(built(name))
        assert enable(models[-1])
        return models[-1]

    yield make
    for model in models:
        disable(model)


@pytest.fixture
def padded(monkeypatch):
    """Pads steps as for a compiler, without compiling them."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(paged_attention, "is_compiling", lambda: True)


#: The lengths of prompts that one step takes; then each step has four tokens.
FOUR = (5, 20, 3, 9)


def tokens(results: dict[str, Any]) -> list[list[int]]:
    assert {result.error for result in results.values()} == {None}
    return [result.generated_tokens for result in results.values()]


def batch(
    model: Any, config: Any, *, lengths: Any = LENGTHS, warmup: bool = False, **settings: Any
) -> list[list[int]]:
    results = model.generate_batch(
        prompts(lengths), generation_config=greedy(**settings), continuous_batching_config=config,
        warmup=warmup,
    )  # fmt: skip
    return tokens(results)


class Steps:
    """Observes the steps of an engine: the kind of each step, and what is in use before it."""

    def __init__(self, monkeypatch: Any, owner: type = PagedAttentionCache) -> None:
        self.decode = self.varlen = self.prompts_alone = 0
        self.most: dict[str, int] = {}
        original = paged_attention.plan_of

        def plan_of(owner: Any, step: dict[str, Any]) -> Any:
            if owner.index == 0:
                self.decode += step["block_table"] is not None
                self.varlen += step["block_table"] is None and step["read_index"][0].numel() > 0
                self.prompts_alone += (
                    step["block_table"] is None and step["read_index"][0].numel() == 0
                )
            used = {block for table in owner.block_table.values() for block in table if block}
            self.most[owner.layer_type] = max(self.most.get(owner.layer_type, 0), len(used))
            return original(owner, step)

        monkeypatch.setattr(paged_attention, "plan_of", plan_of)


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


class HostStream:
    """Stands for a CUDA stream. Work is finished when it is submitted."""

    def __init__(self, *args: Any, **how: Any) -> None: ...

    def _nothing(self, *args: Any) -> None: ...

    record = record_event = wait_event = synchronize = _nothing


@pytest.fixture
def two_at_once(monkeypatch):
    """Makes the engine prepare a step before the tokens of the previous step are known, as on a
    GPU."""
    kind = input_outputs.ContinuousBatchingAsyncIOs
    monkeypatch.setattr(kind, "_supported_device_types", ("cpu",))
    monkeypatch.setattr(input_outputs, "create_device_stream", HostStream)
    monkeypatch.setattr(torch, "Event", HostStream)
    for module in (input_outputs, model_runner, offloading_manager, continuous_api):
        monkeypatch.setattr(module, "stream_context", lambda stream: nullcontext())


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mistral", "DeepseekV3"])
def test_two_steps_at_once_have_the_same_tokens(enabled, two_at_once, monkeypatch, name):
    steps = Steps(monkeypatch)
    config = plain(use_async_batching=True)
    assert batch(enabled(name), config) == generated(name)
    assert min(steps.decode, steps.varlen) > 0
    config = plain(use_async_batching=True, num_blocks=8 if name == "DeepseekV3" else 22)
    assert batch(built(name), config, max_new_tokens=20) == generated(name, new=20)


class Replayed:
    """Stands for a CUDA graph: repeats a call with the tensors and the numbers of the first
    time."""

    count = 0

    def __init__(self, call: Any) -> None:
        self.call = call

    def replay(self) -> None:
        Replayed.count += 1
        self.call()

    def reset(self) -> None: ...


@pytest.fixture
def replayed(monkeypatch, two_at_once):
    """Makes the engine replay steps of a shape that it has run before."""

    def capture(self, forward, stream, *arguments):
        forward(*arguments)
        self.inputs_and_outputs.set_graph(Replayed(partial(forward, *arguments)))

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", capture)
    monkeypatch.setattr(model_runner, "get_memory_pools", lambda: (None, None))
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    monkeypatch.setattr(Replayed, "count", 0)


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


def test_any_settings_do(enabled):
    model, lengths = enabled("Llama"), (20, 5)
    want = generated("Llama", lengths)
    theirs = ContinuousBatchingConfig(**SMALL)
    for compiler in ("varlen_compile_config", "decode_compile_config"):
        setattr(theirs, compiler, {"backend": "eager", "mode": None, "options": {}})
    kept = copy.deepcopy(theirs)
    made = BatchingConfig.of(theirs)
    assert isinstance(made, BatchingConfig)
    assert theirs == kept
    assert made.varlen_compile_config is theirs.varlen_compile_config
    assert batch(model, plain(max_blocks_per_request=None), lengths=lengths) == want
    assert batch(model, plain(max_blocks_per_request=0), lengths=lengths) == want


def resolved(config: Any, model: Any) -> Any:
    return initialization.resolve_continuous_batching_config(
        config=model.config, cb_config=config, workload_hints=None, has_logit_processors=False,
        device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("columns", [None, 5, 0])
def test_tables_are_kept_for_enabled_models_alone(monkeypatch, caplog, cuda, columns):
    model = copy.deepcopy(built("Gemma3"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    config = BatchingConfig(max_blocks_per_request=columns)
    assert resolved(config, model).max_blocks_per_request == 0
    model.config._attn_implementation = allocators.ATTENTION
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = resolved(BatchingConfig.of(config), model)
    assert found.max_blocks_per_request == {None: 32, 5: 5, 0: 0}[columns]
    assert (found.decode_compile_config is None) == (columns == 0)
    assert config.max_blocks_per_request == columns
    if columns != 0:
        assert caplog.messages == []


def test_cuda_graphs_and_two_batches_at_once_are_on_where_there_are_graphs(monkeypatch):
    model = copy.deepcopy(built("Llama"))
    model.config._attn_implementation = allocators.ATTENTION
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    found = resolved(BatchingConfig.of(None), model)
    assert found.use_cuda_graph == (True, True)
    assert found.use_async_batching


def test_other_models_of_the_process_keep_their_memory(enabled):
    model = enabled("Gemma3")
    other = copy.deepcopy(built("Llama"))
    assert type(other) is not type(model)
    config = ContinuousBatchingConfig(**{**SMALL, "max_blocks_per_request": 0})
    assert batch(other, config) == generated("Llama")
    table = memory.ATTN_TYPE_TO_ALLOCATOR
    assert table["full_attention"].supports_block_table
    assert not table["sliding_attention"].supports_block_table


def test_a_model_with_our_settings_that_is_not_enabled_runs_as_before():
    model = built("Llama")
    lengths = (20, 5)
    assert batch(model, plain(), lengths=lengths) == generated("Llama", lengths)


def test_disable_takes_everything_back():
    model = built("Llama")
    before = type(model), dict(vars(model)), model.config.to_dict()
    assert enable(model)
    assert enable(model)  # again: nothing
    assert type(model) is not before[0]
    assert isinstance(model, before[0])
    disable(model)
    disable(model)
    assert (type(model), dict(vars(model)), model.config.to_dict()) == before
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_a_copy_of_an_enabled_model_is_enabled_and_taken_back_for_itself():
    model = copy.deepcopy(built("Llama"))
    original = type(model)
    assert enable(model)
    other = copy.deepcopy(model)
    assert type(other) is original
    assert enable(other)
    assert len(other._forward_pre_hooks) == 1
    assert batch(other, plain(), lengths=(5, 3)) == generated("Llama", (5, 3))
    disable(other)
    assert (type(other), len(other._forward_pre_hooks)) == (original, 0)
    assert len(model._forward_pre_hooks) == 1  # the copy is apart
    assert batch(model, plain(), lengths=(5, 3)) == generated("Llama", (5, 3))


def test_it_and_the_deferred_check_are_taken_back_in_any_order():
    model = built("Llama")
    original = type(model)
    changes = ((enable, disable), (defer_stop_check, undefer_stop_check))
    for first, second in (changes, changes[::-1]):
        for do, _ in (first, second):
            assert do(model)
        first[1](model)
        assert type(model) is not original
        second[1](model)
        assert type(model) is original


def test_called_otherwise_while_a_manager_lives_it_raises(enabled):
    model = enabled("Llama")
    manager = model.init_continuous_batching(greedy(), plain())
    with pytest.raises(RuntimeError, match="stop the manager"):
        model(torch.tensor([[1, 2]]))
    manager.start()
    manager.stop()
    assert model.config._attn_implementation == "sdpa"
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, VOCABULARY)


def test_it_is_not_taken_back_while_a_manager_runs_or_is_kept(enabled):
    model = enabled("Llama")
    how = {"generation_config": greedy(), "continuous_batching_config": plain(), "warmup": False}
    with (
        model.continuous_batching_context_manager(**how),
        pytest.raises(RuntimeError, match="a manager of this model runs"),
    ):
        disable(model)
    model.generate_batch(prompts((3,)), persistent_manager=True, **how)
    with pytest.raises(RuntimeError, match="disable: a manager of this model is kept"):
        disable(model)
    model.destroy_cached_continuous_batching_manager()
    disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_manager_that_was_never_started_leaves_nothing(enabled):
    model = enabled("Llama")
    for _ in range(2):
        model.init_continuous_batching(greedy(), plain())
    assert model.config._attn_implementation == allocators.ATTENTION
    disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_manager_whose_model_attends_otherwise_raises(enabled):
    model = enabled("Llama")
    for before_it_starts in (True, False):
        manager = model.init_continuous_batching(greedy(), plain())
        if before_it_starts:
            model.set_attn_implementation("sdpa")
        manager.start()
        manager.add_request([1, 2, 3], max_new_tokens=1)
        first = manager.get_result(timeout=20)
        assert first.error is None
        model.set_attn_implementation("sdpa")
        manager.add_request([1, 2, 3])
        result = manager.get_result(timeout=20)
        manager.stop()
        assert "the model's attention was changed" in result.error


def test_settings_that_transformers_refuses_leave_the_attention(enabled):
    model = enabled("Llama")
    with pytest.raises(ValueError, match="page_size"):
        model.init_continuous_batching(greedy(), plain(page_size=2))
    assert model.config._attn_implementation == "sdpa"


def test_they_leave_a_manager_that_runs_alone(enabled):
    model, want = enabled("Llama"), generated("Llama", (5,))
    with model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=plain(), warmup=False
    ) as manager:
        with pytest.raises(ValueError, match="page_size"):
            model.init_continuous_batching(greedy(), plain(page_size=2))
        assert model.config._attn_implementation == allocators.ATTENTION
        manager.add_request(prompts((5,))[0], max_new_tokens=NEW)
        assert manager.get_result(timeout=20).generated_tokens == want[0]
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_that_was_chosen_after_a_manager_stays():
    model = copy.deepcopy(built("Llama"))
    assert enable(model)
    batch(model, plain(), lengths=(3,))
    model.set_attn_implementation("eager")
    disable(model)
    assert model.config._attn_implementation == "eager"


def test_a_class_that_others_derive_from_the_changed_one_has_the_change():
    """Derives a class between two changes of the model's class, as sharding libraries do."""
    model = copy.deepcopy(built("Llama"))
    original = type(model)
    assert enable(model)
    changed = type(model)
    model.__class__ = other = type("Sharded", (changed,), {})
    assert defer_stop_check(model)
    assert enable(model)  # again: nothing
    assert batch(model, plain(), lengths=(5, 20)) == generated("Llama", (5, 20))
    with pytest.raises(RuntimeError, match="became Sharded after enable"):
        disable(model)
    undefer_stop_check(model)
    assert type(model) is other
    model.__class__ = changed
    disable(model)
    assert type(model) is original


def test_a_model_in_the_engine_for_a_look_stays_enabled_where_it_was():
    model = copy.deepcopy(built("Llama"))
    original = type(model)
    with in_engine(model) as can:
        assert can
        assert model.config._attn_implementation == allocators.ATTENTION
    assert type(model) is original
    assert enable(model)
    with in_engine(model):
        assert model.config._attn_implementation == allocators.ATTENTION
    assert model.config._attn_implementation == "sdpa"
    assert type(model) is not original
    assert batch(model, plain(), lengths=(3,)) == generated("Llama", (3,))


def test_a_compiled_model_in_steps_that_are_not_padded_sees_all_pages():
    """The engine pads only steps that it compiles itself, and does not know of this compiler. The
    first request is the last one to end."""
    model, lengths = made("Llama", ONE_LAYER), (100, 20, 3, 9)
    want = generated_by(model, lengths)
    assert enable(model)
    model.compile(backend="eager", dynamic=True)
    assert batch(model, plain(), lengths=lengths) == want
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["attention_mask", "position_bias"])
def test_what_the_attention_would_not_read_raises(name):
    cache = object.__new__(PagedAttentionCache)
    states, given = torch.zeros(1, 2, 3, 8), {"attention_mask": None, name: torch.zeros(1)}
    with pytest.raises(ValueError, match=f"{name}: expected None"):
        paged_attention.attention(
            None, states, states, states, tilewright_memory=cache, tilewright_plan={}, **given
        )


@pytest.mark.parametrize("given", [{"s_aux": torch.zeros(4)}, {"softcap": 2.0}])
def test_sinks_of_latents_raise(given):
    config = built("DeepseekV3").config
    owner = allocators.LatentPages(0, config, 4, torch.float32, PAGE, [0], True)
    cache = object.__new__(PagedAttentionCache)
    cache.layer_to_allocator = {0: owner}
    module, states = type("Attention", (), {"layer_idx": 0}), torch.zeros(1, 4, 3, 24)
    with pytest.raises(ValueError, match="neither s_aux nor softcap"):
        paged_attention.attention(
            module,
            states,
            states,
            states,
            None,
            tilewright_memory=cache,
            tilewright_plan={},
            **given,
        )


def window_pages(window):
    config = copy.copy(built("Mistral").config)
    config.sliding_window = window
    return allocators.WindowPages(
        index=0, config=config, num_key_value_heads=2, cache_dtype=torch.float32, page_size=PAGE,
        layer_indices=[0], allow_block_sharing=True,
    )  # fmt: skip


@pytest.mark.parametrize("window", [1, 5])
def test_pages_before_a_window_are_not_kept(window):
    """Tests the smallest window, in which a token sees only itself."""
    owner = window_pages(window)
    for past in range(3 * PAGE):
        seen = [position for position in range(past + 1) if past - position < window]
        assert owner.kept(past) == seen[0] // PAGE


@pytest.mark.parametrize("window", [0, None])
def test_a_window_without_tokens_raises(window):
    with pytest.raises(ValueError, match="sliding_window: expected a positive integer"):
        window_pages(window)


def test_keys_of_another_size_raise(enabled):
    owner = allocators.FullPages(0, built("Llama").config, 2, torch.float32, PAGE, [0], True)
    cache = object.__new__(PagedAttentionCache)
    cache.layer_to_allocator = {0: owner}
    module = type("Attention", (), {"layer_idx": 0})
    states = torch.zeros(1, 2, 3, 5)
    with pytest.raises(ValueError, match="expected 2 heads of 8 numbers"):
        paged_attention.attention(
            module, states, states, states, None, tilewright_memory=cache, tilewright_plan={}
        )


def told(model: Any, caplog: Any) -> str:
    """Returns the one warning about a model that stays as it is."""
    caplog.clear()
    original = type(model)
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert enable(model) is False
    assert type(model) is original
    assert not model._forward_pre_hooks
    (message,) = caplog.messages
    return message


def another_signature(monkeypatch):
    def get_seqlen_k(self, request_id, past_length): ...

    monkeypatch.setattr(FullAttentionCacheAllocator, "get_seqlen_k", get_seqlen_k)
    return "FullAttentionCacheAllocator.get_seqlen_k of transformers"


def no_function(monkeypatch):
    monkeypatch.delattr(FullAttentionCacheAllocator, "_compute_blocks_needed")
    return "has no function FullAttentionCacheAllocator._compute_blocks_needed"


def another_order(monkeypatch):
    original = FullAttentionCacheAllocator.register_cache_tensor

    def register(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool):
        original(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        self._kv_token_views = {n: (v, k) for n, (k, v) in self._kv_token_views.items()}

    monkeypatch.setattr(FullAttentionCacheAllocator, "register_cache_tensor", register)
    return "has the pages of layer 0 elsewhere"


def no_argument(monkeypatch):
    monkeypatch.setattr(relied, "STEP", (*relied.STEP, "tables"))
    return "has no tables"


def own_method(monkeypatch):
    monkeypatch.setattr(
        type(built("Llama")), "init_continuous_batching", lambda self: None, raising=False
    )
    return "LlamaForCausalLM has a method init_continuous_batching of its own"


def no_table(monkeypatch):
    monkeypatch.setattr(memory, "ATTN_TYPE_TO_ALLOCATOR", {})
    return "KeyError"


@pytest.mark.parametrize(
    "change", [another_signature, no_function, another_order, no_argument, own_method, no_table]
)
def test_where_transformers_has_changed_the_model_stays_as_it_is(monkeypatch, caplog, change):
    said = change(monkeypatch)
    assert said in told(built("Llama"), caplog)


def on_meta(name: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES | settings)
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config)


def test_models_whose_memory_is_another_are_told(caplog):
    latents = MODELS["DeepseekV3"][1]
    model = on_meta("DeepseekV3", **latents)
    model.model.layers[1].self_attn.indexer = torch.nn.Linear(2, 2)
    assert "keeps an indexer's keys beside latents" in told(model, caplog)
    model = on_meta("DeepseekV3", **latents)
    model.model.layers[0].self_attn = torch.nn.Identity()
    assert "others have not" in told(model, caplog)
    model = on_meta("DeepseekV3", **latents)
    model.model.layers[0].self_attn.kv_b_proj.to(torch.bfloat16)
    assert "is not a linear in torch.float32" in told(model, caplog)
    model = on_meta("DeepseekV3", **latents)
    model.model.layers[1].self_attn.forward = lambda hidden_states, latents=None: None
    assert f"has no argument {paged_attention.CACHE}" in told(model, caplog)
    chunks = on_meta("Llama", layer_types=["full_attention", "full_attention"])
    chunks.config.layer_types = ["chunked_attention", "full_attention"]
    assert "Invalid layer type: chunked_attention" in told(chunks, caplog)
    other = on_meta("Bloom")
    assert "does not take another attention" in told(other, caplog)


def test_latents_that_are_expanded_otherwise_are_told(caplog, monkeypatch):
    model = on_meta("DeepseekV3", **MODELS["DeepseekV3"][1])
    kind = type("Attention", (type(model.model.layers[0].self_attn),), {})
    kind.expand_kv = lambda self, latent, rope: (latent, rope)
    model.model.layers[0].self_attn.__class__ = kind
    assert "Attention does not expand latents as DeepSeek's" in told(model, caplog)


def test_models_without_generate_are_refused():
    for change in (enable, disable):
        with pytest.raises(TypeError, match=r"model of transformers with generate\(\), got Linear"):
            change(torch.nn.Linear(2, 2))


@pytest.fixture(scope="module")
def compiled():
    """Returns a function from models to the graphs and tokens of their compiled engine.

    A graph is described by how often it calls each op, by how many plain writes change the engine's
    memory, and by the codes of its misses.
    """
    kept: dict[str, tuple[list[Any], list[list[int]]]] = {}

    def compile_once(name: str) -> tuple[list[Any], list[list[int]]]:
        if name not in kept:
            kept[name] = _compiled(name)
        return kept[name]

    yield compile_once
    torch._dynamo.reset()


def _writes_memory(node: torch.fx.Node) -> bool:
    if not any(name in str(node.target) for name in ("setitem", "index_put", "index_copy")):
        return False
    base = node.args[0]
    while base.op != "placeholder" and base.args:
        base = base.args[0]
    return base.name.endswith("pool_rows")


def _compiled(name: str) -> tuple[list[Any], list[list[int]]]:
    torch._dynamo.reset()
    graphs = []

    def keep(report: Any) -> None:
        nodes = list(report.after.graph.nodes)
        ops = Counter(str(n.target).removeprefix("tilewright.").partition(".")[0] for n in nodes)
        graphs.append((ops, sum(map(_writes_memory, nodes)), {m.code for m in report.misses}))

    model = built(name)
    assert enable(model)
    config = BatchingConfig(**SMALL, options={"inner": "eager"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_trace", keep)
        found = batch(model, config, lengths=FOUR)
    disable(model)
    return graphs, found


#: Engines with several graphs: settings, whether decode steps are dynamic, whether steps are
#: replayed as by CUDA graphs, and the fewest graphs. Each pair of the two choices occurs.
STEPS_OF_64 = {"max_batch_tokens": 64, "max_requests_per_batch": 64, "q_padding_interval_size": 16}
WARMED = {
    "numbers of tokens, static": (STEPS_OF_64, False, False, 9),
    "numbers of keys alone": ({}, None, True, 4),
    "numbers of keys alone, static": ({}, False, True, 5),
    "more tokens than requests": (STEPS_OF_64 | {"max_requests_per_batch": 40}, None, False, 4),
}


def failed_frames() -> int:
    """Returns how many frames Dynamo has given up on in this process."""
    frames = torch._dynamo.utils.counters["frames"]
    return frames["total"] - frames["ok"]


@pytest.mark.parametrize("engine", WARMED)
def test_nothing_is_compiled_after_the_warm_up(fresh_dynamo, request, engine):
    """Nothing is compiled after the warm-up, although static decode steps need a graph for each
    power of two, which are more graphs than Dynamo keeps by default."""
    settings, dynamic, replays, fewest = WARMED[engine]
    if replays:
        request.getfixturevalue("replayed")
    config = BatchingConfig(**SMALL | {"num_blocks": 200} | settings, options={"inner": "eager"})
    config.decode_compile_config.dynamic = dynamic
    failed = failed_frames()
    model = made("Llama", ONE_LAYER)
    assert enable(model)
    with model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=config
    ) as manager:
        warm = len(reports())
        found = []
        for lengths in ((5,), LENGTHS, (3,) * 20):
            names = manager.add_requests(prompts(lengths), max_new_tokens=4)
            left = set(names)
            while left:
                result = manager.get_result(timeout=60)
                assert result.error is None
                left -= {result.request_id}
            found.append(len(reports()))
    disable(model)
    assert found == [warm] * 3
    assert warm >= fewest
    assert (Replayed.count > 10) == replays
    assert failed_frames() == failed


@pytest.mark.skipif(
    "use_inference_mode"
    not in inspect.signature(
        continuous_api.ContinuousBatchingManager._run_generation_loop
    ).parameters,
    reason="before transformers 5.24 the engine's thread was never in inference mode",
)
@pytest.mark.parametrize("name", ["Llama", "DeepseekV3"])
def test_in_inference_mode_the_graphs_of_the_warm_up_are_used(fresh_dynamo, enabled, name):
    config = BatchingConfig(**SMALL, options={"inner": "eager"})
    with (
        torch.inference_mode(),
        enabled(name).continuous_batching_context_manager(
            generation_config=greedy(), continuous_batching_config=config
        ) as manager,
    ):
        warm = len(reports())
        names, found = manager.add_requests(prompts(FOUR)), {}
        while len(found) < len(names):
            result = manager.get_result(timeout=60)
            found[result.request_id] = result
    assert tokens({one: found[one] for one in names}) == generated(name, FOUR)
    assert len(reports()) == warm > 0


def test_a_model_without_kernels_runs_as_before(enabled, monkeypatch, caplog):
    model = enabled("Llama")
    monkeypatch.setattr(relied, "missing_kernel", lambda model: "no kernel for torch.float32")
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        found = batch(model, plain(max_blocks_per_request=0), lengths=(20, 5))
    assert found == generated("Llama", (20, 5))
    assert caplog.messages == [
        "enable: continuous batching runs without tilewright: no kernel for torch.float32"
    ]
    disable(model)
    assert "no kernel for torch.float32" in told(model, caplog)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_attention_take_halves(enabled, name):
    config, target = enabled(name).config, get_target("sm90")
    assert relied.kernel_obstacle(config, torch.bfloat16, target) is None
    reason = relied.kernel_obstacle(config, torch.float32, target)
    assert "no kernel for torch.float32" in reason


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss", "DeepseekV3"])
def test_every_call_of_a_step_has_a_kernel(fresh_dynamo, replayed, monkeypatch, name):
    """A CUDA graph cannot record the reference. The kernels that merge parts are compiled too.
    Llama's layers are alike, so it has one."""
    found: dict[str, set[str]] = {}
    merges = set()
    planned = {}  # calls with the same metadata and alignment have the same plan
    perform = calls.Calls._performed

    def performed(self, kind, arguments, args, kwargs, seen):
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        key = (id(kind), *(tensor.data_ptr() % 16 for tensor in tensors))
        if key not in planned:
            report = self.op.plan_for(arguments, "sm90")
            found.setdefault(self.op.name, set()).add(report.name)
            merges.update(spec for spec in report.specs if spec.kernel == "attention_merge")
            planned[key] = kind
        return perform(self, kind, arguments, args, kwargs, seen)

    monkeypatch.setattr(calls.Calls, "_performed", performed)
    alike = ONE_LAYER if name == "Llama" else {}
    model = made(name, WIDE | alike).to(torch.bfloat16)
    assert enable(model)
    config = BatchingConfig(**ENGINE, options={"inner": "eager"})
    warmup = name == "DeepseekV3"  # runs steps with the most keys
    batch(model, config, lengths=FOUR, max_new_tokens=20, warmup=warmup)
    disable(model)
    assert Replayed.count > 10
    assert not {op for op, names in found.items() if "reference" in names}
    attention = {"mla_decode", "mla_latent_store"} if name == "DeepseekV3" else {"cache_attention"}
    assert attention < found.keys()
    assert merges or name != "DeepseekV3"
    for spec in merges:
        compile_for(spec)


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe", "Gemma3", "GptOss", "DeepseekV3"])
def test_compiled_steps_are_two_graphs_with_each_layer_fused(compiled, name):
    graphs, found = compiled(name)
    assert found == generated(name, FOUR)
    assert len(graphs) == 2
    write, attend = (
        ("mla_latent_store", "mla_decode")
        if name == "DeepseekV3"
        else ("fused_qkv_paged", "cache_attention")
    )
    for ops, plain_writes, misses in graphs:
        assert (ops[write], ops[attend]) == (2, 2)
        assert plain_writes == 0
        assert "GRAPH_BREAK" not in misses
