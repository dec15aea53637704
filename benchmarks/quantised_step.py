"""Benchmark of decode steps of quantised models with published sizes, as their library loads them
and as tilewright fuses them.

    python benchmarks/quantised_step.py [--formats ct-fp8 ...] [--models llama3-8b ...]
        [--cases 1x1 16x1 16x1-padded 64x1] [--variants tilewright bf16 stock library]
        [--errors-only] [--made-on cpu] [--jobs 10] [--out DIR]

The models have true dims, few layers, a vocabulary of 8192 and random weights. Cases are named as
in `end_to_end.py`. A static cache of 2048 tokens holds 1000 tokens (none before a prompt such as
1x1024), and the mask is the one that `generate()` gives. Times are microseconds of CUDA graphs, and
the variants are timed in turn. The cache is rewound between rounds; only for prompts does the
captured graph rewind it. The variants are:

    library       torch.compile of the model as loaded; null if it cannot be compiled or captured
    stock         torch.compile of the prepared model
    tilewright    the prepared model with backend "tilewright"
    rounded_apart tilewright without the pattern round_rows: Inductor rounds activations; only
                  where --variants names it
    bf16          the dense model with backend "tilewright", in the same process

errors: the relative errors of the logits against float64 of the same codes, in the 2-norm. There is
an error of the library's own forward pass in eager mode, and an error of tilewright. peak: memory
of a step beyond model and cache, in MiB.

Each case of a format is a process: `--jobs` processes make their models on the GPU and compile side
by side, then each has the GPU to itself. With --errors-only nothing is timed, one process runs all
cases of a format, and code that is not fused runs in eager mode; without a GPU, all ops run their
references. A row names its failures. Results go to benchmarks/results/quantised_step.json, or
quantised_step_errors.json.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from coverage import first_line
from decode_cache import CachedPass, generate_inputs, new_cache, rewind
from end_to_end import MAX_LENGTH, Case, peak_mib
from quantised import FORMATS, exact_logits, is_made, loaded, made_by
from quantised_table import is_further
from side_by_side import finished_rows, has_turn
from timing import capture, interleaved_us, keep
from transformers import DeepseekV2Config, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.shipped import CONFIGS, dense
from tilewright.compiler import prepare, reports
from tilewright.compiler.verify import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED: dict[str, Any] = {
    "vocab_size": 8192,
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
EXPERTS = {"num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
#: This statement adds models with true dims to the small models of `tests/models/shipped.py`.
CONFIGS |= {
    "llama3-8b": (LlamaConfig, SHARED | {"intermediate_size": 14336, "num_hidden_layers": 4}),
    "llama3-8b-32": (LlamaConfig, SHARED | {"intermediate_size": 14336, "num_hidden_layers": 32}),
    "qwen3-8b": (Qwen3Config, SHARED | {"intermediate_size": 12288}),
    "qwen3-30b-a3b": (
        Qwen3MoeConfig,
        SHARED | EXPERTS | {"hidden_size": 2048, "num_key_value_heads": 4, "norm_topk_prob": True},
    ),
    "deepseek-v2-lite": (
        DeepseekV2Config,
        SHARED
        | {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
        | {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64}
        | {"qk_nope_head_dim": 128, "v_head_dim": 128, "topk_method": "greedy"}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3},
    ),
    "gpt-oss-20b": (
        GptOssConfig,
        SHARED
        | {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64}
        | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
}
#: The formats that are measured by default: all except "mxfp4". transformers decodes "mxfp4" to
#: bfloat16 while it loads a model, unless the hub's kernels are installed. "mxfp4-gpu" keeps the
#: codes.
USUAL = [form for form in FORMATS if form != "mxfp4"]
CASES = ("1x1", "16x1", "16x1-padded", "64x1")
#: The variants in the order of capture. `library` is last, because its failed capture could disturb
#: others.
VARIANTS = ("tilewright", "rounded_apart", "bf16", "stock", "library")
#: Options of the variants with the backend "tilewright".
OURS: dict[str, dict[str, Any]] = {
    "tilewright": {},
    "rounded_apart": {"patterns": ["-round_rows"]},
    "bf16": {},
}
OPTIONS: dict[str, Any] = {} if DEVICE == "cuda" else {"everywhere": True}
LOCK = Path(tempfile.gettempdir()) / "tilewright_quantised_step.lock"


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Lets only one process at a time run the block, because work in float64 takes several times
    the memory."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


class Step:
    """The decode step of a case over one cache. All variants of a model use the cache in turn."""

    def __init__(self, model: Any, case: Case) -> None:
        self.case = case
        generator = torch.Generator(model.device).manual_seed(case.batch)
        size = (case.batch, case.tokens)
        self.ids = torch.randint(
            model.config.vocab_size, size, device=model.device, generator=generator
        )
        self.cache = new_cache(model, case.batch, MAX_LENGTH)
        padded = case.kind == "padded"
        self.given = generate_inputs(model, self.cache, self.ids, case.position, padded=padded)

    def inputs(self) -> dict[str, Any]:
        self.rewind()
        cached = {"past_key_values": self.cache, "use_cache": True}
        return {"input_ids": self.ids, **cached, **self.given}

    def rewind(self) -> None:
        rewind(self.cache, self.case.position)

    def of(self, forward: Any) -> CachedPass:
        inputs = {"input_ids": self.ids, **self.given}
        return CachedPass(forward, self.cache, self.case.position, inputs)


def attempted(row: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
    """Returns the result of a call. If the call raises an error, notes the error in `row` and
    returns None."""
    try:
        return call()
    except Exception as error:
        row[f"{name}_failed"] = first_line(error)
        return None


class Prepared:
    """One case of a format: its row so far, and the graphs that are timed when its turn comes."""

    def __init__(self, models: dict[str, Any], text: str, facts: dict[str, Any]) -> None:
        case = Case.of(text)
        self.models = models
        padded = case.kind == "padded"
        self.row: dict[str, Any] = {**facts, "case": text, "batch": case.batch, "padded": padded}
        # A library may load its model in another dtype than the dense model's.
        self.steps = {model.dtype: Step(model, case) for model in models.values()}
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        step, ours = self.step("library"), models["tilewright"]
        self.logits = {"library": attempted(self.row, "eager", step.of(models["library"]))}
        with one_at_a_time():
            self.exact = attempted(self.row, "exact", lambda: exact_logits(ours, step.inputs))

    def step(self, variant: str) -> Step:
        return self.steps[self.models[variant].dtype]

    def compiled(self, variant: str, **options: Any) -> Any:
        """Compiles and calls a variant. Returns the variant's forward pass, or None if compiling or
        calling it failed.

        For the variant "tilewright", the logits are kept.
        """
        backend = "tilewright" if variant in OURS else "inductor"
        given = OPTIONS | OURS[variant] | options if variant in OURS else {}
        model = self.models[variant]
        forward = torch.compile(model, backend=backend, options=given or None, dynamic=False)
        before = len(reports())
        made = attempted(self.row, variant, self.step(variant).of(forward))
        if made is None:
            return None
        if variant == "tilewright":
            self.logits[variant] = made
            self.describe(reports()[before:])
        return forward

    def describe(self, found: Sequence[Any]) -> None:
        """Adds the matches and misses of tilewright's graphs, and the errors, to the row."""
        ops = [match.op for graph in found for match in graph.matches]
        self.row["graphs"] = len(found)
        self.row["fused"] = {op: ops.count(op) for op in dict.fromkeys(ops)}
        self.row["misses"] = [miss.code for graph in found for miss in graph.misses]
        if self.exact is not None:
            self.row["errors"] = {
                name: relative_error(one.double(), self.exact)
                for name, one in self.logits.items()
                if one is not None
            }

    def capture(self, variant: str) -> None:
        forward, step = self.compiled(variant), self.step(variant)
        self.row[variant] = None
        if forward is None:
            return

        def captured() -> torch.cuda.CUDAGraph:
            made = step.of(forward)
            self.row[f"{variant}_peak"] = peak_mib(made)
            return capture([made.captured], warmup=2)

        graph = attempted(self.row, variant, captured)
        if graph is None:
            torch.cuda.synchronize()
        else:
            self.graphs[variant] = graph

    def rewind(self) -> None:
        for step in self.steps.values():
            step.rewind()


