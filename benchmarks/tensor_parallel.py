"""Benchmark of Llama on two GPUs, and of the sum over ranks with its norm by itself.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--parts op soak model] [--out DIR]

Times are microseconds of the slowest rank. Parts:

op: the sum and the norm of T x 8192 bfloat16 numbers, in CUDA graphs of successive calls. `nccl` is
the functional all-reduce, followed by Inductor's code for residual and norm. `one_shot` and
`two_shot` are PyTorch's kernels of symmetric memory, after a copy into that memory and with the
same norm. `ours` is the fused op.

soak: ten thousand calls with random delays on either rank, after which both ranks must have the
same bits.

model: a model with published dims, 8 layers, weights split by hand as in Megatron, a static cache
and a 4-D mask, with eager, stock torch.compile and tilewright. A step is timed in wall-clock time
without CUDA graphs (`wall_`), captured by `torch.cuda.graph` (`graph_`), and under
mode="reduce-overhead" (`ro_`). After --seconds, nothing new is started.

Every capture needs a warm-up: NCCL makes its communicator at the first collective, which fails in a
capture, and a rank that fails alone leaves the others waiting in the collective. The times with
`ro_` are measured first, because PyTorch frees the cuBLAS workspaces of earlier captures when it
records its own graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import capture, interleaved_us, keep
from torch.distributed import _functional_collectives as functional
from torch.distributed import _symmetric_memory as symm_mem

from tilewright.compiler import reports, tilewright
from tilewright.ops.collective.all_reduce_residual_norm import OP, AllReduceResidualNormArguments

COLUMNS = 8192
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
CASES = ("1x1", "16x1", "64x1", "1x1024")
PATIENCE_S = 60
STARTED = time.perf_counter()
ROWS: list[dict[str, Any]] = []


def say(row: dict[str, Any], out: Path | None) -> None:
    """Adds a row to the results. Rank 0 prints it and writes the file at once."""
    ROWS.append({"at": round(time.perf_counter() - STARTED), **row})
    if dist.get_rank() == 0:
        print(json.dumps(ROWS[-1]), flush=True)
        keep("tensor_parallel", ROWS, out)


def slowest(times: dict[str, float]) -> dict[str, float]:
    """Returns the time of the slowest rank for each variant."""
    values = torch.tensor(list(times.values()), device="cuda", dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(times, (round(v, 2) for v in values.tolist()), strict=True))


def same_on_all(*tensors: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    same = True
    for tensor in tensors:
        bits = tensor.contiguous().view(torch.uint8).clone()
        dist.broadcast(bits, 0)
        same &= torch.equal(bits, tensor.contiguous().view(torch.uint8))
    found = torch.tensor([int(same)], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found.item())


def in_time(given: argparse.Namespace) -> bool:
    """Whether a new measurement may start. Rank 0 decides."""
    left = torch.tensor([given.seconds - (time.perf_counter() - STARTED)], device="cuda")
    dist.broadcast(left, 0)
    return bool(left.item() > 0)


# --- the op alone ---------------------------------------------------------------------------------


def norm_of(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = total.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(total.dtype)


def by_nccl(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    total = residual + functional.all_reduce(x, "sum", dist.group.WORLD)
    return total, norm_of(total, weight)


def add_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    total = residual + x
    return total, norm_of(total, weight)


def arguments(tokens: int) -> AllReduceResidualNormArguments:
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    made = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x = made(tokens, COLUMNS, generator=generator)
    generator.manual_seed(99)
    residual, weight = (
        made(tokens, COLUMNS, generator=generator),
        made(COLUMNS, generator=generator),
    )
    name, ranks = dist.group.WORLD.group_name, dist.get_world_size()
    return AllReduceResidualNormArguments(
        x, residual, weight, group=name, num_ranks=ranks, norm_eps=1e-5
    )


def variants_of(a: AllReduceResidualNormArguments) -> dict[str, Callable[[], Any]]:
    x, residual, weight, name, tokens = a.x, a.residual, a.norm_weight, a.group, a.x.shape[0]
    assert weight is not None
    torch._dynamo.reset()
    compiled, norm = torch.compile(by_nccl), torch.compile(add_and_norm)
    calls: dict[str, Callable[[], Any]] = {"nccl": lambda: compiled(x, residual, weight)}
    if tokens <= 1024:
        shared = symm_mem.empty(tokens, COLUMNS, dtype=torch.bfloat16, device="cuda")
        symm_mem.rendezvous(shared, name)

        def one_shot() -> Any:
            shared.copy_(x)
            return norm(
                torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name), residual, weight
            )

        def two_shot() -> Any:
            shared.copy_(x)
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)
            return norm(shared, residual, weight)

        calls |= {"one_shot": one_shot, "two_shot": two_shot}
    calls["ours"] = lambda: OP.call(a)
    return calls


def errors(a: AllReduceResidualNormArguments, results: Any) -> list[float]:
    """Returns the relative errors of the sum and of the norm from float64."""
    exact = a.x.double()
    dist.all_reduce(exact)
    exact += a.residual.double()
    norm = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
    wanted = exact, norm * a.norm_weight.double()
    return [
        float(f"{((made.double() - one).norm() / one.norm()).item():.2e}")
        for made, one in zip(results, wanted, strict=True)
    ]


def run_op(given: argparse.Namespace) -> None:
    for tokens in given.tokens:
        if not in_time(given):
            return
        a = arguments(tokens)
        calls = variants_of(a)
        count = 20 if tokens <= 256 else 4
        graphs, row = {}, {"part": "op", "tokens": tokens, "columns": COLUMNS}
        for name, call in calls.items():
            results = [one.clone() for one in call()]
            torch.cuda.synchronize()
            row[f"{name}_error"] = errors(a, results)
            row[f"{name}_same"] = same_on_all(*results)
            graphs[name] = capture([call] * count)
            dist.barrier()
        times = interleaved_us(graphs, count, rounds=10, replays=5, before_round=dist.barrier)
        say(row | slowest(times), given.out)


def soak(a: AllReduceResidualNormArguments, replays: int) -> dict[str, Any]:
    """Replays calls with random delays, and compares the bits of all ranks at the end.

    The x of each call depends on the call before it, so a wrong bit stays until the end.
    """
    x, residual, factor = a.x.clone(), a.residual.clone(), 1.0 + 0.5 * dist.get_rank()
    call = replace(a, x=x, residual=residual)

    def step() -> None:
        total, normed = OP.call(call)
        x.copy_(normed * factor)
        residual.copy_(total * 0.5)

    graph = capture([step] * 10)
    delays = torch.Generator().manual_seed(dist.get_rank())
    started = time.perf_counter()
    for _ in range(replays):
        if int(torch.randint(0, 10, (1,), generator=delays)) == 0:
            torch.cuda._sleep(int(torch.randint(1000, 300_000, (1,), generator=delays)))
        graph.replay()
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - started, 1)
    finite = bool(residual.isfinite().all())
    return {"same": same_on_all(residual), "finite": finite, "seconds": seconds}


def run_soak(given: argparse.Namespace) -> None:
    for tokens in (1, 48, 300):
        row = {"part": "soak", "tokens": tokens, "calls": 10_000}
        say(row | soak(arguments(tokens), 1000), given.out)


# --- a model --------------------------------------------------------------------------------------


class Rows(torch.nn.Module):
    """A linear. The columns of its weight are divided among the ranks, and the linear sums the
    results over ranks."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = F.linear(x, self.weight)
        dist.all_reduce(part)
        return part


