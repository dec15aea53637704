"""Measures the time of a decode step of 64 tokens, which must not depend on the cache's size.

    python benchmarks/cache_size.py [--out DIR]

The step is the projection, the rotation and `cache.view(-1, H, D)[slots] = k` of a layer of
Llama-3-8B. It runs in eager mode, under stock torch.compile and under tilewright, with K and V
caches of 16 MiB to 2 GiB each. Times are in microseconds per step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from timing import capture, interleaved_us, keep
from torch.nn.functional import linear

from tilewright.compiler import reports

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE = 4096, 32, 8, 128, 16
TOKENS = 64
SIZES_MIB = (16, 128, 2048)
ARGUMENT_SETS = 6


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def step(x, q_weight, k_weight, v_weight, cos, sin, slots, k_cache, v_cache):
    """Computes an attention layer up to the cache write, as serving code does."""
    q = linear(x, q_weight).view(-1, HEADS, HEAD_DIM)
    k = linear(x, k_weight).view(-1, KV_HEADS, HEAD_DIM)
    v = linear(x, v_weight).view(-1, KV_HEADS, HEAD_DIM)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = k
    v_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = v
    return q


def arguments(pages: int) -> list[torch.Tensor]:
    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").mul_(scale).to(torch.bfloat16)

    width = HIDDEN**-0.5
    kv = KV_HEADS * HEAD_DIM
    return [
        normal(TOKENS, HIDDEN),
        normal(HEADS * HEAD_DIM, HIDDEN, scale=width),
        normal(kv, HIDDEN, scale=width),
        normal(kv, HIDDEN, scale=width),
        normal(TOKENS, 1, HEAD_DIM),
        normal(TOKENS, 1, HEAD_DIM),
        torch.randperm(pages * PAGE, device="cuda")[:TOKENS],
    ]


def measure(mib: int) -> dict[str, Any]:
    torch._dynamo.reset()
    pages = mib * 2**20 // (PAGE * KV_HEADS * HEAD_DIM * 2)
    shape = (pages, PAGE, KV_HEADS, HEAD_DIM)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    sets = [[*arguments(pages), *caches] for _ in range(ARGUMENT_SETS)]
    variants = {
        "eager": step,
        "stock": torch.compile(step),
        "tilewright": torch.compile(step, backend="tilewright"),
    }
    graphs = {
        name: capture([lambda f=forward, a=args: f(*a) for args in sets])
        for name, forward in variants.items()
    }
    row: dict[str, Any] = {"cache_mib": mib, "sites": len(reports()[-1].matches)}
    return row | interleaved_us(graphs, ARGUMENT_SETS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    rows = []
    with torch.no_grad():
        for mib in SIZES_MIB:
            rows.append(measure(mib))
            r = rows[-1]
            print(
                f"{mib:5} MiB  eager {r['eager']:7.1f}  stock {r['stock']:7.1f}  "
                f"tilewright {r['tilewright']:7.1f} us  ({r['sites']} site fused)",
                flush=True,
            )
    keep("cache_size", rows, given.out)


if __name__ == "__main__":
    main()
