"""One rank of models that two processes share: `python -m tests.compiler.sharded RANK FOLDER`.

Writes what was fused and how far outputs and caches are from float64 to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    StaticCache,
)

from tilewright.compiler import backend, reports

RANKS = 2
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts_per_tok": 2}
CONFIGS = {
    "llama": LlamaConfig(**_SIZES),
    "mixtral": MixtralConfig(**_SIZES, **_EXPERTS, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=4, moe_intermediate_size=32),
}


def by_plan(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, tp_plan="auto")


def by_experts(folder: str) -> Any:
    from transformers.distributed import DistributedConfig

    sharing = DistributedConfig(tp_size=RANKS, ep_size=RANKS)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=sharing
    )


def by_modules(folder: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (RANKS,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


CASES = {
    "llama by plan": ("llama", by_plan),
    "llama by modules": ("llama", by_modules),
    "mixtral by plan": ("mixtral", by_plan),
    "mixtral by experts": ("mixtral", by_experts),
    "qwen3_moe by plan": ("qwen3_moe", by_plan),
}


def run(model: Any, heads: int, compiled: bool) -> list[torch.Tensor]:
    """Logits of five tokens and of one more, and the cache behind them. heads: of the cache."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    cache.early_initialization(1, heads, 16, model.dtype, torch.device("cpu"))
    options = {"inner": "eager"}
    step = torch.compile(model, backend="tilewright", options=options) if compiled else model
    logits = [
        step(input_ids=ids, past_key_values=cache, use_cache=True).logits
        for ids in (torch.arange(5)[None], torch.tensor([[7]]))
    ]
    return [*logits, cache.layers[0].keys, cache.layers[0].values]


def case(name: str, rank: int, folder: Path) -> dict[str, Any]:
    kind, load = CASES[name]
    where = str(folder / kind)
    whole = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64)
    whole.config._experts_implementation = "eager"  # there is no grouped product in float64
    heads = _SIZES["num_key_value_heads"]
    exact = run(whole, heads, compiled=False)
    exact[2:] = [t.chunk(RANKS, dim=1)[rank] for t in exact[2:]]
    sharded = load(where).requires_grad_(False)
    eager = run(sharded, heads // RANKS, compiled=False)
    ours = run(sharded, heads // RANKS, compiled=True)

    def errors(made: list[torch.Tensor]) -> list[float]:
        return [
            ((a.double() - b).norm() / b.norm()).item() for a, b in zip(made, exact, strict=True)
        ]

    return {
        "fused": sorted({site.pattern for report in reports() for site in report.matches}),
        "eager": errors(eager),
        "ours": errors(ours),
    }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    found = {}
    with torch.no_grad():
        for kind, config in CONFIGS.items():
            if rank == 0:
                torch.manual_seed(0)
                AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
        dist.barrier()
        for name in CASES:
            torch._dynamo.reset()
            backend._REPORTS.clear()
            found[name] = case(name, rank, folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
