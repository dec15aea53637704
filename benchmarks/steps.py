"""Benchmark of decode steps and prompts of many models, to compare with the cost model.

    python benchmarks/steps.py [--models llama3-8b ...] [--jobs 13] [--seconds 520] [--profile]
        [--tiny] [--out DIR]

`steps_models.py` has the models, at published widths with few layers and random weights, and the
cases of each; models with adapters need PEFT. A pass is that of torch.compile with backend
"tilewright", called as `generate()` calls it: with a static cache, positions, and a mask made
outside of the pass. It is captured as a CUDA graph; a row has the median of its microseconds. The
weights of one pass exceed the L2 cache, so every pass is cold.

A process for each model compiles the cases of the model, then has the GPU to itself; `--jobs`
processes compile side by side. A process compiles no further case once its part of `--seconds` is
over, so that all models have about equally many rows. Results go to benchmarks/results/steps.json
after each model. With --profile, steps_kernels.json has the microseconds of each kernel. With
--tiny, small models run on any device, to try the benchmark.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from bounds import copy_bytes_per_s
from decode_cache import CachedPass, generate_inputs, layer_widths, new_cache
from side_by_side import finished_rows, has_turn
from steps_models import WIDTHS, Case, build, cases_of
from timing import capture, interleaved_us, keep

from tilewright.compiler import reports

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS: dict[str, Any] = {} if DEVICE == "cuda" else {"everywhere": True, "inner": "eager"}
#: COMPILING is the share of a wave's time in which its processes may compile. PATIENCE is the
#: number of seconds after that time; a case that still compiles then is given up.
COMPILING, PATIENCE = 0.75, 25
#: Each step is timed in ROUNDS rounds of REPLAYS replays.
ROUNDS, REPLAYS = 12, 5


class Measured:
    """One row: the call of a case, its CUDA graph, and the fields that are known so far."""

    def __init__(self, facts: dict[str, Any], call: CachedPass) -> None:
        self.facts = facts
        self.call = call
        self.graph = capture([call.captured], warmup=2) if DEVICE == "cuda" else None

    def timed(self) -> dict[str, Any]:
        """Returns the row with its time."""
        if self.graph is None:
            start = time.perf_counter()
            self.call()
            return self.facts | {"tilewright": 1e6 * (time.perf_counter() - start)}
        graphs = {"tilewright": self.graph}
        us = interleaved_us(graphs, 1, ROUNDS, REPLAYS, before_round=self.call.rewind)
        return self.facts | {"tilewright": round(us["tilewright"], 2)}

    def kernels(self) -> list[tuple[str, int, float]]:
        """Returns (name, number, microseconds) of the kernels of one pass. The longest comes
        first."""
        from torch.profiler import ProfilerActivity, profile

        if self.graph is None:
            return []
        self.call.rewind()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(REPLAYS):
                self.graph.replay()
            torch.cuda.synchronize()
        found: dict[str, list[float]] = {}
        for event in profiled.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found.setdefault(event.name[:120], []).append(event.time_range.elapsed_us())
        summed = [
            (name, len(us) // REPLAYS, round(sum(us) / REPLAYS, 2)) for name, us in found.items()
        ]
        return sorted(summed, key=lambda kernel: -kernel[2])


def prepared(name: str, tiny: bool, until: float) -> Iterator[Measured | dict[str, Any]]:
    """Yields each case of a model with everything but its time. Yields a dict for a case that
    failed."""
    model, widths = build(name, DEVICE, tiny), layer_widths(build(name, "meta", tiny))
    for (batch, _, capacity), cases in groupby(cases_of(name, tiny), _kernels_of):
        if time.time() > until:
            return
        torch._dynamo.reset()
        forward = torch.compile(model, backend="tilewright", options=OPTIONS or None, dynamic=False)
        facts: dict[str, Any] = {}
        try:
            signal.alarm(max(int(until - time.time()), 0) + PATIENCE)
            cache = new_cache(model, batch, capacity, widths)
            for case in cases:
                before, start = len(reports()), time.time()
                call = _caller(model, forward, cache, case)
                call()
                # Cases that differ only in the tokens present share the compiled code.
                facts = _described(reports()[before:]) or facts
                own = {"model": name, "layers": model.config.num_hidden_layers} | asdict(case)
                yield Measured(own | facts, call)
                print(f"{name} {case}: {time.time() - start:.0f} s", file=sys.stderr, flush=True)
        except Exception as error:
            said = (str(error).splitlines() or [""])[0][:200]
            yield {"model": name, "batch": batch, "failed": f"{type(error).__name__}: {said}"}
        finally:
            signal.alarm(0)
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


def _kernels_of(case: Case) -> tuple[int, int, int]:
    """Returns the sizes that the kernels of a case depend on."""
    return case.batch, case.tokens, case.capacity


def _caller(model: Any, forward: Any, cache: Any, case: Case) -> CachedPass:
    size = (case.batch, case.tokens)
    ids = torch.randint(model.config.vocab_size, size, device=DEVICE)
    given = generate_inputs(model, cache, ids, case.start, padded=False)
    return CachedPass(forward, cache, case.start, {"input_ids": ids, **given})


def _described(found: Sequence[Any]) -> dict[str, Any]:
    """Returns the ops and misses of graphs. Returns an empty dict if there is no graph."""
    ops = [match.op for graph in found for match in graph.matches]
    misses = [miss.code for graph in found for miss in graph.misses]
    fused = {op: ops.count(op) for op in dict.fromkeys(ops)}
    return {"graphs": len(found), "fused": fused, "misses": misses} if found else {}


def run_model(given: argparse.Namespace) -> None:
    """Compiles one model's cases in its own process, waits for its turn, and prints its rows."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _give_up)
    with torch.no_grad():
        found = list(prepared(given.model, given.tiny, given.until))
        if not has_turn():
            return
        rows = [one.timed() if isinstance(one, Measured) else one for one in found]
        kernels = [
            {"model": given.model, **case_fields(one.facts), "kernels": one.kernels()}
            for one in found
            if given.profile and isinstance(one, Measured)
        ]
    print(json.dumps({"rows": rows, "kernels": kernels}), flush=True)