def cut(model: Any) -> Any:
    """Reduces a Llama to the heads and columns of this rank, and returns it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for layer in model.model.layers:
        for name in (*(f"self_attn.{n}_proj" for n in "qkv"), "mlp.gate_proj", "mlp.up_proj"):
            linear = layer.get_submodule(name)
            linear.weight.data = linear.weight.data.chunk(ranks, 0)[rank].contiguous()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weight = layer.get_submodule(name).weight.data.chunk(ranks, 1)[rank].contiguous()
            layer.set_submodule(name, Rows(weight))
    model.config.num_key_value_heads //= ranks  # sets the heads of the cache
    torch.cuda.empty_cache()
    return model


def wall_us(call: Callable[[], Any], steps: int = 20) -> float:
    """Returns the mean wall-clock microseconds of a step. The GPU finishes each step before the
    next begins."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        call()
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started) / steps


def caller(forward: Any, cache: Any, position: int, inputs: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function that runs a step on a cache that holds `position` tokens."""
    from decode_cache import rewind

    def call() -> Any:
        rewind(cache, position)
        torch.compiler.cudagraph_mark_step_begin()
        return forward(past_key_values=cache, use_cache=True, **inputs).logits

    return call


def forwards(model: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    if not options:
        yield "eager", model
    yield "stock", torch.compile(model, **options)
    yield "ours", torch.compile(model, backend=tilewright, **options)


def run_model(given: argparse.Namespace, name: str) -> None:
    from decode_cache import generate_inputs, new_cache
    from end_to_end_models import build

    model = cut(build(name, given.layers))
    for case in given.cases:
        if not in_time(given):
            return
        torch._dynamo.reset()
        before = len(reports())
        batch, tokens = map(int, case.split("x"))
        position = 1000 if tokens == 1 else 0
        ids = torch.randint(
            0, model.config.vocab_size, (batch, tokens), device="cuda",
            generator=torch.Generator("cuda").manual_seed(7),
        )  # fmt: skip
        row = {"part": "model", "model": name, "case": case, "layers": given.layers}
        graphs, kept, logits = {}, [], {}
        modes = [("", dict(forwards(model)))]
        if case in given.reduce_overhead:
            modes.insert(0, ("ro_", dict(forwards(model, mode="reduce-overhead"))))
        for mode, found in modes:
            for variant, forward in found.items():
                cache = new_cache(model, batch, 2048)
                inputs = generate_inputs(model, cache, ids, position, padded=False)
                kept.append((cache, inputs))

                call = caller(forward, cache, position, {"input_ids": ids, **inputs})
                started = time.perf_counter()
                logits[mode + variant] = call().float().clone()
                row[f"{mode}{variant}_first_s"] = round(time.perf_counter() - started, 1)
                row[f"{mode}{variant}_same"] = same_on_all(logits[mode + variant])
                row |= slowest({f"{mode}wall_{variant}": wall_us(call)})
                if not mode:
                    graphs[variant] = capture([call], warmup=2)
                    dist.barrier()
        times = interleaved_us(graphs, 1, rounds=10, replays=5, before_round=dist.barrier)
        for variant, made in logits.items():
            difference = ((made - logits["eager"]).norm() / logits["eager"].norm()).item()
            row[f"{variant}_difference"] = float(f"{difference:.1e}")
        row |= slowest({f"graph_{variant}": t for variant, t in times.items()})
        found_here = reports()[before:]
        ops = [match.op for report in found_here for match in report.matches]
        row["fused"] = {op: ops.count(op) for op in dict.fromkeys(ops)}
        row["notes"] = [note for report in found_here for note in report.notes]
        say(row, given.out)
        del graphs, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["op", "soak", "model"])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--models", nargs="+", default=["llama3-8b", "llama3-70b"])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--reduce-overhead", nargs="*", default=["1x1"], help="cases for this mode")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=PATIENCE_S), device_id=device)
    with torch.no_grad():
        if "op" in given.parts:
            run_op(given)
        if "soak" in given.parts:
            run_soak(given)
        for name in given.models if "model" in given.parts else ():
            run_model(given, name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
