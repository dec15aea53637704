"""Benchmark of linears behind a LayerNorm: the fused kernels against eager and stock torch.compile.

    python benchmarks/layer_norm.py [--models gpt2-xl ...] [--tokens 1 16 ...] [--seconds 90]
        [--tiny] [--out DIR]

Each row is one part of a layer at a model's published sizes. `up` is the norm, the first linear of
the MLP and its activation; `qkv` is the norm, the projections of q, k and v, and the write of k and
v into a static cache. Each token is the new token of another sequence, but 256 tokens are one
sequence. The part is compiled by stock torch.compile and by tilewright, as a user compiles it.
`rms` is tilewright with an RMSNorm in place of the LayerNorm. Times are microseconds of CUDA graphs
with a cold L2 cache, timed in turn. floor: the bytes of the weights at the copy rate of the same
run.
Errors are relative errors against float64, in the 2-norm.

A process for each model and part compiles all its rows, then has the GPU to itself. Results go to
results/layer_norm.json. With --tiny, small sizes run on any device, to try the benchmark.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bounds import copy_bytes_per_s
from side_by_side import has_turn, printed_rows
from timing import capture, interleaved_us, keep

from tilewright.compiler import reports

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS: dict[str, Any] = {} if DEVICE == "cuda" else {"everywhere": True, "inner": "eager"}
COLD_BYTES = 250e6
# With more tokens, tilewright leaves a linear in the graph, and a library computes it.
TOKENS = {"up": (1, 16, 64), "qkv": (1, 16, 64, 256)}
CAPACITY = 512
EPS = 1e-5


@dataclass(frozen=True)
class Model:
    """The sizes of a model. activation: the activation of its MLP. bias: whether its linears have a
    bias. stored: "rows" if weights are stored as [N, K], "columns" if they are stored as [K, N], as
    in GPT-2's Conv1D."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: Callable[[torch.Tensor], torch.Tensor]
    bias: bool = True
    stored: str = "rows"


GELU_TANH = partial(F.gelu, approximate="tanh")
MODELS = {
    "gpt2-xl": Model(1600, 6400, 25, 25, 64, GELU_TANH, stored="columns"),
    "opt-6.7b": Model(4096, 16384, 32, 32, 128, F.relu),
    "phi-2": Model(2560, 10240, 32, 32, 80, GELU_TANH),
    "falcon-7b": Model(4544, 18176, 71, 1, 64, F.gelu, bias=False),
}
TINY = Model(64, 128, 4, 4, 16, GELU_TANH)
Part = Callable[..., Any]
#: All variants of all rows of a process are compilations of one code object. Dynamo's default limit
#: is 8 compilations of a code object; it would run further variants uncompiled.
COMPILATIONS = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(scale).to(torch.bfloat16)