def case_fields(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row that identify its case."""
    return {name: facts[name] for name in ("batch", "tokens", "start", "capacity")}


def _give_up(*_: Any) -> None:
    raise TimeoutError("took too long to compile")


def waves(names: Sequence[str], jobs: int) -> list[list[str]]:
    """Divides models among waves of at most `jobs` processes. Each wave has models of all
    classes."""
    number = -(-len(names) // jobs)
    return [list(names[first::number]) for first in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--jobs", type=int, default=13, help="processes at once")
    parser.add_argument("--seconds", type=float, default=520, help="of the whole run, about")
    parser.add_argument("--profile", action="store_true", help="keep the times of kernels, too")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the benchmark")
    parser.add_argument("--model", help="one model; set by the parent process")
    parser.add_argument("--until", type=float, help="when to compile no further case; likewise")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    if given.model:
        run_model(given)
        return
    end = time.time() + given.seconds
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, str(max(1, (os.cpu_count() or 1) // given.jobs)))
    copied = None
    if DEVICE == "cuda":
        copied = round(copy_bytes_per_s())
        torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    ahead = waves(given.models, given.jobs)
    for number, names in enumerate(ahead):
        now = time.time()
        until = now + COMPILING * (end - now) / (len(ahead) - number)
        flags = [*["--tiny"][: given.tiny], *["--profile"][: given.profile]]
        shared = [__file__, "--until", str(until), *flags, "--model"]
        for name, made in finished_rows({name: [*shared, name] for name in names}):
            rows += [row | {"copy_bytes_per_s": copied} for row in made["rows"]]
            kernels += made["kernels"]
            print(f"{name}: {_said(made['rows'])}", flush=True)
            keep("steps", rows, given.out)
            if given.profile:
                keep("steps_kernels", kernels, given.out)
    failed = sum("failed" in row for row in rows)
    print(f"{len(rows) - failed} rows, {failed} failed, {end - time.time():.0f} s left")


def _said(rows: Sequence[dict[str, Any]]) -> str:
    return ", ".join(
        row.get("failed")
        or f"{row['batch']}x{row['tokens']}@{row['start']} {row['tilewright']:.0f}"
        for row in rows
    )


if __name__ == "__main__":
    main()
