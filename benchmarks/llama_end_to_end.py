"""Hugging Face Llama-3-8B (true dims, fewer layers), static cache: eager, stock, tilewright.

    python benchmarks/llama_end_to_end.py [--layers 8] [--cases 1x1 64x1] [--out DIR]

Whole forward passes in CUDA graphs, in microseconds. The weights of one pass exceed the L2 cache
many times, so every pass is cold.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from decode_cache import new_cache, rewind
from timing import capture, interleaved_us, keep
from transformers import LlamaConfig, LlamaForCausalLM

from tilewright.compiler import reports

MAX_LENGTH = 2048
CASES = ("1x1", "16x1", "64x1", "1x1024")  # batch x tokens
START = 1000


def build(layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval()


def measure(model: Any, batch: int, tokens: int) -> dict[str, Any]:
    torch._dynamo.reset()
    position = START if tokens == 1 else 0
    ids = torch.randint(0, 128256, (batch, tokens), device="cuda")
    variants = {
        "eager": model,
        "stock": torch.compile(model),
        "tilewright": torch.compile(model, backend="tilewright"),
    }
    caches = {name: new_cache(model, batch, MAX_LENGTH) for name in variants}
    graphs, outputs = {}, {}
    for name, forward in variants.items():

        def call(forward=forward, cache=caches[name]):
            rewind(cache, position)
            return forward(input_ids=ids, past_key_values=cache, use_cache=True).logits

        outputs[name] = call().float()
        graphs[name] = capture([call], warmup=2)
    fused = len(reports()[-1].matches)
    row = {"batch": batch, "tokens": tokens, "layers_fused": fused}
    row |= interleaved_us(graphs, 1, rounds=12, replays=10)
    row["speedup_over_best"] = min(row["eager"], row["stock"]) / row["tilewright"]
    exact = outputs["eager"]
    for name in ("stock", "tilewright"):
        row[f"{name}_difference"] = ((outputs[name] - exact).norm() / exact.norm()).item()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    model = build(given.layers)
    rows = []
    with torch.no_grad():
        for batch, tokens in (map(int, case.split("x")) for case in given.cases):
            rows.append(measure(model, batch, tokens))
            r = rows[-1]
            print(
                f"{batch:3} x {tokens:4}  eager {r['eager']:8.0f}  stock {r['stock']:8.0f}  "
                f"tilewright {r['tilewright']:8.0f} us  {r['speedup_over_best']:.2f}x  "
                f"{r['layers_fused']} layers fused  differences {r['stock_difference']:.1e} "
                f"{r['tilewright_difference']:.1e}",
                flush=True,
            )
            keep("llama3_8b_end_to_end", rows, given.out)


if __name__ == "__main__":
    main()
