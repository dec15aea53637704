"""Benchmark of whole Hugging Face models with fewer layers: eager, stock torch.compile, tilewright.

    python benchmarks/end_to_end.py --model deepseek-v2-lite [--layers 8] [--cases ..] [--out DIR]

`end_to_end_models.py` has the models. Whole forward passes are captured as CUDA graphs and timed in
microseconds. A case is batch x tokens with a static cache; the model is called as `generate()`
calls it, with positions and a 4-D mask made outside of the pass. "-padded": the prompts differ in
length, so shorter ones are padded on the left. "-nomask": no mask is given, as in a call by hand.
"-nocache": no cache is given. "2x64@1900": the cache holds 1900 tokens of each sequence before the
pass; without a number it holds 1000 if there is one new token, and none otherwise. The cache is
rewound between rounds of replays; only for prompts does the captured graph itself rewind the cache.
Each case runs in a separate process: all processes compile side by side, then each process has the
GPU to itself. The weights of one pass exceed the L2 cache many times, so every pass is cold.

floor: the time to read the weights in use, and in a decode step the tokens present, at the copy
rate of the same run; it is a bound only where memory limits the pass. peak: memory of a pass beyond
model and cache, in MiB. Differences are relative to eager's logits, in the Frobenius norm. With
random weights, the scores of two experts are sometimes nearly equal, and a sum in another order
then chooses the other expert: after three layers of Qwen3's dims, the differences from float64 are
0.18 for eager, 0.11 for stock and 0.17 for tilewright.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bounds import copy_bytes_per_s
from decode_cache import CachedPass, generate_inputs, new_cache, padded_tokens, widths
from end_to_end_models import MODELS, build
from side_by_side import finished_rows, has_turn
from timing import capture, interleaved_us, keep

from tilewright.compiler import reports

# The capacity of a cache in tokens. It is larger if a prompt is longer.
MAX_LENGTH = 2048
START = 1000


def floor_us(model: Any, share: float, present: int, copy: float) -> float:
    """Returns the microseconds to read a pass's weights, and `present` cached tokens of all layers.

    share: the share of the experts that have tokens. copy: bytes per second.
    """
    read = 0.0
    for name, parameter in model.named_parameters():
        if "embed" not in name:
            size = parameter.numel() * parameter.element_size()
            read += size * (share if ".experts." in name else 1.0)
    heads, *columns = widths(model.config)
    read += 2.0 * present * heads * sum(columns) * model.config.num_hidden_layers
    return 1e6 * read / copy


def peak_mib(call: Any) -> float:
    """Returns the peak memory of a call in MiB, beyond the memory allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def caller(model: Any, forward: Any, case: Case, ids: torch.Tensor) -> Any:
    """Returns a function that calls `forward` as a case says: a `CachedPass` on its own cache, if
    the case has one."""
    if case.kind == "nocache":
        return lambda: forward(input_ids=ids, use_cache=False).logits
    cache = new_cache(model, case.batch, max(MAX_LENGTH, case.position + case.tokens))
    given: dict[str, Any] = {}
    if case.kind != "nomask":
        padded = case.kind == "padded"
        given = generate_inputs(model, cache, ids, case.position, padded=padded)
    return CachedPass(forward, cache, case.position, {"input_ids": ids, **given})


@dataclass(frozen=True)
class Case:
    """A case such as "16x1-padded". kind: "mask", "padded", "nomask" or "nocache". position: the
    number of tokens in the cache before the pass."""

    batch: int
    tokens: int
    kind: str
    position: int

    @classmethod
    def of(cls, text: str) -> Case:
        size, _, kind = text.partition("-")
        size, _, position = size.partition("@")
        batch, tokens = map(int, size.split("x"))
        usual = START if tokens == 1 else 0
        return cls(batch, tokens, kind or "mask", int(position or usual))


