"""Counts what is fused in every causal language model of the installed transformers.

    python benchmarks/coverage.py [--models llama mixtral] [--part 1/4] [--jobs 2] [--limit 240]
    python benchmarks/coverage.py --coded      quantised formats x models; or --models llama+awq

The models are unmodified classes with small extents and random weights in bfloat16
(`coverage_models.py`); a batch has two sequences, one of them padded. Each model is called as
`generate()` calls it, with the inputs of its own `prepare_inputs_for_generation`. The cache is a
`StaticCache` if the class works with one (prefill and decode are compiled); otherwise it is the
cache that the class makes itself (only decode is compiled). Every graph runs three times on copies
of its inputs: in eager mode, compiled by tilewright, and in float64, as the reference with which
the other two runs are compared. Each model runs in a process with a time limit. No GPU is needed:
fused ops run their references.

Results go to benchmarks/results/coverage.json, row by row. Runs for different models, or for
different parts of all models, may run at the same time; rows of other models stay.
docs/coverage.md is generated from the whole file.
"""

from __future__ import annotations

import argparse
import fcntl
import inspect
import json
import logging
import os
import resource
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage_table
import torch
import transformers
from coverage_coded import coded_case, combinations
from coverage_models import NotSwept, small_model
from coverage_table import KEPT, MADE, SECTIONS
from timing import environment
from transformers import StaticCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tilewright.compiler import reports, tilewright
from tilewright.compiler.report.census import Census, Point
from tilewright.compiler.verify.sites import compared
from tilewright.patterns.language import CAPTURE
from tilewright.tools.files import write_whole

CACHE_LENGTH, PROMPT, SEEDS = 32, 7, 3
MEMORY = 10 << 30


