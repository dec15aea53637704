"""Benchmark of whole forward passes on a CPU, where tilewright leaves graphs unchanged.

    python benchmarks/cpu_step.py [--rounds 25 --out DIR]

The model is a Llama of four layers and 1024 columns in bfloat16, called with a mask and a static
cache of 2048 tokens that holds 512. Eager is Dynamo's backend "eager". Stock is compiled and timed
twice, to show by how much the times of one program differ. `same program` says whether Inductor
emitted the same code for tilewright as for stock. Results go to benchmarks/results/cpu_step.json.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import keep
from torch._inductor.utils import run_and_get_code
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

CACHED, MAX_LENGTH = 512, 2048
SHAPES = ((1, 1), (8, 1), (1, 128))
#: For each variant, its arguments of torch.compile.
VARIANTS: dict[str, dict[str, str]] = {
    "eager": {"backend": "eager"},
    "stock": {},
    "stock again": {},
    "tilewright": {"backend": "tilewright"},
}


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8192,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def new_step(model: LlamaForCausalLM, batch: int, tokens: int, how: dict[str, str]) -> Any:
    """Returns a pass over a new cache, as a function without arguments."""
    config = model.config
    cache = StaticCache(config=config, max_cache_len=MAX_LENGTH)
    heads = config.num_key_value_heads
    cache.early_initialization(batch, heads, config.head_dim, torch.bfloat16, torch.device("cpu"))
    ids = torch.randint(config.vocab_size, (batch, tokens))
    mask = torch.ones(batch, MAX_LENGTH, dtype=torch.int64)
    compiled = torch.compile(model, **how)

    def step() -> torch.Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(CACHED)
        with torch.no_grad():
            return compiled(ids, past_key_values=cache, attention_mask=mask).logits

    return step


def program(step: Callable[[], Any]) -> str:
    """Returns the code that Inductor emits for a step, without the number of the graph."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(step)
    return re.sub(r"AOT ID: \S+", "", "\n".join(codes))


def milliseconds(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns the median milliseconds of each step. Each round runs the steps in a random order."""
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def measure(model: LlamaForCausalLM, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    steps = {name: new_step(model, batch, tokens, how) for name, how in VARIANTS.items()}
    same = program(steps["stock"]) == program(steps["tilewright"])
    torch._dynamo.reset()
    return {"batch": batch, "tokens": tokens, "same_program": same} | {
        "ms": milliseconds(steps, rounds)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    model, rows = new_model(), []
    for batch, tokens in SHAPES:
        rows.append(measure(model, batch, tokens, given.rounds))
        times = "  ".join(f"{name} {ms:.2f}" for name, ms in rows[-1]["ms"].items())
        print(f"{batch} x {tokens}: {times} ms; same program: {rows[-1]['same_program']}")
    keep("cpu_step", rows, given.out)


if __name__ == "__main__":
    main()
