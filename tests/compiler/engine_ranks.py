"""The code of a rank in tests of continuous batching with models that are sharded over a process
group."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from transformers import DistributedConfig

from tests.compiler.engine_models import MODELS, built, generated, greedy, plain, prompts
from tilewright.compiler.serving import disable, enable

#: The tested models. The first has two layers, one of them with a window, whose heads of keys are
#: divided among ranks. The second caches latents, of which every rank has a whole copy.
NAMES = ("Gemma3", "DeepseekV3")
LENGTHS = (5, 1, 40, 16, 70)


def found(name: str, folder: Path) -> list[list[int]]:
    """Returns the tokens of each request on the first rank. Other ranks return none."""
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
    """Returns the tokens that `generate()` of the unsharded model gives."""
    return generated(name, LENGTHS)