def norm_of(kind: str, x: torch.Tensor, norm: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if kind == "rms":
        return F.rms_norm(x, x.shape[-1:], norm[0], EPS)
    return F.layer_norm(x, x.shape[-1:], *norm, EPS)


def linear(model: Model, columns: int, rows: int) -> tuple[torch.Tensor, ...]:
    """Returns (weight [rows, columns] as the model stores it, bias), or (weight,)."""
    weight = normal(rows, columns, scale=columns**-0.5)
    if model.stored == "columns":
        weight = weight.t().contiguous().t()
    return (weight, normal(rows)) if model.bias else (weight,)


def up(model: Model) -> Callable[[str], Part]:
    def part(kind: str) -> Part:
        def forward(x: Any, norm: Any, w: Any) -> torch.Tensor:
            return model.activation(F.linear(norm_of(kind, x, norm), *w))

        return forward

    return part


def qkv(model: Model) -> Callable[[str], Part]:
    def part(kind: str) -> Part:
        def forward(x: Any, norm: Any, q: Any, k: Any, v: Any, cache: Any, place: Any) -> Any:
            y = norm_of(kind, x, norm)

            def heads(w: Any, count: int) -> torch.Tensor:
                made = F.linear(y, *w).view(*x.shape[:2], count, model.head_dim)
                return made.transpose(1, 2)

            cache[0].index_copy_(2, place, heads(k, model.kv_heads))
            cache[1].index_copy_(2, place, heads(v, model.kv_heads))
            return heads(q, model.heads)

        return forward

    return part


PARTS = {"up": up, "qkv": qkv}


def inputs(model: Model, part: str, tokens: int) -> tuple[Any, ...]:
    """Returns the arguments of one call."""
    batch, length = (1, tokens) if tokens > 64 else (tokens, 1)
    x, h = normal(batch, length, model.hidden), model.hidden
    norm = normal(h), normal(h)
    if part == "up":
        return x, norm, linear(model, h, model.inner)
    rows = [count * model.head_dim for count in (model.heads, model.kv_heads, model.kv_heads)]
    pools = tuple(normal(batch, model.kv_heads, CAPACITY, model.head_dim) for _ in "kv")
    place = torch.arange(length, device=DEVICE) + 100
    return x, norm, *(linear(model, h, n) for n in rows), pools, place


def weight_bytes(given: Any) -> int:
    """Returns the number of bytes of all weights of a call."""
    flat = [one for item in given if isinstance(item, tuple) for one in item]
    return sum(one.nbytes for one in flat if one.ndim == 2)


def wide(item: Any) -> Any:
    """Returns a copy in float64."""
    if isinstance(item, tuple):
        return tuple(map(wide, item))
    return item.double() if item.dtype.is_floating_point else item


def error(made: torch.Tensor, exact: torch.Tensor) -> float:
    return float(f"{((made.double() - exact).norm() / exact.norm()).item():.2e}")


@dataclass
class Prepared:
    """A row whose times are not measured yet. sets: the arguments of each call."""

    facts: dict[str, Any]
    calls: dict[str, Part]
    sets: list[Any]

    def timed(self, copy: float) -> dict[str, Any]:
        if DEVICE != "cuda":
            return self.facts
        graphs = {
            name: capture([partial(call, *given) for given in self.sets], warmup=1)
            for name, call in self.calls.items()
        }
        times = interleaved_us(graphs, len(self.sets), rounds=9, replays=3)
        ours, best = times["tilewright"], min(times["eager"], times["stock"])
        found = {name: round(us, 2) for name, us in times.items()}
        floor = round(1e6 * self.facts["weight_bytes"] / copy, 2)
        return self.facts | found | {"floor": floor, "speedup_over_best": round(best / ours, 2)}


def prepared(name: str, model: Model, part: str, tokens: int) -> Prepared:
    """Compiles all variants of a row, and compares their results."""
    torch.manual_seed(0)
    first = inputs(model, part, tokens)
    count = max(2, min(64, -(-int(COLD_BYTES) // weight_bytes(first))))
    sets = [first, *(inputs(model, part, tokens) for _ in range(count - 1))]
    make, before = PARTS[part](model), len(reports())
    compiled = partial(torch.compile, dynamic=False)
    ours = partial(compiled, backend="tilewright", options=OPTIONS or None)
    stock = make("layer") if DEVICE == "cpu" else compiled(make("layer"))
    calls = {"eager": make("layer"), "stock": stock, "tilewright": ours(make("layer"))}
    exact = make("layer")(*wide(first))
    facts = {"model": name, "part": part, "tokens": tokens, "weight_bytes": weight_bytes(first)}
    facts |= {f"{variant}_error": error(call(*first), exact) for variant, call in calls.items()}
    found = reports()[before:]
    facts["fused"] = [match.op for report in found for match in report.matches]
    facts["misses"] = [miss.code for report in found for miss in report.misses]
    facts["lowering"] = lowering(found)
    calls["rms"] = ours(make("rms"))
    calls["rms"](*first)
    return Prepared(facts, calls, sets)


def lowering(found: Any) -> list[str]:
    """Returns the lowering of each match."""
    return [str(getattr(match, "lowering", "")) for report in found for match in report.matches]


def run_case(given: argparse.Namespace, text: str) -> None:
    name, part = text.split("/")
    model = replace(TINY, stored=MODELS[name].stored) if given.tiny else MODELS[name]
    with torch.no_grad(), torch._dynamo.config.patch(COMPILATIONS):
        rows = [prepared(name, model, part, tokens) for tokens in given.tokens or TOKENS[part]]
        if not has_turn():
            return
        copy = copy_bytes_per_s() if DEVICE == "cuda" else 1.0
        for row in rows:
            print(json.dumps(row.timed(copy)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[])
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--case", help="one case; set by the parent process")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    if given.case:
        run_case(given, given.case)
        return
    started = time.monotonic()
    shared = ["--tiny"] if given.tiny else []
    shared += ["--tokens", *map(str, given.tokens)] if given.tokens else []
    cases = [f"{name}/{part}" for name in given.models for part in PARTS]
    commands = {case: [__file__, *shared, "--case", case] for case in cases}
    rows = []
    for case, row in printed_rows(commands, given.seconds):
        rows.append(row)
        print(f"{time.monotonic() - started:4.0f} s {case}: {json.dumps(row)}", flush=True)
        keep("layer_norm", rows, given.out)


if __name__ == "__main__":
    main()
