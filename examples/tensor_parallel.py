"""Runs a Llama that is sharded over several processes. Each process compiles its part with
tilewright.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Each process has a GPU (NCCL), or all processes run on the CPU (gloo). torch's `parallelize_module`
shards the projections by heads and the MLP by columns; each rank keeps its own heads in its cache.
The errors of logits and caches against the unsharded model in float64 are compared with those of
the sharded model without tilewright.

The exit status is 1 if a layer is not fused, or if the result is less accurate than without
tilewright.
"""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from tilewright import cache_argument
from tilewright.compiler import reports

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 16, 8, 64
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=128,
)
PROMPT, STEPS, CACHE_LENGTH = 9, 3, 64
#: The patterns that must match once in each layer.
WANTED = ("qkv_cache", "cache_attention")
# The fused model's error may exceed the error of the model without tilewright by this much, which
# is one rounding of bfloat16 (8 bits).
ALLOWANCE = 2.0**-8


def shared(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """Returns the model with this rank's part of each layer's weights."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    plan: dict[str, Any] = {
        name: ColwiseParallel() for name in (*columns, "mlp.gate_proj", "mlp.up_proj")
    }
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model.requires_grad_(False)


def decode(step: Any, dtype: torch.dtype, kv_heads: int, device: torch.device) -> torch.Tensor:
    """Computes logits [PROMPT + STEPS, vocabulary] of given tokens: first of a prompt, and then of
    one more token at a time."""
    cache = StaticCache(config=CONFIG, max_cache_len=CACHE_LENGTH)
    cache.early_initialization(1, kv_heads, HEAD_DIM, dtype, device)
    tokens = torch.arange(PROMPT + STEPS, device=device)[None]
    parts = tokens.tensor_split([PROMPT + i for i in range(STEPS)], dim=1)
    passed = cache_argument(step, cache)
    logits = [step(input_ids=ids.clone(), **passed).logits for ids in parts]
    return torch.cat(logits, dim=1)[0]


def error(made: torch.Tensor, exact: torch.Tensor) -> float:
    return ((made.double() - exact).norm() / exact.norm()).item()


def run(rank: int, ranks: int, device: torch.device) -> list[str]:
    """Lists the faults on this rank; the list is empty if all is well."""
    torch.manual_seed(0)  # every rank makes the same model, and keeps its own part
    whole = LlamaForCausalLM(CONFIG).to(device, torch.bfloat16).eval()
    exact = decode(copy.deepcopy(whole).double(), torch.float64, KV_HEADS, device)
    model = shared(whole, init_device_mesh(device.type, (ranks,)))
    kv_heads = KV_HEADS // ranks
    eager = error(decode(model, torch.bfloat16, kv_heads, device), exact)
    options = {} if device.type == "cuda" else {"inner": "eager", "everywhere": True}
    compiled = torch.compile(model, backend="tilewright", options=options)
    ours = error(decode(compiled, torch.bfloat16, kv_heads, device), exact)
    wrong = [] if ours <= 1.25 * eager + ALLOWANCE else ["is less accurate than eager"]
    for report in reports():
        found = [site.pattern for site in report.matches]
        wrong += [f"{name} is not in each layer" for name in WANTED if found.count(name) != LAYERS]
    if rank == 0:
        for site in reports()[-1].matches:
            facts = " ".join(f"{key}={value}" for key, value in site.shapes.items())
            print(f"  {site.scope}  {site.pattern}  {facts}")
        print(f"  error against float64: {ours:.4f}; without tilewright: {eager:.4f}")
    return [f"rank {rank}: {what}" for what in wrong]


def main() -> int:
    if "RANK" not in os.environ:
        print("start it with: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
        return 2
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if KV_HEADS % ranks:
        print(f"--nproc-per-node: expected a divisor of {KV_HEADS}, got {ranks}")
        return 2
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=120))
    try:
        with torch.no_grad():
            wrong = run(rank, ranks, device)
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, wrong)
    finally:
        dist.destroy_process_group()
    told = [line for lines in found for line in lines]
    if rank == 0:
        good = "ranks is fused, and none is less accurate than without tilewright"
        print("\n".join(told) or f"each of {ranks} {good}")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
