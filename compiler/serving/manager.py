"""The manager of a model that runs by tilewright.

transformers' manager compiles its steps in a warm-up and in a thread of its own. Two things are
added to it. Dynamo's limit of graphs is raised, because it counts all graphs of all models in the
process, and a step beyond it would run uncompiled. The warm-up also compiles the graph for steps of
any size, which otherwise compiles while the first request waits.
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

    def _run_generation_loop(self) -> None:
        # Settings of Dynamo belong to a thread.
        with at_least_graphs(GRAPHS):
            super()._run_generation_loop()


@torch.no_grad()
def _warm_other_sizes(runner: ModelRunner, model: Any) -> None:
    """Runs varlen steps of small sizes. transformers' warm-up runs one of the largest size, whose
    graph is for that size alone; Dynamo compiles a graph for all sizes at the second size, or at
    the third if decode steps are static.

    The number of keys changes too: an engine may pad all steps to one number of tokens. The first
    size has more tokens than requests, where that is possible: a graph made for as many is only for
    steps with as many.
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
