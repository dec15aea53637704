"""Benchmark of continuous batching: `generate_batch()` with tilewright and with transformers alone.

    python benchmarks/serving.py --models llama3-8b [--layers 32] [--variants tilewright sdpa-0]
        [--workloads A B C] [--share 0.25] [--decode 1 8 64] [--seconds 280] [--out DIR]

`end_to_end_models.py` has the models; weights are random. Variants:

    tilewright          `enable(model)` and a `BatchingConfig`
    tilewright-static   the same with `decode_compile_config.dynamic = False`
    sdpa-0 ... sdpa-3   transformers alone, with this `default_compile_level`; a model without SDPA
                        has eager attention, and steps of 128 tokens
    flash-2, flash-3    transformers alone with its flash attention, where its package is installed

Each variant uses CUDA graphs and asynchronous batching if it does so by default. The workloads,
written as requests x prompt tokens -> new tokens, are: A 64 x 256..1024 -> 256, B 32 x 256 -> 2048,
and C 512 x 128 -> 64. `--share` scales the new tokens of A and B, and the requests of C.

Each variant of a model runs in a separate process: all processes compile side by side, then each
process has the GPU to itself. A process compiles and warms up, while the other processes do the
same (`warm` has the seconds). Then it measures, and prints each row at once. A row is kept as soon
as it is known, so that nothing is lost if the time (`--seconds`) ends.

tokens: new tokens per second of a whole call of `generate_batch()`. The first call with a workload
also captures CUDA graphs for prompts of its sizes; the second call ("again") has other prompts of
the same lengths. peak: memory in GiB. same: the share of new tokens that equal those of the first
variant; with random weights the scores of two tokens are sometimes nearly equal, and all tokens of
a request after such a choice differ.

Decode steps have requests of 1000 tokens each, whose keys are zeros: no prompt is run. wall: the
milliseconds of a step of the engine, with its work on the host. gpu: the milliseconds between two
events on the engine's stream, before the model and after the sampling; without CUDA graphs, this
time includes waits for the host. kernels: the milliseconds of the step's kernels alone, by torch's
profiler, and the number of kernels.
floor: the milliseconds to read the weights in use and the keys and values at the copy rate of the
same run.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bounds import copy_bytes_per_s
from coverage import first_line
from end_to_end_models import MODELS, build
from side_by_side import has_turn, printed_rows
from timing import keep
from torch.profiler import ProfilerActivity, profile
from transformers import ContinuousBatchingConfig, GenerationConfig

from tilewright.compiler import reports
from tilewright.compiler.serving import BatchingConfig, enable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS: dict[str, Any] = {} if DEVICE == "cuda" else {"everywhere": True}
LAYERS = {
    "llama3-8b": 32,
    "qwen3-30b-a3b": 16,
    "gpt-oss-20b": 8,
    "gemma3-12b": 8,
    "deepseek-v2-lite": 27,
}
LEVELS = range(4)
VARIANTS = (
    *("tilewright", "tilewright-static"),
    *(f"sdpa-{level}" for level in LEVELS),
    *("flash-2", "flash-3"),
)
#: The packages that transformers' own flash attention needs.
FLASH = {"flash-2": "flash_attn", "flash-3": "flash_attn_interface"}
#: Fields of a config with which this script can be tried without a GPU.
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PAGE, TOKENS = 256, 1000
#: WARM is the number of steps that run before a decode step is timed. TIMED is the number of timed
#: steps, and PROFILED the number of profiled steps. No page becomes full during these steps.
WARM, TIMED, PROFILED = 4, 20, 6
#: The number of tokens in a step of eager attention, which computes all scores.
EAGER_TOKENS = 128
#: A second call with a workload follows only a call that took less than this time.
SHORT_SECONDS = 12.0


@dataclass(frozen=True)
class Workload:
    """Requests with prompts of `shortest` to `longest` tokens, and `new` new tokens each.

    `scales` names the field that `--share` scales.
    """

    requests: int
    shortest: int
    longest: int
    new: int
    scales: str = "new"

    def scaled(self, share: float) -> Workload:
        return replace(self, **{self.scales: max(1, round(getattr(self, self.scales) * share))})

    def lengths(self) -> list[int]:
        draw = random.Random(1)
        return [draw.randint(self.shortest, self.longest) for _ in range(self.requests)]

    def prompts(self, vocabulary: int, turn: int) -> list[list[int]]:
        """Returns random prompts. Prompts of another turn have the same lengths, and share no
        prefix."""
        draw = random.Random(100 + turn)
        return [draw.choices(range(1, vocabulary), k=length) for length in self.lengths()]

    def tokens(self) -> int:
        return sum(self.lengths()) + self.requests * self.new


WORKLOADS = {
    "A": Workload(64, 256, 1024, 256),
    "B": Workload(32, 256, 256, 2048),
    "C": Workload(512, 128, 128, 64, "requests"),
}


def chosen(given: argparse.Namespace) -> dict[str, Workload]:
    """Returns the requested workloads at their share."""
    return {name: WORKLOADS[name].scaled(given.share) for name in given.workloads}


def say(name: str, text: str, since: float) -> None:
    """Reports the progress of a process on stderr."""
    print(f"  [{name}] {text} after {time.monotonic() - since:.0f} s", file=sys.stderr, flush=True)


class Engine:
    """A model with one manager of continuous batching, which all measurements use."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.variant = given, given.variant
        fields = SMALL if given.small else None
        self.model = build(given.model, given.layers, DEVICE, fields)
        self.model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)
        self.model.config.eos_token_id = None
        self.settings = self._settings()

    def _settings(self) -> ContinuousBatchingConfig:
        """Returns the settings of the variant, and prepares the model for it."""
        shared = self._sizes()
        kind, _, number = self.variant.partition("-")
        if kind == "tilewright":
            if not enable(self.model):
                raise RuntimeError("enable() left the model as it is")
            settings = BatchingConfig(**shared, options=OPTIONS)
            if number == "static":
                settings.decode_compile_config.dynamic = False
            return settings
        if kind == "flash":
            self.model.set_attn_implementation(f"flash_attention_{number}")
            return ContinuousBatchingConfig(**shared)
        self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
        if not self.model._supports_sdpa:
            shared["max_batch_tokens"] = EAGER_TOKENS
        shared["default_compile_level"] = int(number)
        return ContinuousBatchingConfig(auto_switch_to_flash=False, **shared)

    def _sizes(self) -> dict[str, Any]:
        """Returns bounds of the engine's memory, so that several processes have room."""
        works = chosen(self.given).values()
        requests = [work.requests for work in works] + self.given.decode
        longest = [work.longest + work.new for work in works] + [TOKENS + PAGE]
        present = [work.tokens() for work in works] + [
            n * (TOKENS + PAGE) for n in self.given.decode
        ]
        # The scheduler keeps a share of the memory free from new requests.
        cached = self.given.cache_tokens or 1.2 * max(present)
        return {
            "num_blocks": math.ceil(cached / PAGE),
            "max_requests_per_batch": max(requests),
            "max_blocks_per_request": 2 * math.ceil((max(longest) / PAGE + 1) / 2),
            "max_batch_tokens": self.given.batch_tokens,
        }

    def call(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Calls `generate_batch()`, whose manager is kept, and returns the new tokens. Raises
        RuntimeError if a request fails."""
        results = self.model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=self.settings,
            persistent_manager=True,
        )
        errors = {result.error for result in results.values()} - {None}
        if errors or len(results) < len(prompts):
            raise RuntimeError(f"{len(results)} of {len(prompts)} requests; {' '.join(errors)}")
        return [result.generated_tokens for result in results.values()]

    def warm_up(self) -> None:
        """Lets the engine compile and capture its graphs, and runs a few requests."""
        size = self.model.config.vocab_size
        self.call(Workload(4, 100, 300, 4).prompts(size, -1), 4)

    @property
    def manager(self) -> Any:
        return self.model._cached_continuous_batching_manager

    def facts(self) -> dict[str, Any]:
        config = self.manager.continuous_batching_config
        ours = self.variant.startswith("tilewright")
        attention = "tilewright" if ours else self.model.config._attn_implementation
        ops = Counter(match.op for report in reports() for match in report.matches)
        return {
            "attention": attention,
            "cuda_graphs": config.use_cuda_graph,
            "asynchronous": config.use_async_batching,
            "max_batch_tokens": config.max_batch_tokens,
            "cache_tokens": config.num_blocks * config.page_size,
            "graphs": len(reports()),
            "fused": dict(ops),
            "weights_gib": sum(p.nbytes for p in self.model.parameters()) / 2**30,
        }


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def memory_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0


def workload_row(engine: Engine, work: Workload, turn: int) -> dict[str, Any]:
    """Returns tokens per second and peak memory of a whole call, and its answers."""
    prompts = work.prompts(engine.model.config.vocab_size, turn)
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    answers = engine.call(prompts, work.new)
    synchronize()
    seconds = time.perf_counter() - start
    return {
        "requests": work.requests,
        "prompt": sum(work.lengths()),
        "new": work.new,
        "seconds": seconds,
        "tokens": work.requests * work.new / seconds,
        "peak_gib": memory_gib(),
        "answers": answers,
    }


class Decoding:
    """An engine in which requests of `TOKENS` tokens decode. Each step is called directly."""

    def __init__(self, engine: Engine, requests: int) -> None:
        self.model = engine.model
        # This gives the model the attention of the kept manager again.
        self.manager = self.model.init_continuous_batching(None, engine.settings)
        self.manager.background_thread_status.clear()
        self.processor = self.manager.batch_processor
        self.processor.reset()
        self.in_flight = 0
        self.spans: list[tuple[torch.Event, torch.Event]] = []
        self.compute = self.processor.model_runner.compute_batch
        self.processor.model_runner.compute_batch = self._timed
        for number in range(requests):
            self._add(f"decode_{number}")

    def _add(self, name: str) -> None:
        from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

        # With this length, all steps write into one page: the last step ends before the next page
        # begins.
        length = TOKENS // PAGE * PAGE + PAGE - (WARM + TIMED + PROFILED + 4)
        state = RequestState(request_id=name, initial_tokens=[1] * length, max_new_tokens=None)
        state._status = RequestStatus.DECODING
        state.tokens_to_process, state.position_offset = [1], length
        state.remaining_prefill_tokens = []
        if not self.processor.cache.can_store_request_tokens(state, 1):
            self.end()
            raise RuntimeError("the requests do not fit into the engine's memory")
        self.processor.scheduler.active_requests[name] = state

    def _timed(self, *args: Any) -> None:
        """Calls the model between two events on its stream."""
        stream = self.processor.inputs_and_outputs.compute_stream
        if stream is None:
            self.compute(*args)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        self.compute(*args)
        end.record(stream)
        self.spans.append((start, end))

    def step(self) -> None:
        """Does the work that the engine's thread does for a step."""
        if not self.processor.prepare_next_batch():
            raise RuntimeError("the engine has nothing to do")
        self.processor._generation_step(self.model)
        self.in_flight += 1
        if not self.processor.use_async_batching or self.in_flight > 1:
            self.processor.update_batch()

    def span_ms(self) -> float:
        """Returns the median milliseconds between the events of the timed steps."""
        timed = self.spans[WARM : WARM + TIMED]
        return statistics.median(start.elapsed_time(end) for start, end in timed)

    def end(self) -> None:
        synchronize()
        del self.processor.model_runner.compute_batch
        self.processor.reset()


def kernel_ms(call: Callable[[], None], calls: int) -> tuple[float, float]:
    """Returns the milliseconds of the kernels of a call, and their number."""
    with profile(activities=[ProfilerActivity.CUDA]) as made:
        for _ in range(calls):
            call()
        synchronize()
    on_gpu = [
        event.time_range.elapsed_us()
        for event in made.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))
    ]
    return sum(on_gpu) / calls / 1e3, len(on_gpu) / calls


