"""The whole MLA prefill branch by the fused ops, beside the unfused branch compiled by Inductor.

    python benchmarks/mla_branch.py [--heads 16 128] [--tokens 512 2048 8192] [--out FOLDER]

DeepSeek-V3's widths, one sequence of new tokens, nothing cached before; a paged latent cache of 128
slots a page. "bf16": `mla_prefill`; "fp8": `mla_prefill_branch_fp8`; "fp8 core": the same with
queries, keys and values of 8 bits, where its kernels are let (`ops/mla_obstacles.py`). "stock":
norm, rotation, `index_put_`, gather, linear, cat and SDPA as serving code writes them, in bf16,
under `torch.compile`. CUDA graphs, variants in turn, microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import capture, interleaved_us, keep
from tune_qkv import compile_quietly

from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla_prefill import OP as PREFILL
from tilewright.ops.mla_prefill import MlaPrefillArguments
from tilewright.ops.mla_prefill_fp8 import OP as BRANCH
from tilewright.ops.mla_prefill_fp8 import MlaBranchArguments

RANK, ROPE, NOPE, V_DIM, PAGE = 512, 64, 128, 128, 128
SCALE = (NOPE + ROPE) ** -0.5
FP8 = torch.float8_e4m3fn
VARIANTS = ("bf16", "fp8", "fp8 core")
DEFAULT = VARIANTS[:2]


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def stock(
    q: torch.Tensor, latents: torch.Tensor, norm: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """[T, H, V] of q [T, H, N + R]; the entries of pool [P, PAGE, L + R] at `slots` are written."""
    heads, flat = q.shape[1], pool.view(-1, RANK + ROPE)
    latent = F.rms_norm(latents[:, :RANK], (RANK,), norm, 1e-6)
    flat[slots] = torch.cat((latent, turn(latents[:, RANK:], cos, sin)), -1)
    q = torch.cat((q[..., :NOPE], turn(q[..., NOPE:], cos[:, None], sin[:, None])), -1)
    entries = flat[slots]
    kv = F.linear(entries[:, :RANK], weight).unflatten(-1, (heads, NOPE + V_DIM))
    rope = entries[:, None, RANK:].expand(-1, heads, -1)
    k, v = torch.cat((kv[..., :NOPE], rope), -1), kv[..., NOPE:]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
    return out.squeeze(0).transpose(0, 1).contiguous()


class Problem:
    """One set of tensors and the variants' arguments on it."""

    def __init__(self, heads: int, tokens: int, device: str) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device).bfloat16()

        pages = -(-tokens // PAGE)
        self.q, self.latents = normal(tokens, heads, NOPE + ROPE), normal(tokens, RANK + ROPE)
        self.norm = torch.ones(RANK, device=device).bfloat16()
        angles = torch.rand(pages * PAGE, ROPE // 2, device=device) * 6.28
        self.freqs = torch.stack((angles.cos(), angles.sin()), -1).flatten(-2).bfloat16()
        self.weight = normal(heads * (NOPE + V_DIM), RANK) * RANK**-0.5
        self.blocks = normal(pages, 1, 1, PAGE, 1, RANK + ROPE)
        table = torch.randperm(pages, device=device)
        token = torch.arange(tokens, device=device)
        self.table = table.int().unsqueeze(0)
        self.slots = table[token // PAGE] * PAGE + token % PAGE
        self.offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self.zero = torch.zeros(1, dtype=torch.int32, device=device)

    def stock(self) -> tuple[torch.Tensor, ...]:
        rows = self.freqs[: self.q.shape[0]]
        pool = self.blocks[:, 0, 0, :, 0]
        tables = rows[:, ::2].contiguous(), rows[:, 1::2].contiguous()
        return (self.q, self.latents, self.norm, *tables, self.weight, pool, self.slots)

    def bf16(self) -> MlaPrefillArguments:
        entries = self.blocks[:, 0, 0]
        return MlaPrefillArguments(
            q=self.q, latent=self.latents[:, :RANK], k_rope=self.latents[:, RANK:],
            kv_b_weight=self.weight, latent_cache=self.blocks,
            latent_window=CacheWindow.of(entries[..., :RANK], self.blocks).to_ints(),
            rope_window=CacheWindow.of(entries[..., RANK:], self.blocks).to_ints(),
            v_dim=V_DIM, scale=SCALE, row_offsets=self.offsets, keys="table",
            key_offsets=self.offsets, num_keys=self.q.shape[0], slots="ragged",
            lookup_table=self.table, cache_lengths=self.zero, norm_weight=self.norm,
            cos=self.freqs[:, ::2], sin=self.freqs[:, 1::2], rope_style="interleaved",
            rope_by_position=True,
        )  # fmt: skip

    def fp8(self, core: torch.dtype | None = None) -> MlaBranchArguments:
        codes, scale = fp8_block.quantize_blocks(self.weight)
        return MlaBranchArguments(
            q=self.q, latents=self.latents, input_row_offsets=self.offsets, freqs_cis=self.freqs,
            kv_norm_gamma=self.norm, blocks=self.blocks, cache_lengths=self.zero,
            lookup_table=self.table, layer_idx=0, scale=SCALE, epsilon=1e-6,
            buffer_row_offsets=self.offsets, cache_offsets=self.zero,
            buffer_length=[self.q.shape[0]], kv_b_proj=codes, kv_b_proj_scale=scale, v_dim=V_DIM,
            attention_dtype=core,
        )  # fmt: skip


def specs_of(heads: int, tokens: int) -> dict[Any, None]:
    """The kernels of the fused variants; nothing is computed."""
    problem = Problem(heads, tokens, "meta")
    reports = [PREFILL.plan_for(problem.bf16(), "sm90")]
    reports += [BRANCH.plan_for(problem.fp8(core), "sm90") for core in (None, FP8)]
    return dict.fromkeys(spec for report in reports for spec in report.specs)


def run(heads: int, tokens: int, variants: Sequence[str] = DEFAULT) -> dict[str, Any]:
    problem = Problem(heads, tokens, "cuda")
    torch._dynamo.reset()
    compiled = torch.compile(stock, dynamic=False, fullgraph=True)
    calls = {
        "stock": partial(compiled, *problem.stock()),
        "bf16": partial(PREFILL.call, problem.bf16()),
        "fp8": partial(BRANCH.call, problem.fp8()),
        "fp8 core": partial(BRANCH.call, problem.fp8(FP8)),
    }
    calls = {name: call for name, call in calls.items() if name in ("stock", *variants)}
    graphs, errors = {}, {}
    exact = PREFILL.call(problem.bf16()).float()
    for name, call in calls.items():
        try:
            errors[name] = float((call().float() - exact).norm() / exact.norm())
            graphs[name] = capture([call], warmup=1)
        except Exception as error:  # what does not run is a result here
            print(f"  {name}: {str(error)[:300]}", flush=True)
    times = interleaved_us(graphs, 1, rounds=3, replays=2)
    row = {"heads": heads, "tokens": tokens, "us": times, "difference": errors}
    named = "  ".join(f"{n} {t:.0f} ({times['stock'] / t:.2f}x)" for n, t in times.items())
    print(f"H={heads} T={tokens}: {named}", {n: round(e, 4) for n, e in errors.items()}, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--variants", nargs="+", default=DEFAULT, choices=VARIANTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = list(itertools.product(options.heads, options.tokens))
    specs: dict[Any, None] = {}
    for heads, tokens in sizes:
        specs |= specs_of(heads, tokens)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        outcomes = list(pool.map(compile_quietly, specs, chunksize=1))
    print(f"{len(specs)} kernels, {sum(map(bool, outcomes))} do not compile", flush=True)
    rows = []
    for heads, tokens in sizes:
        rows.append(run(heads, tokens, options.variants))
        keep("mla_branch", rows, options.out)


if __name__ == "__main__":
    main()
