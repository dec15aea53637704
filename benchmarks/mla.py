"""MLA prefill of one layer: the whole branch, and the attention core alone, beside their peers.

    python benchmarks/mla.py [--out DIR] [--heads 16 128] [--lengths 512 ...] [--mixes ...]
                             [--parts branch core]

Microseconds per call, CUDA graphs, DeepSeek-V3's widths (rank 512, 128 + 64 columns of q and k, 128
of v), bf16, no cached prefix. The branch is all between the two projections: norm and rotation of
the latents, their write to a paged cache, the gather of the keys from it, the up-projection,
attention; `stock` is torch.compile of the same in PyTorch, with the default SDPA, sequence by
sequence with lengths known on the host (ours has them on the device alone). branch_fp8 is ours with
latents quantised and an 8-bit core; it has no peer in stock. The core alone has its keys and values
made: cuDNN's and flex_attention's peers are given the keys joined. TFLOP/s count the causal half.
Errors are the root of the mean squared difference from float64, over the rms of the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import capture, interleaved_us, keep
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla_attention import attend
from tilewright.ops.mla_prefill import OP

RANK, ROPE, NOPE, V_DIM, PAGE = 512, 64, 128, 128, 64
SCALE = (NOPE + ROPE) ** -0.5
FP8 = torch.float8_e4m3fn
DEVICE = torch.device("cuda", 0)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Sequences of one batch, as a server sees them.
MIXES = {
    "even": (1024,) * 4,
    "one long": (4096, 512, 256, 128, 64, 64),
    "many short": (200, 120, 333, 64, 512, 90, 256, 128, 400, 77, 300, 150),
}
CHECKED_TOKENS = 1024
Calls = dict[str, Callable[[], Any]]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, .., ROPE] by neighbouring pairs; cos, sin [T, ROPE / 2]."""
    shape = (x.shape[0], *(1,) * (x.dim() - 2), ROPE // 2)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.view(shape), sin.view(shape)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def stock_branch(q, latent, k_rope, weight, norm, cos, sin, pool, slots, lengths):
    """The branch as engines spell it in PyTorch."""
    heads = q.shape[1]
    q_rope = rotated(q[..., NOPE:], cos, sin)
    entry = torch.cat((rms_norm(latent, (RANK,), norm, 1e-6), rotated(k_rope, cos, sin)), -1)
    flat = pool.view(-1, RANK + ROPE)
    flat[slots] = entry
    keys = flat[slots]
    kv = linear(keys[:, :RANK], weight).view(-1, heads, NOPE + V_DIM)
    shared = keys[:, None, RANK:].expand(-1, heads, -1)
    k = torch.cat((kv[..., :NOPE], shared), -1)
    q = torch.cat((q[..., :NOPE], q_rope), -1)
    outs, first = [], 0
    for length in lengths:
        parts = (t[first : first + length].transpose(0, 1)[None] for t in (q, k, kv[..., NOPE:]))
        out = scaled_dot_product_attention(*parts, is_causal=True, scale=SCALE)
        outs.append(out[0].transpose(0, 1))
        first += length
    return torch.cat(outs) if len(outs) > 1 else outs[0]


class Branch:
    """One layer's inputs, for sequences of the given lengths."""

    def __init__(self, heads: int, lengths: tuple[int, ...], dtype: torch.dtype = torch.bfloat16):
        total = sum(lengths)
        pages = [-(-length // PAGE) for length in lengths]

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE).to(dtype)

        self.lengths, self.heads = lengths, heads
        self.q = random(total, heads, NOPE + ROPE)
        self.latent, self.k_rope = random(total, RANK + ROPE).split((RANK, ROPE), -1)
        self.weight = random(heads * (NOPE + V_DIM), RANK) * RANK**-0.5
        self.norm = torch.ones(RANK, device=DEVICE, dtype=dtype)
        angles = torch.outer(torch.arange(max(lengths)), 1e4 ** -torch.linspace(0, 1, ROPE // 2))
        self.cos, self.sin = angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)
        self.pool = torch.zeros(sum(pages), PAGE, RANK + ROPE, device=DEVICE, dtype=dtype)
        order = torch.randperm(sum(pages)).split(pages)
        table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        for row, own in zip(table, order, strict=True):
            row[: len(own)] = own
        self.table = table.to(DEVICE)
        places = [torch.arange(length) for length in lengths]
        slots = [o[p // PAGE] * PAGE + p % PAGE for o, p in zip(order, places, strict=True)]
        self.slots = torch.cat(slots).to(DEVICE)
        self.positions = torch.cat(places).to(DEVICE)
        ends = torch.tensor((0, *lengths)).cumsum(0)
        self.offsets = ends.to(DEVICE, torch.int32)
        self.cached = torch.zeros(len(lengths), dtype=torch.int32, device=DEVICE)

    def ours(self, narrow: bool = False) -> Callable[[], torch.Tensor]:
        entries = self.pool.unsqueeze(2)
        given: dict[str, Any] = {"kv_b_weight": self.weight}
        if narrow:
            codes, scale = fp8_block.quantize_blocks(self.weight.float())
            given = {"kv_b_weight": codes, "kv_b_scale": scale, "scale_block": (128, 128)}
            given |= {"quantize_latent": True, "attention_dtype": FP8}
        a = OP.arguments(
            q=self.q, latent=self.latent, k_rope=self.k_rope, latent_cache=self.pool,
            latent_window=CacheWindow.of(entries[..., :RANK], self.pool).to_ints(),
            rope_window=CacheWindow.of(entries[..., RANK:], self.pool).to_ints(),
            v_dim=V_DIM, scale=SCALE, row_offsets=self.offsets, keys="table",
            key_offsets=self.offsets, num_keys=sum(self.lengths), slots="ragged",
            lookup_table=self.table, cache_lengths=self.cached, norm_weight=self.norm,
            cos=self.cos, sin=self.sin, rope_style="interleaved", rope_by_position=True, **given,
        )  # fmt: skip
        positional, named = OP.split(a)
        return lambda: OP.torch_op(*positional, **named)

    def stock_arguments(self) -> tuple[Any, ...]:
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        given = (self.q, self.latent, self.k_rope, self.weight, self.norm, cos, sin)
        return (*given, self.pool, self.slots, self.lengths)

    def exact(self) -> torch.Tensor:
        wide = [t.double() if torch.is_tensor(t) and t.is_floating_point() else t
                for t in self.stock_arguments()]  # fmt: skip
        return stock_branch(*wide)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


ONCE = False


def timed(calls: Calls, size: float) -> dict[str, float]:
    """Microseconds of each call; `size`: TFLOP of one, to choose how many to capture."""
    if ONCE:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
        return dict.fromkeys(calls, float("inf"))
    count = max(1, min(8, int(0.2 / max(size, 1e-3))))
    graphs = {name: capture([call] * count, warmup=1) for name, call in calls.items()}
    return interleaved_us(graphs, count, rounds=3, replays=2)


def causal_tflop(heads: int, lengths: tuple[int, ...]) -> float:
    return sum(n * n for n in lengths) * heads * (NOPE + ROPE + V_DIM) * 1e-12


def branch_row(heads: int, lengths: tuple[int, ...], compiled: Any) -> dict[str, Any]:
    layer = Branch(heads, lengths)
    ours, narrow, arguments = layer.ours(), layer.ours(narrow=True), layer.stock_arguments()
    calls: Calls = {"ours": ours, "ours_fp8": narrow, "stock": lambda: compiled(*arguments)}
    row: dict[str, Any] = {}
    if sum(lengths) <= CHECKED_TOKENS and not ONCE:
        want = layer.exact()
        row = {f"{name}_error": error(call(), want) for name, call in calls.items()}
        row["eager_error"] = error(stock_branch(*arguments), want)
        if not row["ours_error"] <= row["eager_error"]:
            row["less_accurate"] = True
    times = timed(calls, causal_tflop(heads, lengths))
    return {**times, "speedup": times["stock"] / times["ours"], **row}


def core_row(heads: int, length: int, flex: Any) -> dict[str, Any]:
    q = torch.randn(1, length, heads, NOPE + ROPE, device=DEVICE).bfloat16()
    kv = torch.randn(1, length, heads, NOPE + V_DIM, device=DEVICE).bfloat16()
    shared = torch.randn(1, length, ROPE, device=DEVICE).bfloat16()
    k, v = kv[..., :NOPE], kv[..., NOPE:]
    joined = torch.cat((k, shared.unsqueeze(2).expand(-1, -1, heads, -1)), -1)
    parts = [t.transpose(1, 2) for t in (q, joined, v)]
    q8, k8, shared8 = q.to(FP8), k.to(FP8).contiguous(), shared.to(FP8)
    v8 = v[0].to(FP8).permute(1, 2, 0).contiguous().permute(2, 0, 1)[None]
    offsets = torch.tensor((0, length), dtype=torch.int32, device=DEVICE)
    ragged = {"query_offsets": offsets, "key_offsets": offsets}
    narrow = (q8[0], k8[0], v8[0], shared8[0])

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*parts, is_causal=True, scale=SCALE)

    calls: Calls = {
        "ours": lambda: attend(q, k, v, shared, scale=SCALE),
        "ours_ragged": lambda: attend(q[0], k[0], v[0], shared[0], scale=SCALE, **ragged),
        "ours_fp8": lambda: attend(*narrow, scale=SCALE, out_dtype=torch.bfloat16, **ragged),
        "cudnn": cudnn,
    }
    if flex is not None:
        mask = create_block_mask(causal, None, None, length, length, device="cuda")
        calls["flex"] = lambda: flex(*parts, block_mask=mask, scale=SCALE)
    size = causal_tflop(heads, (length,))
    times = timed(calls, size)
    rates = {f"{name}_tflops": 1e6 * size / us for name, us in times.items()}
    return {**times, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--mixes", nargs="*", default=list(MIXES))
    parser.add_argument("--parts", nargs="+", default=["branch", "core"])
    parser.add_argument("--flex", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--once", action="store_true", help="only compile what is to be timed")
    options = parser.parse_args()
    global ONCE
    ONCE = options.once
    torch.manual_seed(0)
    compiled = torch.compile(stock_branch, dynamic=True)
    flex = torch.compile(flex_attention, dynamic=False)
    batches = [(f"{n}", (n,)) for n in options.lengths]
    batches += [(name, MIXES[name]) for name in options.mixes]
    rows: list[dict[str, Any]] = []

    def add(part: str, heads: int, name: str, make: Callable[[], dict[str, Any]]) -> None:
        try:
            row = make()
        except Exception as problem:  # one that fails must not lose the others
            print(f"{part} H={heads} {name}: {problem!r}"[:600], flush=True)
            return
        rows.append({"part": part, "heads": heads, "batch": name, **row})
        if not ONCE:
            keep("mla", rows, options.out)
        shown = " ".join(f"{k} {v:.4g}" for k, v in row.items())
        print(f"{part:6} H={heads:3} {name:10} {shown}", flush=True)

    for name, lengths in batches:
        for heads in options.heads:
            if "core" in options.parts and len(lengths) == 1:
                peer = flex if lengths[0] in options.flex else None
                add("core", heads, name, lambda n=lengths[0], h=heads, p=peer: core_row(h, n, p))
            if "branch" in options.parts:
                add("branch", heads, name, lambda n=lengths, h=heads: branch_row(h, n, compiled))


if __name__ == "__main__":
    main()
