"""Decode steps of a quantised Llama-3-8B on a GPU: as its library loads it, and prepared for us.

    python benchmarks/quantised_step.py [--formats ct-fp8 ...] [--batches 1 16 64] [--out DIR]

True dims, 4 layers, a vocabulary of 8192, random weights; 1000 tokens in a static cache of 2048,
the mask given as `generate()` gives it. Microseconds in CUDA graphs, variants in turn: `library` is
torch.compile of the model as loaded (null where that cannot be compiled or captured), `stock`
torch.compile of the prepared model, `tilewright` that model with us; `bf16` is the dense model with
us, in the same process. Errors of logits are relative, in the 2-norm, from float64 of the same
codes: of the library's own forward pass in eager mode, and of ours. peak: memory of a step above
that of model and cache, in MiB. Each format is a process of its own. Results go to
benchmarks/results/quantised_step.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from decode_cache import generate_inputs, new_cache, rewind
from end_to_end import peak_mib
from quantised import exact_logits, made_by
from timing import capture, interleaved_us, keep
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.shipped import CONFIGS, SHIPPED, dense
from tilewright.compiler import prepare, reports
from tilewright.compiler.verify import relative_error

MODEL = "llama3_8b"
PRESENT, MAX_LENGTH = 1000, 2048
DIMS: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
BACKENDS = dict.fromkeys(("library", "stock"), "inductor")
BACKENDS |= dict.fromkeys(("tilewright", "bf16"), "tilewright")
CONFIGS[MODEL] = (LlamaConfig, DIMS)


class Step:
    """A decode step over a cache of its own; `call` runs a form of the model."""

    def __init__(self, model: Any, batch: int) -> None:
        generator = torch.Generator("cuda").manual_seed(batch)
        size = (batch, 1)
        self.ids = torch.randint(model.config.vocab_size, size, device="cuda", generator=generator)
        self.cache = new_cache(model, batch, MAX_LENGTH)
        self.given = generate_inputs(model, self.cache, self.ids, PRESENT, padded=False)

    def inputs(self) -> dict[str, Any]:
        rewind(self.cache, PRESENT)
        cached = {"past_key_values": self.cache, "use_cache": True}
        return {"input_ids": self.ids, **cached, **self.given}

    def call(self, forward: Any) -> torch.Tensor:
        return forward(**self.inputs()).logits


def attempted(name: str, step: Step, forward: Any, row: dict[str, Any]) -> Any:
    """A graph of a variant, or None; `row` then says what it raised."""
    try:
        step.call(forward)
        row[f"{name}_peak"] = peak_mib(lambda: step.call(forward))
        return capture([lambda: step.call(forward)], warmup=2)
    except Exception as error:
        row[f"{name}_failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        torch.cuda.synchronize()
        return None


def row_of(form: str, batch: int, models: dict[str, Any]) -> dict[str, Any]:
    """Errors and times of one format at one batch. models: by variant, not compiled."""
    torch._dynamo.reset()
    row: dict[str, Any] = {"format": form, "batch": batch}
    steps = {name: Step(model, batch) for name, model in models.items()}
    theirs = steps["library"].call(models["library"])
    exact = exact_logits(models["tilewright"], steps["tilewright"].inputs)
    forms = {name: torch.compile(model, backend=BACKENDS[name]) for name, model in models.items()}
    graphs = {}
    for name, forward in forms.items():
        graph = attempted(name, steps[name], forward, row)
        row[name] = None
        if graph is not None:
            graphs[name] = graph
        if name == "tilewright" and graph is not None:
            found = reports()[-1]
            ops = [match.op for match in found.matches]
            row["fused"] = {op: ops.count(op) for op in dict.fromkeys(ops)}
            row["misses"] = [miss.code for miss in found.misses]
            ours = steps[name].call(forward)
            if exact is not None:
                pairs = {"library": theirs, "tilewright": ours}
                row["errors"] = {n: relative_error(t.double(), exact) for n, t in pairs.items()}
    return row | interleaved_us(graphs, 1, rounds=12, replays=5)


def run_format(form: str, batches: list[int]) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        library = SHIPPED[form].load(MODEL, Path(folder)).to("cuda")
        prepared = prepare(library, copy=True)
        stock = prepared.model
        models = {"library": library, "stock": stock, "tilewright": stock}
        models["bf16"] = dense(MODEL).to("cuda")
        for batch in batches:
            facts = {"library": made_by(SHIPPED[form].library)}
            facts["replaced"] = len(prepared.replaced)
            print(json.dumps(row_of(form, batch, models) | {"made": facts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=list(SHIPPED))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--format", help="one format, driven by another process")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    if given.format:
        run_format(given.format, given.batches)
        return
    rows: list[dict[str, Any]] = []
    batches = [str(batch) for batch in given.batches]
    for form in given.formats:
        if not SHIPPED[form].is_installed:
            print(f"{form}: {SHIPPED[form].library} is not installed", flush=True)
            continue
        command = [sys.executable, __file__, "--format", form, "--batches", *batches]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode:
            print(f"{form}: failed after {len(found)} rows", flush=True)
        for row in found:
            print(json.dumps(row), flush=True)
        rows += found
        keep("quantised_step", rows, given.out)


if __name__ == "__main__":
    main()
