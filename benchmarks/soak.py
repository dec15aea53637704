"""Tests that the memory of a process does not grow while it serves and compiles for a long time.

    python benchmarks/soak.py [--calls 100000] [--cycles 200] [--requests 10000] [--inner eager]

The part "calls" runs a compiled decode step at random batch sizes, positions and addresses. The
part "cycles" makes, compiles, calls and drops a model in each cycle. The part "requests" sends
requests of random lengths to one engine of transformers, which `enable` has changed or not, and
cancels one in a hundred; it needs transformers. Each part runs in one process with tilewright and
in another process without it: under torch.compile, or in the unchanged engine. The process without
tilewright is the yardstick. No GPU is needed; the engine uses one if there is one. Results go to
benchmarks/results/soak.json. The exit code is 1 if tilewright's process grew beyond its bounds.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import keep
from torch import fx, nn

from tilewright.compiler import reports

HIDDEN, HEADS, HEAD_DIM, SLOTS = 64, 2, 32, 256
#: The allowed growth between the warm-up and the end, beyond the growth of the yardstick. MIB is
#: for the memory of the process in MiB. OBJECTS is for each number of live tensors, graph modules
#: and nodes.
MIB, OBJECTS = 8.0, 0
WARM_UP = 0.1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: ENGINE has the settings of the engine. WAITING is the largest number of requests that wait for
#: their answers.
ENGINE = {
    "page_size": 16,
    "num_blocks": 400,
    "max_batch_tokens": 256,
    "max_requests_per_batch": 32,
    "max_blocks_per_request": 8,
    "q_padding_interval_size": 64,
    "kv_padding_interval_size": 512,
}
WAITING = 64


class Step(nn.Module):
    """The decode step of one layer: projections, rotation, cache writes, and attention over all
    slots."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden, width, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x, positions, slots, k_cache, v_cache):
        q, k, v = (
            p(x).view(x.shape[0], HEADS, HEAD_DIM) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        steps = torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM
        angles = positions[:, None].float() * 10000.0**-steps
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos(), angles.sin()

        def rotate(y):
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat((-b, a), -1) * sin

        k_cache[slots] = rotate(k)
        v_cache[slots] = v
        heads = (t.transpose(0, 1) for t in (rotate(q), k_cache, v_cache))
        out = F.scaled_dot_product_attention(*heads)
        return self.o_proj(out.transpose(0, 1).flatten(1))


def arguments(draw: random.Random, batch: int) -> tuple[torch.Tensor, ...]:
    """Returns the arguments of a step, as tensors at new addresses."""
    slots = torch.tensor(draw.sample(range(SLOTS), batch))
    caches = (torch.zeros(SLOTS, HEADS, HEAD_DIM) for _ in range(2))
    return torch.randn(batch, HIDDEN), torch.randint(0, 4096, (batch,)), slots, *caches


def compiled(model: nn.Module, backend: str, inner: str, dynamic: bool | None):
    if backend == "tilewright":
        options = {"inner": inner, "everywhere": True}
        return torch.compile(model, backend="tilewright", options=options, dynamic=dynamic)
    return torch.compile(model, backend=inner, dynamic=dynamic)


def size() -> dict[str, float]:
    """Returns the resident memory and the numbers of objects known to the garbage collector."""
    gc.collect()
    things = gc.get_objects()
    return {
        "mib": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        / 2**20,
        "tensors": sum(issubclass(type(t), torch.Tensor) for t in things),
        "graph_modules": sum(issubclass(type(t), fx.GraphModule) for t in things),
        "fx_nodes": sum(type(t) is fx.Node for t in things),
        "objects": len(things),
    }  # fmt: skip


def calls(backend: str, inner: str, count: int) -> Iterator[None]:
    draw = random.Random(0)
    with torch.no_grad():
        step = compiled(Step(), backend, inner, dynamic=True)
        pool = [arguments(draw, 64) for _ in range(4)]
        for i in range(count):
            batch = draw.randint(2, 64)
            x, positions, slots, *caches = pool[i % len(pool)]
            step(x[:batch].clone(), positions[:batch] + i, slots[:batch].clone(), *caches)
            if i % 1000 == 0:
                pool[i // 1000 % len(pool)] = arguments(draw, 64)
            yield
    if backend == "tilewright":
        assert [m.pattern for m in reports()[-1].matches] == ["qkv_cache"], reports()[-1]


def cycles(backend: str, inner: str, count: int) -> Iterator[None]:
    """Makes, calls and drops models. Each model is called at two batch sizes, so it is compiled
    twice."""
    draw = random.Random(0)
    for _ in range(count):
        with torch.no_grad():
            model = Step()
            step = compiled(model, backend, inner, dynamic=False)
            for batch in draw.sample(range(2, 65), 2):
                step(*arguments(draw, batch))
        gone = weakref.ref(model.q_proj.weight)
        del model, step
        torch._dynamo.reset()
        gc.collect()
        assert gone() is None, "a dropped model's weight is alive"
        yield


def requests(backend: str, inner: str, count: int) -> Iterator[None]:
    """Answers requests in one engine, at most `WAITING` at a time. Each yield is an answer."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from tilewright.compiler.serving import BatchingConfig, enable

    draw, model, settings = random.Random(0), small_llama(), dict(ENGINE)
    if backend == "tilewright":
        assert enable(model)
        options = {"inner": inner, "everywhere": True} if DEVICE == "cpu" else {}
        config = BatchingConfig(**settings, options=options)
    else:
        config = ContinuousBatchingConfig(**settings | {"max_blocks_per_request": 0})
    how = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    waiting: set[str] = set()
    added = done = 0
    with model.continuous_batching_context_manager(
        generation_config=how, continuous_batching_config=config
    ) as manager:
        while done < count:
            while len(waiting) < WAITING and added < count:
                prompt = [draw.randrange(1, 64) for _ in range(draw.randint(1, 60))]
                name = manager.add_request(prompt, max_new_tokens=draw.randint(1, 16))
                added += 1
                if added % 100 == 0:
                    manager.cancel_request(name)
                    done += 1
                    yield
                else:
                    waiting.add(name)
            result = manager.get_result(timeout=60)
            assert result is not None, "the engine gave no answer in a minute"
            assert result.error is None, result.error
            if result.request_id in waiting and result.is_finished():
                waiting.remove(result.request_id)
                done += 1
                yield


def small_llama() -> nn.Module:
    """Returns a Llama with one layer and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512))
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = model.to(DEVICE, dtype).eval().requires_grad_(False)
    model.set_attn_implementation("sdpa")
    return model