class Judge:
    """A Dynamo backend that compiles with tilewright, and runs each graph in three ways.

    A judge keeps the results of each graph's first call. `errors` has a line for each graph that is
    less accurate than eager mode, and `unjudged` has one for each graph that cannot run in float64.
    The seconds of Dynamo and of tilewright are the processor time of this process. `points` is the
    census.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.unjudged: list[str] = []
        self.found: list[Any] = []
        self.points: list[Point] = []
        self.dynamo_s = self.ours_s = 0.0
        self.since = time.process_time()

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        begun = time.process_time()
        self.dynamo_s += begun - self.since
        compiled = tilewright(gm, inputs, options={"inner": "eager", "everywhere": True})
        self.ours_s += time.process_time() - begun
        self.found.append(reports()[-1])
        self.points += self.found[-1].points
        self.since = time.process_time()
        judged = not self.found[-1].matches

        def run(*given: Any) -> Any:
            nonlocal judged
            if not judged:
                judged = True
                outcome = compared(gm, compiled, given)
                if outcome.note:
                    self.unjudged.append(outcome.note)
                elif not outcome.good:
                    self.errors.append(
                        f"{outcome.fused_error:.1e} for {outcome.plain_error:.1e} of eager"
                    )
            result = compiled(*given)
            self.since = time.process_time()
            return result

        return run


def step_inputs(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any, new: int) -> Any:
    """Returns the keyword arguments with which `generate()` calls the model for the last `new`
    ids."""
    given: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        given["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    if cache is not None:
        given["past_key_values"] = cache
    first = new == ids.shape[1]
    given |= {"next_sequence_length": new, "is_first_iteration": first}
    made = model.prepare_inputs_for_generation(ids, **given)
    made.pop("is_first_iteration", None)
    return made | {"return_dict": True}


def static_cache(model: Any) -> tuple[Any, str]:
    """Returns (a static cache filled with a prompt, ""). If that fails, returns (None, the
    reason)."""
    try:
        cache = StaticCache(config=model.config, max_cache_len=CACHE_LENGTH)
        if not any(hasattr(layer, "keys") for layer in cache.layers):
            return None, "no layer with attention"
        ids, mask = tokens(model)
        model(**step_inputs(model, ids[:, :PROMPT], mask[:, :PROMPT], cache, PROMPT))
        model(**step_inputs(model, ids, mask, cache, 1))
    except Exception as error:
        return None, first_line(error)
    if not any(written(cache)):
        return None, "no layer writes keys into a StaticCache"
    return cache, ""


def written(cache: Any) -> list[Any]:
    """Returns the layers of a cache that hold keys."""
    return [
        layer
        for layer in cache.layers
        if isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.numel()
    ]


def tokens(model: Any, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids of a prompt and one more token [2, PROMPT + 1], and their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (2, PROMPT + 1), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return ids, mask


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def is_mixture(name: str, module: torch.nn.Module) -> bool:
    """Whether a module holds routed experts, either as `Experts` with stacked weights or as a list
    of experts."""
    kind = type(module).__name__
    if isinstance(module, torch.nn.ModuleList):
        return name.rpartition(".")[2] == "experts"
    stacked = kind.endswith("Experts") and not kind.endswith("ParallelExperts")
    return stacked or kind in ("JetMoeMoE", "JetMoeMoA")


def compiled_step(model: Any, made: dict[str, Any]) -> dict[str, Any]:
    """Calls a model once under the backend. Returns the matches and misses, the errors and the
    times."""
    torch._dynamo.reset()
    judge = Judge()
    row: dict[str, Any] = {}
    try:
        judge.since = time.process_time()
        torch.compile(model.forward, backend=judge)(**made)
    except Exception as error:
        row["failed"] = first_line(error)
    matches = [m for r in judge.found for m in r.matches]
    misses = [m for r in judge.found for m in r.misses]
    writes = [m.shapes["writes"] for m in matches if m.pattern == "cache_store"]
    row |= {
        "stored": sum(writes),
        "graphs": len(judge.found),
        "nodes": sum(r.nodes for r in judge.found),
        "fused": dict(Counter(m.pattern for m in matches)),
        "lost": tally(m for m in misses if m.is_lost),
        "advice": tally(m for m in misses if not m.is_lost),
        "said": sorted({str(m) for m in misses}),
        "notes": [n for r in judge.found for n in r.notes],
        "wrong": judge.errors,
        "unjudged": judge.unjudged,
        **census(judge),
        "dynamo_s": round(judge.dynamo_s, 3),
        "ours_s": round(judge.ours_s, 3),
    }
    return row


def census(judge: Judge) -> dict[str, Any]:
    """Counts the points of the census by their account, and lists the points that have none."""
    counted = Census(tuple(judge.points))
    breaks = [m for r in judge.found for m in r.misses if m.pattern == CAPTURE]
    counted = counted.spoken_for_by(breaks[0]) if breaks else counted
    told = Counter(point.account for point in counted.points)
    left = [f"{p.kind} {p.op} {p.scope} {p.source}" for p in counted.unaccounted]
    return {"points": dict(told), "unaccounted": left}


def tally(misses: Iterator[Any]) -> dict[str, int]:
    """Counts the misses by pattern and code."""
    counts: Counter[str] = Counter()
    for miss in misses:
        counts[f"{miss.pattern} {miss.code}"] += miss.count
    return dict(sorted(counts.items()))


def swept(name: str, seed: int) -> dict[str, Any]:
    """Returns the row of one model with one seed."""
    row: dict[str, Any] = {"model": name}
    try:
        model = small_model(name, seed=seed)
    except NotSwept as why:
        return row | {"skipped": str(why)}
    row["class"] = type(model).__name__
    row["parameters"] = sum(p.numel() for p in model.parameters())
    used: set[str] = set()
    for module_name, module in model.named_modules():
        if is_mixture(module_name, module):
            used.add(module_name)
    row["mixtures"] = len(used)
    ids, mask = tokens(model)
    cache, why = static_cache(model)
    row["static"] = cache is not None
    if cache is None:
        row["why_not_static"] = why
        made = step_inputs(model, ids[:, :PROMPT], mask[:, :PROMPT], None, PROMPT)
        past = model(**made)
        kept = {
            key: getattr(past, key, None)
            for key in ("past_key_values", "cache_params", "state", "mems")
        }
        held = next((value for value in kept.values() if value is not None), None)
        made = step_inputs(model, ids, mask, held, 1)
        row["decode"] = compiled_step(model, made)
        return row
    row["attention_layers"] = len(written(cache))
    rewind(cache, PROMPT)
    row["decode"] = compiled_step(model, step_inputs(model, ids, mask, cache, 1))
    cache.reset()
    prompt = ids[:, :PROMPT]
    made = step_inputs(model, prompt, torch.ones_like(prompt), cache, PROMPT)
    row["prefill"] = compiled_step(model, made)
    return row


def swept_coded(name: str, seed: int) -> dict[str, Any]:
    """Returns the row of a model with quantised weights, such as "llama+awq"."""
    row: dict[str, Any] = {"model": name}
    for phase in ("decode", "prefill"):
        model, made = coded_case(name, phase, seed)
        row[phase] = compiled_step(model, made)
    return row


def rewind(cache: Any, position: int) -> None:
    """Sets the number of tokens that a cache holds."""
    for layer in cache.layers:
        if isinstance(held := getattr(layer, "cumulative_length", None), torch.Tensor):
            held.fill_(position)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = position


def run_model(name: str) -> dict[str, Any]:
    """Returns the row of a model, with as many seeds as are needed to judge its numbers.

    Numbers count as wrong only if they are wrong with every seed. When the scores of two experts
    are nearly equal, a sum in another order can choose the other expert, in eager mode as well as
    in the fused graph.
    """
    begun = time.process_time()
    one = swept_coded if "+" in name else swept
    with torch.no_grad():
        for seed in range(SEEDS):
            row = one(name, seed)
            steps = [row[step] for step in ("decode", "prefill") if step in row]
            if not any(step["wrong"] for step in steps):
                break
    return row | {"seeds": seed + 1, "seconds": round(time.process_time() - begun, 1)}


def warm_up() -> None:
    """Compiles one model, so that imports and first-use costs do not count as any model's time."""
    with torch.no_grad():
        swept("llama", 0)
        swept("mixtral", 0)


