"""The memory of transformers' continuous batching engine, on the meta device, where it takes no
bytes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper


def memory_of(
    config: Any, dtype: torch.dtype, *, page_size: int, num_blocks: int, tokens: int, columns: int
) -> PagedAttentionCache:
    """Returns the engine's memory for a language model, on the meta device.

    config: the configuration of the language model.
    tokens: the maximum number of tokens in a step.
    columns: the width of a block table.

    Raises the error of transformers for models that its memory does not support.
    """
    settings = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=tokens,
        max_requests_per_batch=2,
        max_blocks_per_request=columns,
        max_memory_percent=1.0,
        use_async_batching=False,
    )
    helper = DistributedHelper(None, None)
    return PagedAttentionCache(config, settings, torch.device("meta"), helper, dtype)
