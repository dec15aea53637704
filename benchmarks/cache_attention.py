"""Benchmark of attention over a cache by tilewright and by others, in microseconds and as a share
of the memory rate.

    python benchmarks/cache_attention.py [--out DIR] [--cases decode-16x2048 ...]

The cases have Llama-3-8B's widths (32 query heads of 128 columns, 8 key and value heads), and, with
`mla_decode`, the latents of DeepSeek-V2-Lite (16 heads) and DeepSeek-V3 (128 heads), in bf16. The
variants are captured as CUDA graphs and timed in turn with a cold L2 cache: each call of a graph
reads its own cache, and these caches together exceed the L2 cache.

    position          static cache; each query sees the keys up to its position
    mask              static cache, a bool mask [B, 1, S, K] and its list of blocks
    padded            `mask` with sequences padded on the left, by up to half their length
    paged             pages of 64 keys, block table, positions
    sdpa              PyTorch's attention over the tokens present only (enable_gqa)
    sdpa_mask         PyTorch's attention over the whole cache with the mask
    flex              flex_attention over the whole cache, compiled, by the same positions
    stock             torch.compile of repeat_kv and SDPA over the whole cache with the mask

For decode, `share` is the rate at which the keys and values (or latents) of the tokens present are
read once, as a share of the copy rate of the same run (`bounds.py`). For prefill, it is the TFLOP/s
of the visible pairs. Each case runs in a separate process (`side_by_side.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bounds import copy_bytes_per_s
from side_by_side import finished_rows, has_turn
from timing import capture, interleaved_us, keep
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tilewright.ops import cache_attention, mla_decode
from tilewright.ops.attention.mask_blocks import OP as MASK_BLOCKS

HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 64
RANK, ROPE, NOPE, V_DIM = 512, 64, 128, 128
COLD_BYTES, MOST_SETS = 250e6, 16

Variants = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """A case: `batch` sequences of `present` tokens, in a cache with room for `capacity` tokens
    each.

    The last `queries` tokens of each sequence are the queries. `latent_heads` is the number of
    heads of an MLA layer, whose cache holds latents; 0 for other attention.
    """

    batch: int
    present: int
    capacity: int
    queries: int = 1
    latent_heads: int = 0

    @property
    def sets(self) -> int:
        return max(1, min(MOST_SETS, int(COLD_BYTES / self.bytes_present) + 1))

    @property
    def bytes_present(self) -> int:
        width = RANK + ROPE if self.latent_heads else 2 * KV_HEADS * WIDTH
        return 2 * self.batch * self.present * width

    @property
    def flop(self) -> float:
        pairs = self.queries * (self.present - (self.queries - 1) / 2)
        return 4.0 * self.batch * HEADS * WIDTH * pairs


CASES = {
    "decode-16x2048": Case(16, 2048, 2048),
    "decode-64x1000": Case(64, 1000, 2048),
    "decode-1x8192": Case(1, 8192, 8192),
    "decode-1x131072": Case(1, 131072, 131072),
    "capacity-1024": Case(4, 1024, 1024),
    "capacity-8192": Case(4, 1024, 8192),
    "capacity-65536": Case(4, 1024, 65536),
    "several-16x4": Case(16, 2048, 4096, queries=4),
    "prefill-1x1024": Case(1, 1024, 1024, queries=1024),
    "prefill-8x1024": Case(8, 1024, 1024, queries=1024),
    "prefill-1x512+3584": Case(1, 4096, 4096, queries=512),
    "mla-64x1000-16": Case(64, 1000, 2048, latent_heads=16),
    "mla-64x1000-128": Case(64, 1000, 2048, latent_heads=128),
    "mla-1x8192-128": Case(1, 8192, 8192, latent_heads=128),
}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def positions(case: Case) -> torch.Tensor:
    return torch.arange(case.present - case.queries, case.present, device="cuda")


def visible(case: Case, *, padded: bool = False) -> torch.Tensor:
    """Returns a bool mask [B, 1, queries, capacity].

    With `padded`, the mask hides the first b / (2 * B) of the tokens of sequence b, where B is the
    number of sequences.
    """
    keys = torch.arange(case.capacity, device="cuda")
    mask = (keys <= positions(case)[:, None]).expand(case.batch, 1, -1, -1)
    if not padded:
        return mask.contiguous()
    start = torch.arange(case.batch, device="cuda") * case.present // (2 * case.batch)
    return (mask & (keys >= start[:, None, None, None])).contiguous()


def paged(cache: torch.Tensor) -> torch.Tensor:
    """Returns a cache [B, capacity, ..] as pages [B * capacity / PAGE, PAGE, ..]."""
    return cache.unflatten(1, (-1, PAGE)).flatten(0, 1)


def block_table(case: Case) -> torch.Tensor:
    pages = case.batch * case.capacity // PAGE
    return torch.arange(pages, device="cuda", dtype=torch.int32).view(case.batch, -1)


def attention_variants(case: Case) -> list[Variants]:
    """Returns the calls of each variant, for each set of caches."""
    mask, padded = visible(case), visible(case, padded=True)
    blocks, padded_blocks = (MASK_BLOCKS.torch_op(m) for m in (mask, padded))
    where = positions(case)
    table = block_table(case)
    block_mask = create_block_mask(
        lambda b, h, q, k: k <= q + (case.present - case.queries),
        None, None, case.queries, case.capacity, device="cuda",
    )  # fmt: skip
    flex = torch.compile(flex_attention, dynamic=False)
    stock = torch.compile(repeated, dynamic=False, fullgraph=True)
    sets = []
    for _ in range(case.sets):
        q = normal(case.batch * case.queries, HEADS, WIDTH)
        k, v = (normal(case.batch, KV_HEADS, case.capacity, WIDTH) for _ in "kv")
        rows = [x.transpose(1, 2) for x in (k, v)]
        pools = [paged(x.contiguous()) for x in rows]
        ours: dict[str, Any] = {"scale": WIDTH**-0.5, "num_sequences": case.batch}
        by_place = {**ours, "positions": where}
        by_mask = {**ours, "mask": "none"}
        heads = q.unflatten(0, (case.batch, -1)).transpose(1, 2)
        causal = {"is_causal": True} if case.queries == case.present else {}
        if case.queries not in (1, case.present):
            causal = {"attn_mask": mask[..., : case.present]}
        sets.append(
            {
                "position": partial(cache_attention, q, *rows, **by_place),
                "mask": partial(
                    cache_attention, q, *rows, attn_mask=mask, mask_blocks=blocks, **by_mask
                ),
                "padded": partial(
                    cache_attention, q, *rows, attn_mask=padded, mask_blocks=padded_blocks,
                    **by_mask,
                ),
                "paged": partial(cache_attention, q, *pools, block_table=table, **by_place),
                "sdpa": partial(
                    scaled_dot_product_attention, heads, k[:, :, : case.present],
                    v[:, :, : case.present], enable_gqa=True, **causal,
                ),
                "sdpa_mask": partial(
                    scaled_dot_product_attention, heads, k, v, mask, enable_gqa=True
                ),
                "flex": partial(flex, heads, k, v, block_mask=block_mask, enable_gqa=True),
                "stock": partial(stock, heads, k, v, mask),
            }
        )  # fmt: skip
    return sets


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Computes attention as Hugging Face's layers do: repeated keys and values, SDPA with a
    mask."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, mask)


def latent_variants(case: Case) -> list[Variants]:
    mask = visible(case)
    blocks = MASK_BLOCKS.torch_op(mask)
    heads = case.latent_heads
    scale = (NOPE + ROPE) ** -0.5
    stock = torch.compile(up_projected, dynamic=False, fullgraph=True)
    weight = normal(heads * (NOPE + V_DIM), RANK)
    sets = []
    for _ in range(case.sets):
        q = normal(case.batch, heads, NOPE + ROPE)
        latent, rope = (normal(case.batch, case.capacity, width) for width in (RANK, ROPE))
        ours: dict[str, Any] = {"scale": scale, "num_sequences": case.batch, "v_dim": V_DIM}
        given = (q, latent, rope, weight)
        by_mask = {**ours, "mask": "none", "attn_mask": mask, "mask_blocks": blocks}
        sets.append(
            {
                "position": partial(mla_decode, *given, positions=positions(case), **ours),
                "mask": partial(mla_decode, *given, **by_mask),
                "stock": partial(stock, *given, mask, scale),
            }
        )
    return sets


def up_projected(
    q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor,
    mask: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Computes a decode step of MLA as Hugging Face's layers do."""
    heads = q.shape[1]
    kv = (latent @ weight.T).unflatten(-1, (heads, NOPE + V_DIM)).transpose(1, 2)
    k = torch.cat((kv[..., :NOPE], rope.unsqueeze(1).expand(-1, heads, -1, -1)), -1)
    return scaled_dot_product_attention(q.unsqueeze(2), k, kv[..., NOPE:], mask, scale=scale)