def floor_ms(engine: Engine, requests: int) -> float:
    """Returns the milliseconds to read the weights and keys of a decode step at the copy rate."""
    config, known = engine.model.config, MODELS[engine.given.model]
    share = 1 - (1 - known.experts_per_token / known.experts) ** requests
    tied = config.tie_word_embeddings
    read = 0.0
    for name, parameter in engine.model.named_parameters():
        if "embed" not in name or tied:
            read += parameter.nbytes * (share if ".experts." in name else 1.0)
    cache = engine.manager.batch_processor.cache
    for owner in cache.cache_allocators.values():
        window = getattr(owner, "sliding_window", None) or TOKENS
        read += requests * min(TOKENS, window) * owner.bytes_per_block / owner.tokens_per_page
    return 1e3 * read / copy_rate()


@functools.cache
def copy_rate() -> float:
    rate = copy_bytes_per_s()
    torch.cuda.empty_cache()
    return rate


def decode_row(engine: Engine, requests: int) -> dict[str, Any]:
    """Returns the times of decode steps."""
    decoding = Decoding(engine, requests)
    for _ in range(WARM):
        decoding.step()
    synchronize()
    start = time.perf_counter()
    for _ in range(TIMED):
        decoding.step()
    synchronize()
    row: dict[str, Any] = {"requests": requests}
    row["wall_ms"] = 1e3 * (time.perf_counter() - start) / TIMED
    if DEVICE == "cuda":
        row["span_ms"] = decoding.span_ms()
        row["kernels_ms"], row["kernels"] = kernel_ms(decoding.step, PROFILED)
        decoding.end()
        row["floor_ms"] = floor_ms(engine, requests)
    else:
        decoding.end()
    return row


