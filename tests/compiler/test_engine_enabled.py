"""Tests how models are enabled for continuous batching and taken back, and which settings their
engines get."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as memory
from transformers.generation.continuous_batching import initialization

from tests.compiler.engine_models import (
    NEW,
    SMALL,
    VOCABULARY,
    built,
    generated,
    greedy,
    plain,
    prompts,
)
from tests.compiler.engine_steps import batch
from tilewright.compiler.serving import (
    BatchingConfig,
    allocators,
    defer_stop_check,
    disable,
    enable,
    undefer_stop_check,
)
from tilewright.compiler.serving.steps import in_engine

pytestmark = pytest.mark.usefixtures("heap_before")


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
