"""What a node of a large graph costs us, where one structure is repeated 512 to 4096 times.

    python benchmarks/large_graphs.py [--sizes 512 1024 2048 4096] [--only unbind] [--profile]

A size is about how many nodes a graph has. Each row has Dynamo's seconds and ours (all of `fuse`:
copy, view, match, rewrite, lint and plans), and ours for each node; `growth` is the time of a node
of the largest graph over that of the smallest: 1 where time is linear in the nodes. Needs no GPU.
Results go to benchmarks/results/large_graphs.json.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import keep
from torch import Tensor

from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options

WIDTH = 16

#: The structures by name: how many nodes one piece of each has, and what makes one of n pieces:
#: the function and its arguments.
Made = tuple[Callable[..., Any], tuple[Any, ...]]
STRUCTURES: dict[str, tuple[int, Callable[[int], Made]]] = {}


def structure(nodes: int) -> Callable[[Callable[[int], Made]], Callable[[int], Made]]:
    """Adds a structure; nodes: how many a piece of it has."""

    def add(make: Callable[[int], Made]) -> Callable[[int], Made]:
        STRUCTURES[make.__name__] = nodes, make
        return make

    return add


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


@structure(1)
def unbind(n: int) -> Made:
    return lambda w: torch.stack(w.flatten().unbind(0)), (_rand(n),)


@structure(2)
def split_sums(n: int) -> Made:
    return lambda x: torch.cat([p + 1 for p in x.split(2)]), (_rand(2 * n),)


@structure(2)
def chunk_gated(n: int) -> Made:
    return lambda x: torch.cat([p * 2 for p in x.chunk(n, -1)], -1), (_rand(4, n * 2),)


@structure(1)
def tensor_split(n: int) -> Made:
    return lambda x: torch.stack(x.tensor_split(n, 0)[::-1]), (_rand(n * 2),)


@structure(1)
def selects(n: int) -> Made:
    return lambda x: torch.stack([x[i] for i in range(n)][::-1]), (_rand(n, 4),)


@structure(2)
def slices(n: int) -> Made:
    return lambda x: torch.cat([x[:, i : i + 3].relu() for i in range(n)]), (_rand(2, n + 3),)


@structure(1)
def hstack_slices(n: int) -> Made:
    return lambda x: torch.hstack([x[:, i : i + 3] for i in range(n)]), (_rand(2, n + 3),)


@structure(2)
def setitems(n: int) -> Made:
    def run(x: Tensor, y: Tensor) -> Tensor:
        for i in range(n):
            x[i] = y[i]
        return x.sum()

    return run, (_rand(n, 4), _rand(n, 4))


@structure(2)
def setitems_fresh(n: int) -> Made:
    def run(y: Tensor) -> Tensor:
        x = torch.empty(n, 4)
        for i in range(n):
            x[i : i + 1] = y[i]
        return x + 1

    return run, (_rand(n, 4),)


@structure(4)
def reads_between_writes(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        for i in range(1, n):
            x[i] = x[i - 1] * 0.5
        return x.sum()

    return run, (_rand(n, 4),)


@structure(3)
def in_place_views(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        y = x * 2
        for i in range(n):
            y[i].mul_(2.0)
        return y

    return run, (_rand(n, 4),)


@structure(1)
def in_place_chain(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        y = x * 2
        for _ in range(n):
            y.add_(1.0)
        return y

    return run, (_rand(4, 4),)


@structure(7)
def experts(n: int) -> Made:
    def run(x: Tensor, ids: Tensor, w: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(n):
            h = F.linear(x, w[e])
            out = out + torch.where((ids == e).unsqueeze(-1), h * weights, 0.0)
        return out

    x, ids = _rand(8, WIDTH), torch.randint(0, n, (8,))
    return run, (x, ids, _rand(n, WIDTH, WIDTH), _rand(8, 1))


@structure(9)
def experts_masked(n: int) -> Made:
    def run(x: Tensor, routed: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(n):
            h = F.silu(F.linear(x, gate[e])) * F.linear(x, up[e])
            out += F.linear(h, down[e]) * routed[:, e : e + 1]
        return out

    weights = [_rand(n, WIDTH, WIDTH) for _ in range(3)]
    return run, (_rand(8, WIDTH), _rand(8, n).softmax(-1), *weights)


@structure(8)
def layers(n: int) -> Made:
    def run(x: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for _ in range(n):
            h = F.rms_norm(x, (WIDTH,), norm)
            h = F.linear(F.relu(F.linear(h, up)), down)
            x = x + h
        return x

    parameters = map(torch.nn.Parameter, (_rand(WIDTH), _rand(WIDTH, WIDTH), _rand(WIDTH, WIDTH)))
    return run, (_rand(8, WIDTH), *parameters)


@structure(24)
def attention_layers(n: int) -> Made:
    def run(x: Tensor, w: Tensor, cache: Tensor, pos: Tensor) -> Tensor:
        for i in range(n):
            q, k, v = (t.view(1, 4, 2, 8).transpose(1, 2) for t in F.linear(x, w).split(16, -1))
            cache[0, i].index_copy_(2, pos, k)
            cache[1, i].index_copy_(2, pos, v)
            h = F.scaled_dot_product_attention(q, cache[0, i], cache[1, i])
            x = x + h.transpose(1, 2).reshape(1, 4, 16)
        return x

    w = torch.nn.Parameter(_rand(48, WIDTH))
    return run, (_rand(1, 4, WIDTH), w, _rand(2, n, 1, 2, 32, 8), torch.arange(4))


@structure(1)
def residuals(n: int) -> Made:
    def run(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(n):
            x = x + y
        return x

    return run, (_rand(4, 4), _rand(4, 4))


@structure(4)
def residual_linears(n: int) -> Made:
    def run(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(n):
            x = x + F.linear(x, w)
        return x

    return run, (_rand(4, WIDTH), torch.nn.Parameter(_rand(WIDTH, WIDTH)))


@structure(6)
def adapters(n: int) -> Made:
    def run(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w)
        for i in range(n):
            y = y + F.linear(F.linear(x, a[i]), b[i]) * 0.5
        return y

    w = torch.nn.Parameter(_rand(WIDTH, WIDTH))
    return run, (_rand(4, WIDTH), w, _rand(n, 4, WIDTH), _rand(n, WIDTH, 4))


@structure(7)
def adapters_masked(n: int) -> Made:
    def run(x: Tensor, ids: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w)
        for i in range(n):
            mask = (ids == i).unsqueeze(-1)
            y += F.linear(F.linear(x, a[i]), b[i]) * mask
        return y

    w = torch.nn.Parameter(_rand(WIDTH, WIDTH))
    ids = torch.randint(0, n, (4,))
    return run, (_rand(4, WIDTH), ids, w, _rand(n, 4, WIDTH), _rand(n, WIDTH, 4))


@structure(9)
def heads(n: int) -> Made:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = []
        for i in range(n):
            scores = q[:, i] @ k[:, i].transpose(-1, -2) * 0.25
            found.append(scores.softmax(-1) @ v[:, i])
        return torch.stack(found, 1)

    return run, tuple(_rand(1, n, 4, 8) for _ in range(3))


@structure(4)
def one_hot_where(n: int) -> Made:
    def run(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        for e in range(n):
            x = torch.where(ids == e, table[e], x)
        return x

    return run, (_rand(8, 4), torch.randint(0, n, (8, 1)), _rand(n, 4))


@structure(2)
def growing(n: int) -> Made:
    def run(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(n):
            x = torch.cat([x, y])
        return x

    return run, (_rand(1, 4), _rand(1, 4))


@structure(2)
def nested_views(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        for _ in range(n):
            x = x.view(2, 8).transpose(0, 1).reshape(4, 4)
        return x

    return run, (_rand(4, 4),)


@structure(2)
def window(n: int) -> Made:
    def run(x: Tensor) -> Tensor:
        for _ in range(n):
            x = x[1:] + 1
        return x

    return run, (_rand(n + 2, 4),)


@structure(1)
def inputs(n: int) -> Made:
    return lambda *xs: torch.stack(xs), tuple(_rand(4) for _ in range(n))


@structure(3)
def written_inputs(n: int) -> Made:
    def run(y: Tensor, *xs: Tensor) -> Tensor:
        for x in xs:
            x[0:2] = y
        return y + 1

    return run, (_rand(2), *(_rand(4) for _ in range(n)))


def measure(name: str, size: int, profile: bool = False) -> dict[str, Any]:
    """Seconds of Dynamo and ours for one structure of about `size` nodes."""
    nodes, make = STRUCTURES[name]
    torch._dynamo.reset()
    function, args = make(max(2, size // nodes))
    row: dict[str, Any] = {"structure": name, "size": size}
    profiler = cProfile.Profile()
    start = time.perf_counter()

    def backend(gm, example_inputs):
        row["dynamo_s"] = time.perf_counter() - start
        if profile:
            profiler.enable()
        begun = time.process_time()
        report = fuse(gm, Options(inner="eager", target="sm100", everywhere=True))
        row["ours_s"] = time.process_time() - begun
        profiler.disable()
        row["nodes"] = len(gm.graph.nodes)
        row["sites"] = len(report.matches)
        row.update({f"{phase}_s": s for phase, s in report.seconds.items()})
        return lambda *given: gm.forward(*given)

    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=False)(*args)
    row["us_per_node"] = 1e6 * row["ours_s"] / row["nodes"]
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--only", nargs="+", default=list(STRUCTURES), choices=list(STRUCTURES))
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--profile", action="store_true", help="print a profile; keep nothing")
    given = parser.parse_args()
    torch._dynamo.config.recompile_limit = 1000
    rows = []
    for name in given.only:
        measure(name, 32)  # imports and first-use costs are not what is measured
        found = [measure(name, size, given.profile) for size in given.sizes]
        growth = found[-1]["us_per_node"] / found[0]["us_per_node"]
        rows += [row | {"growth": growth} for row in found]
        each = "  ".join(f"{row['nodes']:6} {row['us_per_node']:7.0f} us" for row in found)
        print(f"{name:22} {each}  {found[-1]['sites']:5} sites  growth {growth:.2f}", flush=True)
    if not given.profile and given.only == list(STRUCTURES):
        keep("large_graphs", rows, given.out)


if __name__ == "__main__":
    main()
