"""The manager of a model that tilewright runs in continuous batching.

transformers' manager compiles its steps in a warm-up and in a thread of its own. This manager does
two more things. It raises Dynamo's limit of graphs, because the limit counts the graphs of all
models in the process, and a step beyond the limit would run uncompiled. In the warm-up, it also
compiles the graph for steps of any size, which would otherwise compile while the first request
waits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.model_runner import ModelRunner

from tilewright.compiler._compat.tracing import at_least_graphs

#: The number of graphs that Dynamo may keep for the function that runs a step. A static decode
#: configuration has one for each power of two up to `max_requests_per_batch`.
GRAPHS = 64


class Manager(ContinuousBatchingManager):
    """A manager of transformers with a longer warm-up."""

    def warmup(self) -> None:
        with at_least_graphs(GRAPHS):
            super().warmup()
            processor = self.batch_processor
            if processor is not None:
                _warm_other_sizes(processor.model_runner, self.model)

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        # Settings of Dynamo belong to a thread.
        with at_least_graphs(GRAPHS):
            super()._run_generation_loop(*args, **kwargs)


@torch.no_grad()
def _warm_other_sizes(runner: ModelRunner, model: Any) -> None:
    """Runs varlen steps of small sizes, until Dynamo has compiled a graph for all sizes.

    transformers' warm-up runs one step of the largest size, and its graph is for that size alone.
    Dynamo compiles a graph for all sizes at the second size, or at the third if decode steps are
    static.

    The number of keys differs between the steps too, because an engine may pad all steps to one
    number of tokens. The first step has more tokens than requests, where that is possible. If the
    two numbers were equal, the graph would only be for steps in which they are equal.
    """
    config, cache = runner.cb_config, runner.cache
    if config.varlen_compile_config is None:
        return
    interval, most = config.q_padding_interval_size, cache.max_batch_tokens
    for times, tokens in enumerate((config.max_requests_per_batch + 1, interval, 2 * interval), 1):
        runner.run_one_warmup(
            model=model,
            num_q_tokens=max(1, min(tokens, most)),
            max_kv_read=min(times * config.kv_padding_interval_size, cache.max_tokens_read),
        )
    cache.reset()
