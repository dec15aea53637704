"""Benchmark of `generate()` in tokens per second of wall-clock time, which includes the CPU's work.

    python benchmarks/generate.py --model llama3-8b [--layers 32] [--batches 1 16 64] [--short]
        [--out DIR]

`end_to_end_models.py` has the models; weights are random. A batch has prompts of different lengths,
padded on the left to 1000 tokens, and gets 128 new tokens, greedy. generate() runs the prompt in
eager mode and compiles its steps itself (`compile_config`, whose mode "reduce-overhead" gives
Inductor's CUDA graphs). Variants:

    eager              dynamic cache, nothing compiled
    stock              StaticCache, torch.compile
    tilewright         StaticCache, backend "tilewright"
    tilewright-paged   PagedCache, backend "tilewright"
    tilewright-deferred         StaticCache, backend "tilewright", `defer_stop_check(model)`
    tilewright-paged-deferred   PagedCache, the same

Each call of the compiled variants resets and reuses the same cache, so CUDA graphs are recorded
once; the eager variant makes a new dynamic cache for each call. Each batch size runs in a separate
process: all processes compile side by side, then each process has the GPU to itself, and warms up
each variant before it times the variant.

No call has an end token, so only the number of new tokens ends a call. Calls with an end token run
one more step with a deferred check; the times of the deferred variants do not include this step.

tokens: new tokens of the batch per second of whole calls, prompt included. steps: new tokens per
second after the prompt. same: the share of new tokens that equal eager's; with random weights the
scores of two tokens are sometimes nearly equal, and all tokens after such a choice differ.
undeferred: the share of new tokens that equal those of the same variant without `defer_stop_check`;
it must be 1. cache: memory of the cache in MiB. peak: memory of a call beyond model and cache, in
MiB. `--short` runs only "tilewright" and "tilewright-deferred", each timed once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from end_to_end_models import MODELS, build
from side_by_side import finished_rows, has_turn
from timing import keep
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache

from tilewright.compiler import reports
from tilewright.compiler.serving import stop_check
from tilewright.tools.paged_cache import PagedCache

PROMPT, NEW = 1000, 128
LAYERS = {"llama3-8b": 32, "qwen3-30b-a3b": 16, "deepseek-v2-lite": 27}
ROUNDS = 2
# For each variant, the backend of its steps and a function that makes its cache.
VARIANTS: dict[str, tuple[str | None, Callable[[Any, int], Any]]] = {
    "eager": (None, lambda config, length: DynamicCache(config=config)),
    "stock": ("inductor", lambda config, length: StaticCache(config=config, max_cache_len=length)),
    "tilewright": (
        "tilewright",
        lambda config, length: StaticCache(config=config, max_cache_len=length),
    ),
    "tilewright-paged": (
        "tilewright",
        lambda config, length: PagedCache(config, max_cache_len=length),
    ),
}
#: For each variant with a deferred check, the variant that is otherwise the same.
DEFERRED = {f"{name}-deferred": name for name in ("tilewright", "tilewright-paged")}
VARIANTS |= {name: VARIANTS[of] for name, of in DEFERRED.items()}
SHORT = ["tilewright", "tilewright-deferred"]


def prompts(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Returns random prompts. A share of b / (2 * batch) of the tokens of sequence b is padding."""
    torch.manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (batch, length), device=model.device)
    mask = torch.ones_like(ids)
    for b in range(batch):
        mask[b, : length * b // (2 * batch)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


class Variant:
    """One way to call generate(), with the cache that its calls use."""

    def __init__(self, model: Any, name: str, inputs: dict[str, torch.Tensor], new: int) -> None:
        self.model, self.name, self.inputs, self.new = model, name, inputs, new
        self.backend, self.make = VARIANTS[name]
        self.cache = self.fresh()

    def fresh(self) -> Any:
        length = self.inputs["input_ids"].shape[1] + self.new
        return self.make(self.model.config, length)

    def config(self, new: int) -> GenerationConfig:
        settings: dict[str, Any] = {"disable_compile": True}
        if self.backend is not None:
            settings = {"compile_config": CompileConfig(backend=self.backend)}
            settings["compile_config"]._compile_all_devices = True
        return GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, **settings)

    def __call__(self, new: int | None = None) -> torch.Tensor:
        """Calls generate() and returns the new tokens [batch, new]."""
        # All variants share one class, because the model would compile again for another class.
        stop_check.DEVICES = ("cuda",) if self.name in DEFERRED else ()
        if self.name == "eager":
            self.cache = self.fresh()
        else:
            self.cache.reset()
        given = self.inputs | {"past_key_values": self.cache}
        tokens = self.model.generate(**given, generation_config=self.config(new or self.new))
        return tokens[:, self.inputs["input_ids"].shape[1] :]

    def cache_mib(self) -> float:
        pools = [t for layer in self.cache.layers for t in (layer.keys, layer.values)]
        return sum(t.numel() * t.element_size() for t in pools if t is not None) / 2**20


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """Returns the mean wall-clock seconds of a call until the GPU has finished."""
    times = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return sum(times) / rounds


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_mib(call: Callable[[], Any]) -> float:
    if not torch.cuda.is_available():
        return 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def facts(
    model: Any, name: str, inputs: dict[str, torch.Tensor], new: int, rounds: int
) -> dict[str, Any]:
    """Returns times, memory and tokens of a variant's calls, after a warm-up."""
    variant = Variant(model, name, inputs, new)
    batch = inputs["input_ids"].shape[0]
    tokens = variant()
    assert tokens.shape == (batch, new)
    peak = peak_mib(variant)  # the warm-up recorded the CUDA graphs
    whole, first = seconds(variant, rounds), seconds(lambda: variant(1), rounds)
    return {
        "tokens": batch * new / whole,
        "steps": batch * (new - 1) / (whole - first),
        "prompt_s": first,
        "cache_mib": variant.cache_mib(),
        "peak_mib": peak,
        "answer": tokens,
    }