def start(name: str, limit: int, folder: Path) -> int:
    """Forks a process that computes and writes the row of a model. Returns the process id."""
    if pid := os.fork():
        return pid
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        row = run_model(name)
    except BaseException as error:
        row = {"model": name, "failed": first_line(error), "trace": traceback.format_exc()[-1500:]}
    (folder / f"{name}.json").write_text(json.dumps(row))
    os._exit(0)


def finished(names: Sequence[str], jobs: int, limit: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of models as they are finished. `jobs` processes run at a time."""
    waiting, running = list(reversed(names)), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop()
                running[start(name, limit, Path(folder))] = name
            pid, status = os.wait()
            name = running.pop(pid)
            file = Path(folder, f"{name}.json")
            died = f"died by signal {status & 127}, or took more than {limit} s"
            yield json.loads(file.read_text()) if file.exists() else {"model": name, "failed": died}


def part_of(names: Sequence[str], part: str) -> list[str]:
    """Returns the names of part "i/n", where i counts from 1. The part has every n-th name,
    starting with the i-th.

    Neighbouring models take about the same time, so all parts take about the same time.
    """
    which, count = map(int, part.split("/"))
    return list(names)[which - 1 :: count]


def keep(file: Path, row: dict[str, Any]) -> None:
    """Puts a row into the file of results. Takes a lock first, because other runs may write the
    file at the same time."""
    facts = environment() | {"transformers": transformers.__version__}
    facts["command"] = "python benchmarks/coverage.py"
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        known = json.loads(file.read_text("utf-8")) if file.exists() else {}
        # A row without a date and versions has the date and versions of the file.
        kept = {
            section: [{n: known[n] for n in MADE} | old for old in known.get(section, [])]
            for section in SECTIONS
        }
        section = SECTIONS["+" in row["model"]]
        others = [old for old in kept[section] if old["model"] != row["model"]]
        others.append(row | {name: facts[name] for name in MADE})
        kept[section] = sorted(others, key=lambda old: old["model"])
        write_whole(file, json.dumps(facts | kept, indent=1) + "\n")
    finally:
        os.close(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument(
        "--coded", action="store_true", help="sweep quantised formats x models instead"
    )
    parser.add_argument("--part", default="1/1", help="i/n: every n-th model, from the i-th on")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--limit", type=int, default=120, help="CPU seconds of a model at most")
    parser.add_argument("--out", type=Path, help="folder for the results; docs/coverage.md stays")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    warm_up()
    file = KEPT if given.out is None else given.out / KEPT.name
    names = combinations() if given.coded else given.models
    for row in finished(part_of(names, given.part), given.jobs, given.limit):
        print(line(row), flush=True)
        keep(file, row)
        if given.out is None:
            coverage_table.main()


def line(row: dict[str, Any]) -> str:
    """Describes a row for the output of a run."""
    if "decode" not in row:
        return f"{row['model']:>24}  {row.get('skipped') or row.get('failed')}"
    text = f"{row['model']:>24}  "
    if "static" in row:
        text += f"{row['attention_layers']}a" if row["static"] else f"- ({row['why_not_static']})"
        text += f" {row['mixtures']}m"
    text += f" {row['seconds']}s x{row['seeds']}"
    for phase in ("decode", "prefill"):
        if phase in row:
            step = row[phase]
            text += f"\n{'':>26}{phase}: {step['fused']} lost {step['lost']}"
            text += f" advice {step['advice']}" if step["advice"] else ""
            for word in ("failed", "wrong", "unjudged", "notes", "unaccounted"):
                text += f" {word.upper()} {step[word]}" if step.get(word) else ""
            text += f" graphs {step['graphs']}" if step["graphs"] != 1 else ""
    return text


if __name__ == "__main__":
    main()