PARTS = {"calls": calls, "cycles": cycles, "requests": requests}


def case(part: str, backend: str, inner: str, count: int) -> dict:
    """Returns what a row measures. An engine compiles its steps with its own settings; only
    tilewright's engine on a CPU is given `inner`."""
    named = part != "requests" or (backend == "tilewright" and DEVICE == "cpu")
    return {"part": part, "backend": backend, **({"inner": inner} if named else {}), "count": count}


def measured(part: str, backend: str, inner: str, count: int) -> dict:
    """Runs one part in this process. Returns its sizes after the warm-up and at the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    row = case(part, backend, inner, count)
    for done, _ in enumerate(PARTS[part](backend, inner, count), 1):
        if done == int(count * WARM_UP):
            row["after_warm_up"] = size()
        if done == count:  # inside the loop, so that its objects are still alive
            row["at_the_end"] = size()
    return row


def grown(row: dict) -> dict[str, float]:
    return {k: row["at_the_end"][k] - row["after_warm_up"][k] for k in row["at_the_end"]}


def too_much(ours: dict, yardstick: dict) -> list[str]:
    """Describes each size that grew beyond its bound."""
    mine, stock = grown(ours), grown(yardstick)
    bounds = {"mib": MIB, "tensors": OBJECTS, "graph_modules": OBJECTS, "fx_nodes": OBJECTS}
    return [
        f"{name} grew by {mine[name]:.1f}, the yardstick by {stock[name]:.1f}"
        for name, bound in bounds.items()
        if mine[name] > max(stock[name], 0) + bound
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    rows, failed = [], False
    for part in given.parts:
        pair = []
        for backend in ("stock", "tilewright"):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                count = getattr(given, part)
                pair.append(pool.submit(measured, part, backend, given.inner, count).result())
            said = ", ".join(f"{k} {v:+.1f}" for k, v in grown(pair[-1]).items())
            print(
                f"{part:8} {count:7} {backend:10} {pair[-1].get('inner', ''):8} "
                f"{pair[-1]['at_the_end']['mib']:6.0f} MiB at the end; after the warm-up: {said}",
                flush=True,
            )
        rows += pair
        for problem in too_much(pair[1], pair[0]):
            print(f"  {problem}")
            failed = True
    keep("soak", rows, given.out)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