def prepare(model: Any) -> None:
    """Removes the end token from a model's config, so that generate() makes all requested tokens,
    and prepares the model for deferred checks."""
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.config.eos_token_id = None
    stop_check.defer_stop_check(model)


def warm_up(model: Any, names: list[str], inputs: dict[str, torch.Tensor], new: int) -> None:
    """Compiles the steps of all variants."""
    for name in dict.fromkeys(DEFERRED.get(name, name) for name in names):
        if VARIANTS[name][0] is not None:
            Variant(model, name, inputs, new)()


def measured(
    model: Any, names: list[str], inputs: dict[str, torch.Tensor], new: int, rounds: int
) -> dict[str, Any]:
    """Returns a row with the facts of each variant, in columns named `variant_fact`."""
    row: dict[str, Any] = {}
    answers = {}
    for name in names:
        found = facts(model, name, inputs, new, rounds)
        answers[name] = found.pop("answer")
        row |= {f"{name}_{fact}": value for fact, value in found.items()}
        for fact, other in (("same", "eager"), ("undeferred", DEFERRED.get(name))):
            if other in answers:
                row[f"{name}_{fact}"] = (answers[name] == answers[other]).float().mean().item()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return row


def run_batch(name: str, layers: int, batch: int, names: list[str], rounds: int) -> None:
    """Compiles one batch in its own process, waits for its turn, times it, and prints its row."""
    with torch.no_grad():
        model = build(name, layers)
        prepare(model)
        inputs = prompts(model, batch, PROMPT)
        warm_up(model, names, inputs, NEW)
        torch.cuda.empty_cache()
        ops = [match.op for report in reports() for match in report.matches]
        row = {"batch": batch, "layers": layers, "prompt": PROMPT, "new": NEW}
        row["fused"] = {op: ops.count(op) for op in dict.fromkeys(ops)}
        if not has_turn():
            return
        row |= measured(model, names, inputs, NEW, rounds)
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(LAYERS), required=True)
    parser.add_argument("--layers", type=int, help="by default 32, 16 or 27, by model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed calls of each variant")
    parser.add_argument("--short", action="store_true", help="two variants, timed once")
    parser.add_argument("--batch", type=int, help="one batch; set by the parent process")
    parser.add_argument("--hold", type=Path, help="start timing once this file exists")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    layers = given.layers or LAYERS[given.model]
    if given.short:
        given.variants, given.rounds = SHORT, 1
    if given.batch:
        run_batch(given.model, layers, given.batch, given.variants, given.rounds)
        return
    shared = ["--model", given.model, "--layers", str(layers), "--variants", *given.variants]
    shared += ["--rounds", str(given.rounds)]
    commands = {f"batch {b}": [__file__, *shared, "--batch", str(b)] for b in given.batches}
    rows = []
    results = f"{MODELS[given.model].results.removesuffix('_end_to_end')}_generate"
    for title, row in finished_rows(commands, given.hold):
        rows.append({"model": MODELS[given.model].title, **row})
        print(f"{title}, fused {row['fused']}")
        for name in given.variants:
            same = "".join(
                f"  {fact} {row[f'{name}_{fact}']:.2f}"
                for fact in ("same", "undeferred")
                if f"{name}_{fact}" in row
            )
            print(
                f"  {name:<25} {row[f'{name}_tokens']:8.0f} tokens/s  steps "
                f"{row[f'{name}_steps']:8.0f}  prompt {row[f'{name}_prompt_s']:6.3f} s{same}  "
                f"cache {row[f'{name}_cache_mib']:7.0f}  peak {row[f'{name}_peak_mib']:7.0f} MiB",
                flush=True,
            )
        keep(results, rows, given.out)


if __name__ == "__main__":
    main()