def prepared_cases(given: argparse.Namespace) -> Iterator[Prepared]:
    """Makes the model of one format, and yields each case with everything but its times."""
    shipped = FORMATS[given.format]
    facts = {"format": given.format, "model": given.model, "made": made_by(shipped.library)}
    with torch.device(given.made_on):
        library = loaded(given.format, given.model)
    if library.device.type != DEVICE:
        library = library.to(DEVICE)
    changed = prepare(library, copy=True)
    facts["replaced"] = len(changed.replaced)
    facts["left"] = sorted({one.reason for one in changed.left})
    stock = changed.model
    models = {"library": library, "stock": stock, "tilewright": stock, "rounded_apart": stock}
    if not given.errors_only and "bf16" in given.variants:
        with torch.device(DEVICE):
            models["bf16"] = dense(given.model)
    for text in given.cases:
        torch._dynamo.reset()
        case = Prepared(models, text, facts)
        if given.errors_only:
            case.compiled("tilewright", inner="eager")
            case.steps = {}  # frees the cache
        else:
            for variant in VARIANTS:
                if variant in given.variants:
                    case.capture(variant)
        yield case


def run_format(given: argparse.Namespace) -> None:
    """Compiles one format in its own process, waits for its turn, times it, and prints its rows."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    signal.alarm(given.limit)
    cases: list[Prepared] = []
    facts: dict[str, Any] = {"format": given.format, "model": given.model}
    with torch.no_grad():
        attempted(facts, "whole", lambda: cases.extend(prepared_cases(given)))
        signal.alarm(0)
        if not has_turn():
            return
        for case in cases:
            if case.graphs:
                case.row |= interleaved_us(
                    case.graphs, 1, rounds=12, replays=5, before_round=case.rewind
                )
    rows = [case.row for case in cases]
    print(json.dumps({"rows": rows if len(facts) == 2 else [*rows, facts]}), flush=True)


def commands(given: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the commands of the processes by name, and prints the formats without a library."""
    found = {}
    for form in given.formats:
        if not FORMATS[form].is_installed:
            print(f"{form}: {FORMATS[form].library} is not installed", flush=True)
            continue
        for kind in (kind for kind in given.models if is_made(form, kind)):
            shared = [__file__, "--format", form, "--model", kind, "--limit", str(given.limit)]
            shared += ["--made-on", given.made_on, *["--errors-only"][: given.errors_only]]
            shared += ["--variants", *given.variants]
            for cases in [given.cases] if given.errors_only else [[one] for one in given.cases]:
                found[f"{form} {kind} {' '.join(cases)}"] = [*shared, "--cases", *cases]
    return found


