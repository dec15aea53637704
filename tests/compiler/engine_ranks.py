"""Continuous batching of models that are sharded over the ranks of a process group: the code of a
rank."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from transformers import DistributedConfig

from tests.compiler.engine_models import MODELS, built, generated, greedy, plain, prompts
from tilewright.compiler.serving import disable, enable

#: Models. The first has two layers whose heads of keys are divided among ranks, one with a window.
#: The other caches latents, which every rank has whole.
NAMES = ("Gemma3", "DeepseekV3")
LENGTHS = (5, 1, 40, 16, 70)


def found(name: str, folder: Path) -> list[list[int]]:
    """Returns the tokens of each request on this rank; ranks other than the first have none."""
    saved = folder / f"engine-{name}"
    if dist.get_rank() == 0:
        built(name).save_pretrained(saved)
    dist.barrier()
    model = (
        type(built(name))
        .from_pretrained(
            saved,
            distributed_config=DistributedConfig(tp_size=dist.get_world_size()),
            attn_implementation=MODELS[name][2],
        )
        .eval()
    )
    assert enable(model)
    results = model.generate_batch(
        prompts(LENGTHS), generation_config=greedy(), continuous_batching_config=plain(),
        warmup=False,
    )  # fmt: skip
    disable(model)
    dist.barrier()
    return [result.generated_tokens for result in results.values()]


def wanted(name: str) -> list[list[int]]:
    """Returns the tokens of the whole model's `generate()`."""
    return generated(name, LENGTHS)