def run_case(name: str) -> None:
    """Measures one case in its own process, and prints its row."""
    torch.manual_seed(0)
    case = CASES[name]
    sets = latent_variants(case) if case.latent_heads else attention_variants(case)
    graphs = {}
    for variant in sets[0]:
        try:
            graphs[variant] = capture([calls[variant] for calls in sets], warmup=1)
        except (RuntimeError, NotImplementedError) as error:
            print(f"{name} {variant}: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.empty_cache()
    if not has_turn():
        return
    times = interleaved_us(graphs, len(sets), rounds=5, replays=3)
    row: dict[str, Any] = {"case": name, "batch": case.batch, "present": case.present}
    row |= {"capacity": case.capacity, "queries": case.queries, "us": times}
    if case.queries >= 512:
        row["tflops"] = {name: 1e-6 * case.flop / us for name, us in times.items()}
    else:
        rate = 1e-6 * copy_bytes_per_s()
        row["copy_gbs"] = 1e-3 * rate
        row["share"] = {name: case.bytes_present / us / rate for name, us in times.items()}
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--case", help="one case; set by the parent process")
    parser.add_argument("--hold", type=Path, help="start timing once this file exists")
    given = parser.parse_args()
    if given.case:
        with torch.no_grad():
            run_case(given.case)
        return
    commands = {name: [__file__, "--case", name] for name in given.cases}
    rows: list[dict[str, Any]] = []
    for name, row in finished_rows(commands, given.hold):
        rows.append(row)
        keep("cache_attention", rows, given.out)
        figures = row.get("share") or row["tflops"]
        shown = "  ".join(f"{k} {us:.1f} ({figures[k]:.2f})" for k, us in row["us"].items())
        print(f"{name:20} {shown}", flush=True)


if __name__ == "__main__":
    main()