def measurements(engine: Engine) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Yields the fields that identify each row, and a function that measures the row. The shortest
    measurements come first."""
    works = chosen(engine.given)
    for requests in sorted(engine.given.decode):
        yield (
            {"kind": "decode", "requests": requests},
            functools.partial(decode_row, engine, requests),
        )
    for name in sorted(works, key="ACB".index):
        for turn in range(engine.given.turns):
            which = {"kind": "workload", "workload": name, "again": bool(turn)}
            yield which, functools.partial(workload_row, engine, works[name], turn)


def run_variant(given: argparse.Namespace) -> None:
    """Compiles one variant in its own process, waits for its turn, and prints its rows."""
    logging.disable(logging.INFO)  # a failed warm-up is a warning of transformers
    logging.getLogger("ContinuousBatchingLogger").addFilter(
        lambda record: "persistent_manager" not in record.getMessage()
    )
    signal.alarm(given.limit)
    since, name = time.monotonic(), f"{given.model} {given.variant}"
    row: dict[str, Any] = {"kind": "start"}
    with torch.no_grad():
        try:
            engine = Engine(given)
            say(name, "has its model", since)
            start = time.perf_counter()
            engine.warm_up()
            row["warm_s"] = time.perf_counter() - start
            row |= engine.facts() | {"peak_gib": memory_gib()}
        except Exception as error:
            row["failed"] = first_line(error)
        say(name, row.get("failed", "is warm"), since)
        signal.alarm(0)
        if not has_turn():
            return
        print(json.dumps(row), flush=True)
        if "failed" in row:
            return
        long: set[str] = set()
        for which, measure in measurements(engine):
            if which.get("workload") in long:
                continue
            try:
                which |= measure()
            except Exception as error:
                which["failed"] = first_line(error)
            if which.get("seconds", 0.0) > SHORT_SECONDS or "failed" in which:
                long.add(which.get("workload", ""))
            print(json.dumps(which), flush=True)
    os._exit(0)  # the threads and graphs of the kept manager need no orderly end


def commands(given: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the command of each process. Reports which variants cannot run."""
    found = {}
    for variant in given.variants:
        if variant in FLASH and importlib.util.find_spec(FLASH[variant]) is None:
            print(f"{variant}: {FLASH[variant]} is not installed", flush=True)
            continue
        for model in given.models:
            layers = given.layers or LAYERS[model]
            line = [__file__, "--model", model, "--variant", variant, "--layers", str(layers)]
            line += ["--workloads", *given.workloads, "--share", str(given.share)]
            line += ["--decode", *map(str, given.decode), "--turns", str(given.turns)]
            line += ["--limit", str(given.limit or int(0.7 * given.seconds))]
            for option in ("cache_tokens", "batch_tokens"):
                if getattr(given, option):
                    line += [f"--{option.replace('_', '-')}", str(getattr(given, option))]
            found[f"{model} {variant}"] = line + ["--small"] * given.small
    return dict(sorted(found.items(), key=lambda one: given.models.index(one[0].split()[0])))


