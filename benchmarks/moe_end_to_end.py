"""Hugging Face Qwen3-30B-A3B (true dims, fewer layers), static cache: eager, stock, tilewright.

    python benchmarks/moe_end_to_end.py [--layers 8] [--cases 1x1 64x1] [--out DIR]

Whole forward passes in CUDA graphs, in microseconds; experts by Hugging Face's `grouped_mm`. Each
case is a process: all compile side by side, then each has the GPU to itself. The weights of one
pass exceed the L2 cache many times, so every pass is cold. floor: the bytes of the weights in use
over the copy rate of the same run, where that is what bounds a pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bounds import copy_bytes_per_s
from decode_cache import new_cache, rewind
from timing import capture, interleaved_us, keep
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tilewright.compiler import reports

MAX_LENGTH = 2048
CASES = ("1x1", "16x1", "64x1", "1x1024")  # batch x tokens
START = 1000
READY = "ready"
VOCABULARY = 151936


def build(layers: int) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM._from_config(
            config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        )
    for name, parameter in model.named_parameters():
        # Expert weights are left as they were allocated by some releases.
        if "experts" in name:
            parameter.data.normal_(std=0.02)
    return model.eval().requires_grad_(False)


def floor_us(model: Any, tokens: int, copy: float) -> float:
    """Time to read what a pass needs of the weights, if tokens pick experts at random."""
    config = model.config
    share = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens
    read = 0.0
    for name, parameter in model.named_parameters():
        if "embed" not in name:
            size = parameter.numel() * parameter.element_size()
            read += size * (share if ".experts." in name else 1.0)
    return 1e6 * read / copy


def prepared(model: Any, batch: int, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the row so far, graphs by variant) of one case."""
    position = START if tokens == 1 else 0
    ids = torch.randint(0, VOCABULARY, (batch, tokens), device="cuda")
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
    ops = [match.op for match in reports()[-1].matches]
    row: dict[str, Any] = {"batch": batch, "tokens": tokens}
    row["fused"] = {op: ops.count(op) for op in dict.fromkeys(ops)}
    exact = outputs["eager"]
    for name in ("stock", "tilewright"):
        row[f"{name}_difference"] = ((outputs[name] - exact).norm() / exact.norm()).item()
    return row, graphs


def run_case(layers: int, case: str) -> None:
    """A process of its own: compiles, says so, times when it is told to, prints the row."""
    batch, tokens = map(int, case.split("x"))
    with torch.no_grad():
        model = build(layers)
        row, graphs = prepared(model, batch, tokens)
        print(READY, flush=True)
        if not sys.stdin.readline():  # whoever drives this is gone
            return
        row |= interleaved_us(graphs, 1, rounds=12, replays=5)
        row["floor"] = floor_us(model, batch * tokens, copy_bytes_per_s())
        row["speedup_over_best"] = min(row["eager"], row["stock"]) / row["tilewright"]
    print(json.dumps(row), flush=True)


def started(layers: int, case: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--layers", str(layers), "--case", case]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def is_ready(process: subprocess.Popen[str]) -> bool:
    """Waits for a case to have compiled; False where it ended before."""
    assert process.stdout is not None
    return any(line.strip() == READY for line in process.stdout)


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Lets a case time itself; its row."""
    lines = process.communicate("go\n")[0].splitlines()
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--case", help="one case, driven by another process")
    parser.add_argument("--hold", type=Path, help="times nothing before this file exists")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    if given.case:
        run_case(given.layers, given.case)
        return
    # All compile at once; then each has the GPU to itself.
    processes = {case: started(given.layers, case) for case in given.cases}
    ready = {case: is_ready(process) for case, process in processes.items()}
    print(f"compiled: {ready}", flush=True)
    while given.hold is not None and not given.hold.exists():
        time.sleep(0.2)
    rows = []
    for case, process in processes.items():
        if not ready[case]:
            print(f"{case}: failed")
            continue
        rows.append(finished(process))
        r = rows[-1]
        print(
            f"{case:>7}  eager {r['eager']:8.0f}  stock {r['stock']:8.0f}  tilewright "
            f"{r['tilewright']:8.0f} us  floor {r['floor']:8.0f}  {r['speedup_over_best']:.2f}x  "
            f"fused {r['fused']}  differences {r['stock_difference']:.1e} "
            f"{r['tilewright_difference']:.1e}",
            flush=True,
        )
        keep("qwen3_30b_a3b_end_to_end", rows, given.out)


if __name__ == "__main__":
    main()
