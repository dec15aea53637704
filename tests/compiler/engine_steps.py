"""Helpers of the tests of continuous batching, which run batches and observe steps."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache

from tests.compiler.engine_models import LENGTHS, greedy, prompts
from tilewright.compiler.serving import paged_attention

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


class HostStream:
    """Stands for a CUDA stream. Work is finished when it is submitted."""

    def __init__(self, *args: Any, **how: Any) -> None: ...

    def _nothing(self, *args: Any) -> None: ...

    record = record_event = wait_event = synchronize = _nothing


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
