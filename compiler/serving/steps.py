"""Makes the arguments of a step of transformers' continuous batching engine on the meta device, to
trace steps without the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from tilewright.compiler.serving.classes import with_generate
from tilewright.compiler.serving.engine import (
    disable,
    enable,
    give_attention_back,
    is_enabled,
    is_taken,
    take_attention,
)


@contextmanager
def in_engine(model: Any) -> Iterator[bool]:
    """Gives a model the attention of the engine while the block runs. Yields False if the model
    cannot have it.

    A model that was enabled before stays enabled. Raises TypeError if `model` is not a model of
    transformers.
    """
    model = with_generate(model)
    was_enabled, was_taken = is_enabled(model), is_taken(model)
    if not enable(model):
        yield False
        return
    take_attention(model)
    try:
        yield True
    finally:
        if not was_taken:
            give_attention_back(model)
        if not was_enabled:
            disable(model)


def decode_step(memory: PagedAttentionCache, sequences: int) -> dict[str, Any]:
    """Returns the arguments of a decode step, with one token for each sequence, on the meta
    device."""
    allocators = memory.cache_allocators.values()
    columns = memory.max_blocks_per_request
    tables = torch.zeros(len(allocators), sequences, columns, dtype=torch.int32, device="meta")
    return _step(memory, sequences, sequences, keys=0) | {"block_table": tables}


def varlen_step(
    memory: PagedAttentionCache, sequences: int, tokens: int, keys: int
) -> dict[str, Any]:
    """Returns the arguments of a varlen step on the meta device.

    tokens: the number of new tokens of all sequences. keys: the number of keys that all sequences
    have before the step.
    """
    return _step(memory, sequences, tokens, keys) | {"block_table": None}


def _step(memory: PagedAttentionCache, sequences: int, tokens: int, keys: int) -> dict[str, Any]:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    kinds = memory.cache_allocators
    return {
        "input_ids": zeros(1, tokens),
        "position_ids": zeros(1, tokens),
        "cu_seq_lens_q": zeros(sequences + 1),
        "cu_seq_lens_k": {kind: zeros(sequences + 1) for kind in kinds},
        "max_length_q": tokens,
        "max_length_k": dict.fromkeys(kinds, keys + tokens),
        "write_index": [zeros(tokens, dtype=torch.int64) for _ in kinds],
        "read_index": [zeros(keys + tokens if keys else 0, dtype=torch.int64) for _ in kinds],
        "logits_to_keep": zeros(sequences),
        "attention_mask": None,
        "cache": memory,
        "use_cache": False,
        "is_causal": True,
    }
