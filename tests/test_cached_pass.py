"""Tests that forward passes of benchmarks rewind their cache. Captured passes of one token rewind
it only between rounds of replays."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import decode_cache

CAPACITY = 64


def made(tokens, position):
    """Returns a pass over a cache of two layers. The layers count the tokens and do nothing
    else."""
    config = transformers.LlamaConfig(num_hidden_layers=2, num_key_value_heads=1, head_dim=8)
    cache = transformers.StaticCache(config=config, max_cache_len=CAPACITY)
    cache.early_initialization(1, 1, 8, torch.float32, torch.device("cpu"))

    def forward(input_ids, past_key_values, use_cache):
        for layer in past_key_values.layers:
            layer.cumulative_length.add_(input_ids.shape[1])
        return SimpleNamespace(logits=input_ids)

    inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64)}
    return decode_cache.CachedPass(forward, cache, position, inputs)


def lengths(one):
    return [layer.cumulative_length.item() for layer in one.cache.layers]


@pytest.mark.parametrize(
    ("tokens", "position", "after_replays"),
    [
        (1, 20, 23),  # continues where the last replay ended
        (1, CAPACITY - decode_cache.REPLAYS, CAPACITY - decode_cache.REPLAYS + 3),
        (1, CAPACITY - decode_cache.REPLAYS + 1, CAPACITY - decode_cache.REPLAYS + 2),
        (16, 0, 16),
    ],
)
def test_no_replay_runs_past_the_end_of_a_cache(tokens, position, after_replays):
    one = made(tokens, position)
    for _ in range(2):
        one()
        assert lengths(one) == [position + tokens] * 2
    one.rewind()
    assert lengths(one) == [position] * 2
    for _ in range(3):
        one.captured()
    assert lengths(one) == [after_replays] * 2