def waves(given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of all processes. `--jobs` of the processes compile side by side."""
    waiting = list(commands(given).items())
    end = time.monotonic() + given.seconds
    jobs = given.jobs or max(1, len(waiting))
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(
            name, str(max(1, (os.cpu_count() or 1) // min(jobs, len(waiting) or 1)))
        )
    for first in range(0, len(waiting), jobs):
        left = len(range(first, len(waiting), jobs))
        yield from printed_rows(
            dict(waiting[first : first + jobs]), (end - time.monotonic()) / left
        )


def share_of_same(answers: list[list[int]], others: list[list[int]]) -> float:
    return statistics.mean(
        a == b for pair in zip(answers, others, strict=True) for a, b in zip(*pair, strict=True)
    )


def said(row: dict[str, Any]) -> str:
    """Describes a row in one line."""
    head = f"{row['model']} {row['variant']:<17}"
    if "failed" in row:
        what = row.get("workload") or row.get("requests") or ""
        return f"{head} {row['kind']} {what} failed: {row['failed']}"
    if row["kind"] == "start":
        return (
            f"{head} warm {row['warm_s']:6.1f} s  {row['attention']}  graphs {row['cuda_graphs']}  "
            f"async {row['asynchronous']}  step of {row['max_batch_tokens']}  weights "
            f"{row['weights_gib']:.1f}  peak {row['peak_gib']:.1f} GiB  compiled {row['graphs']}  "
            f"fused {row['fused']}"
        )
    if row["kind"] == "decode":
        text = f"{head} {row['requests']:>3} requests  wall {row['wall_ms']:7.2f} ms"
        if "span_ms" not in row:
            return text
        return (
            f"{text}  gpu {row['span_ms']:7.2f}  kernels {row['kernels_ms']:7.2f} "
            f"({row['kernels']:.0f})  floor {row['floor_ms']:6.2f}"
        )
    same = f"  same {row['same']:.3f}" if "same" in row else ""
    return (
        f"{head} {row['workload']}{' again' if row['again'] else '':<6} {row['requests']} x "
        f"{row['new']} tokens after {row['prompt']}: {row['seconds']:7.2f} s  {row['tokens']:8.0f} "
        f"tokens/s  peak {row['peak_gib']:.1f} GiB{same}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(LAYERS), default=["llama3-8b"])
    parser.add_argument("--layers", type=int, help="by default 32, 16, 8, 8 or 27, by model")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["tilewright", "sdpa-0", "sdpa-1"]
    )
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--share", type=float, default=1.0, help="of new tokens or of requests")
    parser.add_argument("--turns", type=int, default=2, help="calls with each workload")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--cache-tokens", type=int, help="size of the engine's memory")
    parser.add_argument(
        "--batch-tokens", type=int, help="tokens in a step; by default the engine's"
    )
    parser.add_argument("--jobs", type=int, help="processes at once; by default all")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything")
    parser.add_argument("--limit", type=int, help="seconds in which a process must be warm")
    parser.add_argument("--small", action="store_true", help="small models, to try the script")
    parser.add_argument("--model", help="one model; set by the parent process")
    parser.add_argument("--variant", help="the variant of that model")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    if given.variant:
        run_variant(given)
        return
    rows: dict[str, list[dict[str, Any]]] = {model: [] for model in given.models}
    answers: dict[tuple[str, str], list[list[int]]] = {}
    for name, made in waves(given):
        model, variant = name.split()
        row = {"model": MODELS[model].title, "variant": variant, **made}
        row["layers"] = given.layers or LAYERS[model]
        found = row.pop("answers", None)
        if found is not None and not row["again"]:
            others = answers.setdefault((model, row["workload"]), found)
            row["same"] = share_of_same(found, others)
        print(said(row), flush=True)
        rows[model].append(row)
        results = MODELS[model].results.removesuffix("_end_to_end")
        keep(f"{results}_serving", rows[model], given.out)


if __name__ == "__main__":
    main()