def real_tokens(case: Case) -> torch.Tensor:
    """Returns a bool mask [batch, tokens]. It is True for tokens that are not padding.

    Kernels differ in the attention of a query that sees no key (tilewright's, and the CPU's, give
    zeros), so padding is not compared.
    """
    padding = torch.zeros(case.batch, dtype=torch.int64, device="cuda")
    if case.kind == "padded":
        padding = padded_tokens(case.batch, case.position + case.tokens)
    places = case.position + torch.arange(case.tokens, device="cuda")
    return places >= padding[:, None]


def prepared(model: Any, case: Case) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Returns (the row so far, the graphs by variant, the calls that own the memory of the graphs)
    of a case."""
    ids = torch.randint(0, model.config.vocab_size, (case.batch, case.tokens), device="cuda")
    variants = {
        "eager": model,
        "stock": torch.compile(model),
        "tilewright": torch.compile(model, backend="tilewright"),
    }
    row: dict[str, Any] = {"batch": case.batch, "tokens": case.tokens, "kind": case.kind}
    row |= {"present": case.position} if case.tokens > 1 and case.position else {}
    row["layers"] = model.config.num_hidden_layers
    graphs, outputs, calls = {}, {}, []
    for name, forward in variants.items():
        call = caller(model, forward, case, ids)
        calls.append(call)
        outputs[name] = call().float()
        row[f"{name}_peak"] = peak_mib(call)
        graphs[name] = capture([getattr(call, "captured", call)], warmup=2)
    found = reports()[-1]
    ops = [match.op for match in found.matches]
    row["fused"] = {op: ops.count(op) for op in dict.fromkeys(ops)}
    row["misses"] = [miss.code for miss in found.misses]
    exact = outputs["eager"]
    real = real_tokens(case)
    for name in ("stock", "tilewright"):
        difference = (outputs[name] - exact)[real].norm() / exact[real].norm()
        row[f"{name}_difference"] = difference.item()
    return row, graphs, calls


def run_case(name: str, layers: int, text: str) -> None:
    """Compiles one case in its own process, waits for its turn, times it, and prints its row."""
    with torch.no_grad():
        model, case = build(name, layers), Case.of(text)
        row, graphs, calls = prepared(model, case)
        if not has_turn():
            return
        cached = [call for call in calls if isinstance(call, CachedPass)]
        row |= interleaved_us(
            graphs, 1, rounds=12, replays=5, before_round=lambda: [one.rewind() for one in cached]
        )
        del calls  # the graphs used their caches and tokens until here
        known = MODELS[name]
        idle = 1 - known.experts_per_token / known.experts
        share = 1 - idle ** (case.batch * case.tokens)
        present = case.batch * (case.position + case.tokens) if case.position else 0
        row["floor"] = floor_us(model, share, present, copy_bytes_per_s())
        row["speedup_over_best"] = min(row["eager"], row["stock"]) / row["tilewright"]
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cases", nargs="+", help="by default the model's own cases")
    parser.add_argument("--case", help="one case; set by the parent process")
    parser.add_argument("--hold", type=Path, help="start timing once this file exists")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    if given.case:
        run_case(given.model, given.layers, given.case)
        return
    shared = ["--model", given.model, "--layers", str(given.layers)]
    commands = {
        case: [__file__, *shared, "--case", case]
        for case in given.cases or MODELS[given.model].cases
    }
    rows = []
    for case, r in finished_rows(commands, given.hold):
        rows.append({"model": MODELS[given.model].title, **r})
        print(
            f"{case:>14}  eager {r['eager']:8.0f}  stock {r['stock']:8.0f}  tilewright "
            f"{r['tilewright']:8.0f} us  floor {r['floor']:8.0f}  {r['speedup_over_best']:.2f}x  "
            f"fused {r['fused']} missed {r['misses']}  differences {r['stock_difference']:.1e} "
            f"{r['tilewright_difference']:.1e}  peak {r['stock_peak']:.0f} "
            f"{r['tilewright_peak']:.0f} MiB",
            flush=True,
        )
        keep(MODELS[given.model].results, rows, given.out)


if __name__ == "__main__":
    main()
