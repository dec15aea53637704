"""Counts what is fused in quantised models, as their libraries load them and after `prepare`.

    python benchmarks/quantised.py [--formats gptq ct-fp8] [--models llama qwen3_moe]

The models are the small ones of `tests/models/shipped.py`, made and loaded by the installed
libraries. For each model, a decode step of two sequences with a static cache is compiled twice: for
the model as loaded, and for the prepared model. The step's logits, and those of the library's own
forward pass, are compared with a float64 run of the same codes. No GPU is needed. Results go to
benchmarks/results/quantised.json, row by row; rows that were not requested, or whose library is not
installed, stay in the file. docs/quantised.md is generated from that file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import quantised_table
import torch
from coverage import (
    PROMPT,
    SEEDS,
    compiled_step,
    first_line,
    rewind,
    static_cache,
    step_inputs,
    tokens,
)
from quantised_table import KEPT, is_further
from timing import environment
from transformers import GptOssConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.shipped import BY_TRANSFORMERS, CONFIGS, SHIPPED, Shipped, dense
from tilewright.compiler import prepare, tilewright
from tilewright.compiler.verify import clone_inputs, relative_error
from tilewright.compiler.verify.float64 import NoFloat64Error, run_in_float64, widen
from tilewright.tools.files import write_whole

#: A function that makes the arguments of a step, with the cache in its state before that step.
Inputs = Callable[[], dict[str, Any]]

FORMATS = {
    "bf16": Shipped("torch", lambda kind, folder: dense(kind), tuple(CONFIGS)),
    **SHIPPED,
    **BY_TRANSFORMERS,
}
OPTIONS = {"inner": "eager", "everywhere": True}
SHOWN = ("fused", "lost", "advice", "said", "wrong", "unjudged", "unaccounted", "graphs", "failed")


def step_of(model: Any, kind: str, seed: int = 1) -> dict[str, Any]:
    """Returns the arguments of a decode step, with a cache that the dense model has filled.

    `seed` is the seed of the tokens.
    """
    plain: Any = dense(kind).to(model.dtype)
    cache, _ = static_cache(plain)
    rewind(cache, PROMPT)
    ids, mask = tokens(plain, seed)
    return step_inputs(plain, ids, mask, cache, 1)


def compiled(model: Any, kind: str) -> dict[str, Any]:
    """Returns the matches and misses of a step. `stored` counts the cache writes that are fused
    without their projection."""
    row = compiled_step(model, step_of(model, kind))
    return {name: row[name] for name in (*SHOWN, "stored") if name in row}


def logits(call: Callable[..., Any], inputs: Inputs) -> torch.Tensor:
    torch._dynamo.reset()
    return call(**inputs()).logits


def exact_logits(model: Any, inputs: Inputs) -> torch.Tensor | None:
    """Computes the logits in float64 from the same codes. Returns None if that is not possible.

    The function runs the graph that Dynamo records, so the model must be one graph.
    """
    found: list[torch.Tensor] = []
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)

        def run(*given: Any) -> Any:
            outputs = run_in_float64(gm, clone_inputs(given, widen))
            found.extend(t for t in outputs if isinstance(t, torch.Tensor))
            return gm(*given)

        return run

    try:
        shape = logits(torch.compile(model, backend=backend), inputs).shape
    except NoFloat64Error:
        return None
    if len(graphs) > 1:  # the code between the graphs does not run in float64
        return None
    return next((tensor for tensor in found if tensor.shape == shape), None)


def errors(library: Any, model: Any, kind: str) -> dict[str, float]:
    """Returns the relative errors, in the 2-norm, of the library's logits and of tilewright's.

    Further seeds are tried as long as tilewright's logits are further from float64. If the scores
    of two experts are nearly equal, rounding can choose the other expert.
    """
    fused = torch.compile(model, backend=lambda gm, given: tilewright(gm, given, options=OPTIONS))
    found: dict[str, float] = {}
    for seed in range(1, SEEDS + 1):
        inputs = partial(step_of, model, kind, seed)
        exact = exact_logits(model, inputs)
        if exact is None:
            return {}
        theirs = logits(library, partial(step_of, library, kind, seed))
        pairs = {"library": theirs, "ours": logits(fused, inputs)}
        found = {name: relative_error(one.double(), exact) for name, one in pairs.items()}
        if not is_further({"errors": found}):
            break
    return found


def row_of(form: str, kind: str, load: Callable[[], Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": f"{kind}+{form}"}
    library = load()
    row["unprepared"] = compiled(library, kind) | {"said": []}
    model = load()
    prepared = prepare(model)
    row["replaced"] = len(prepared.replaced)
    row["left"] = dict(Counter(one.reason for one in prepared.left))
    row["prepared"] = compiled(model, kind)
    compiles = "failed" not in row["prepared"]
    return row | {"errors": errors(library, model, kind) if compiles else {}}


def made_by(library: str) -> str:
    """Returns the name and version of a format's library."""
    names = importlib.metadata.packages_distributions()
    package = "optimum-quanto" if library == "optimum.quanto" else names[library][0]
    return f"{package} {importlib.metadata.version(package)}"


def keep(row: dict[str, Any]) -> None:
    known = json.loads(KEPT.read_text("utf-8"))["rows"] if KEPT.exists() else []
    rows = [old for old in known if old["model"] != row["model"]] + [row]
    facts = {"command": "python benchmarks/quantised.py"}
    text = json.dumps(facts | {"rows": sorted(rows, key=lambda r: r["model"])}, indent=1)
    write_whole(KEPT, text + "\n")
    quantised_table.main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    now = {"date": environment()["date"], "torch": torch.__version__}
    now["transformers"] = importlib.metadata.version("transformers")
    for form in given.formats:
        shipped = FORMATS[form]
        if not shipped.is_installed:
            print(f"{form}: {shipped.library} is not installed")
            continue
        for kind in [kind for kind in given.models if is_made(form, kind)]:
            row = now | {"library": made_by(shipped.library)}
            try:
                row |= row_of(form, kind, partial(loaded, form, kind))
            except Exception as error:
                row |= {"model": f"{kind}+{form}", "failed": first_line(error)}
            print(json.dumps(row), flush=True)
            keep(row)


def is_made(form: str, kind: str) -> bool:
    """Whether `tests/models/shipped.py` makes a model in a format."""
    # Only the formats of gpt-oss list their models, and gpt-oss has only these formats.
    return bool(FORMATS[form].models) == (CONFIGS[kind][0] is GptOssConfig)


def loaded(form: str, kind: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return FORMATS[form].load(kind, Path(folder))


if __name__ == "__main__":
    main()
