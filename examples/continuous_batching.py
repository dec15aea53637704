"""Runs a model in transformers' continuous batching, with and without tilewright.

    python examples/continuous_batching.py                      a small Llama with random weights
    python examples/continuous_batching.py --model NAME         a checkpoint, in bfloat16
    python examples/continuous_batching.py --requests 64 --new-tokens 256

Requests of different lengths go through `generate_batch()` twice: with transformers' own attention,
and with tilewright. The program prints what is fused in each graph, the tokens per second of both
runs, and, in float32, where tokens differ. It uses a GPU if there is one. Without a GPU, the ops
run as their PyTorch references, and the times mean nothing.

The exit status is 1 if a layer is not fused, or if tokens of the small model differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from tilewright.compiler import reports
from tilewright.compiler.serving import BatchingConfig, disable, enable

SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
#: The engine's sizes on a machine without a GPU. On a GPU, the engine computes its sizes from the
#: GPU's memory.
ON_A_CPU = {
    "page_size": 16,
    "num_blocks": 256,
    "max_batch_tokens": 64,
    "max_requests_per_batch": 4,
    "max_blocks_per_request": 16,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the model both ways and prints the outcome; returns the exit status."""
    wanted = parsed(arguments)
    gpu = torch.cuda.is_available()
    model = loaded(wanted.model).to("cuda" if gpu else "cpu")
    prompts = made_prompts(wanted.requests, model.config.get_text_config().vocab_size)
    sizes = {} if gpu else ON_A_CPU
    options = {} if gpu else {"everywhere": True, "inner": "eager"}
    how = GenerationConfig(do_sample=False, max_new_tokens=wanted.new_tokens, eos_token_id=-1)

    expected = timed("transformers", model, prompts, how, ContinuousBatchingConfig(**sizes))
    if not enable(model):  # enable() has issued a warning that says why
        return 1
    before = len(reports())
    config = BatchingConfig(**sizes, options=options)
    found = timed("tilewright", model, prompts, how, config)
    disable(model)

    fused = show(reports()[before:], model.config.get_text_config().num_hidden_layers)
    differ = sum(one != other for one, other in zip(found, expected, strict=True))
    print(f"{differ} of {len(prompts)} requests have other tokens")
    return int(not fused or (wanted.model is None and differ > 0))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continuous batching by tilewright.")
    parser.add_argument("--model", help="a checkpoint's name or folder")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=12)
    return parser.parse_args(arguments)


def loaded(name: str | None) -> Any:
    """Returns a checkpoint in bfloat16, or the small model in float32."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMALL).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


def made_prompts(requests: int, vocabulary: int) -> list[list[int]]:
    """Returns random prompts. The first prompt has 5 tokens, and each further prompt has 13 tokens
    more than the one before."""
    generator = torch.Generator().manual_seed(1)
    lengths = [5 + 13 * number for number in range(requests)]
    return [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def timed(who: str, model: Any, prompts: list[list[int]], how: Any, config: Any) -> list[list[int]]:
    """Returns the new tokens of each request, and prints the tokens per second."""
    started = time.perf_counter()
    results = model.generate_batch(
        prompts, generation_config=how, continuous_batching_config=config
    ).values()
    seconds = time.perf_counter() - started
    tokens = [result.generated_tokens for result in results]
    print(f"{who}: {sum(map(len, tokens)) / seconds:.0f} tokens/s, warm-up and compiling included")
    return tokens


def show(graphs: list[Any], layers: int) -> bool:
    """Prints what is fused in each graph. Returns whether each graph has a fused site in each
    layer."""
    counts = []
    for graph in graphs:
        sites = [site.pattern for site in graph.matches]
        counts.append(sites.count("qkv_cache"))
        print(
            "graph: " + ", ".join(f"{name} x{sites.count(name)}" for name in dict.fromkeys(sites))
        )
    return bool(counts) and min(counts) == max(counts) == layers


if __name__ == "__main__":
    sys.exit(main())