def said(row: dict[str, Any]) -> str:
    """Describes a row in one line."""
    times = {name: row[name] and round(row[name]) for name in VARIANTS if name in row}
    errors = {name: f"{error:.2e}" for name, error in row.get("errors", {}).items()}
    failed = {name: row[name] for name in row if name.endswith("_failed")}
    further = "FURTHER than the library" if has_lost(row) else ""
    kind = f"{row.get('batch')}{' padded' if row.get('padded') else ''}"
    parts = (row["format"], row["model"], kind, times or "", errors or "", further)
    rest = (row.get("fused", ""), row.get("misses") or "", failed or "")
    return "  ".join(str(part) for part in (*parts, *rest) if part)


def has_lost(row: dict[str, Any]) -> bool:
    """Whether tilewright's result is further from float64 than that of the library's forward pass.
    Returns False if that pass failed."""
    errors = row.get("errors", {})
    if "library" not in errors:
        return False
    return is_further({"errors": {"library": errors["library"], "ours": errors["tilewright"]}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=USUAL, choices=list(FORMATS))
    parser.add_argument("--models", nargs="+", default=["llama3-8b"], choices=list(CONFIGS))
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    usual = [name for name in VARIANTS if name != "rounded_apart"]
    parser.add_argument("--variants", nargs="+", default=usual, choices=VARIANTS)
    parser.add_argument("--errors-only", action="store_true", help="measure no times")
    parser.add_argument("--made-on", default=DEVICE, help="device on which libraries quantise")
    parser.add_argument("--jobs", type=int, default=10, help="processes at once")
    parser.add_argument("--limit", type=int, default=300, help="seconds a process may compile")
    parser.add_argument("--format", help="one format; set by the parent process")
    parser.add_argument("--model", help="the model of that format")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    if given.format:
        run_format(given)
        return
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, str(max(1, (os.cpu_count() or 1) // given.jobs)))
    waiting = list(commands(given).items())
    waves = (dict(waiting[i : i + given.jobs]) for i in range(0, len(waiting), given.jobs))
    rows: list[dict[str, Any]] = []
    for _, made in chain.from_iterable(map(finished_rows, waves)):
        for row in made["rows"]:
            print(said(row), flush=True)
            rows.append(row)
        keep("quantised_step_errors" if given.errors_only else "quantised_step", rows, given.out)
    judged = [row for row in rows if "library" in row.get("errors", {})]
    print(f"further from float64 than the library: {sum(map(has_lost, judged))} of {len(judged)}")


if __name__ == "__main__":
    main()
