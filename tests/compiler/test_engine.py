"""Continuous batching by tilewright: tokens are those of `generate()`, whatever the requests are.

Most tests run steps as they are, without a compiler, since what they ask of is the memory and the
plan of a step. Steps that are padded have the shapes of compiled ones.
"""

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
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.generation.continuous_batching.requests import RequestStatus

from tests.compiler.engine_models import (
    LENGTHS,
    MODELS,
    NEW,
    PAGE,
    SMALL,
    VOCABULARY,
    WINDOW,
    built,
    generated,
    greedy,
    prompts,
)
from tests.found import patterns_in
from tilewright.compiler import reports
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
    """Has steps padded as compiled ones are, without compiling them."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(paged_attention, "is_compiling", lambda: True)


def plain(**settings: Any) -> BatchingConfig:
    """Returns settings of a small engine whose steps are not compiled."""
    config = BatchingConfig(**SMALL | settings)
    config.varlen_compile_config = config.decode_compile_config = None
    return config


def tokens(results: dict[str, Any]) -> list[list[int]]:
    assert all(result.error is None for result in results.values())
    return [result.generated_tokens for result in results.values()]


def batch(model: Any, config: Any, *, lengths: Any = LENGTHS, **settings: Any) -> list[list[int]]:
    results = model.generate_batch(
        prompts(lengths), generation_config=greedy(**settings), continuous_batching_config=config,
        warmup=False,
    )  # fmt: skip
    return tokens(results)


class Steps:
    """Looks on at the steps of an engine: what kind each is, and what is in use before it."""

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


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss", "Mistral"])
def test_so_are_those_of_padded_steps(enabled, padded, monkeypatch, name):
    steps = Steps(monkeypatch)
    assert batch(enabled(name), BatchingConfig(**SMALL)) == generated(name)
    assert min(steps.decode, steps.varlen, steps.prompts_alone) > 0
