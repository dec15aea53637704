"""Benchmark of MLA prefill of one layer: the whole branch and the attention core, compared with
PyTorch, cuDNN and flex_attention.

    python benchmarks/mla.py [--out DIR] [--heads 16 128] [--batches 512 "one long" ...]

Times are microseconds per call; the variants are captured as CUDA graphs and timed in turn. The
widths are DeepSeek-V3's (rank 512, 128 + 64 columns of q and k, 128 of v), attention is causal, and
no prefix is cached. The branch is everything between the two projections: norm and rotation of the
latents, their write to a paged cache, the gather of the keys from it, the up-projection and
attention. Variants:

    bf16        `mla_prefill`
    fp8         `mla_prefill_branch_fp8`
    fp8_core    `mla_prefill_branch_fp8` with queries, keys and values of 8 bits
    stock       torch.compile of the branch in PyTorch, in bf16, with the default SDPA of each
                sequence; it knows the lengths on the host, the other variants only on the device

Errors are differences from the branch in float64, unquantised, over 256 tokens.

The core is measured for one sequence, with keys and values as inputs. tilewright's variants are
`core_ragged` (16 bits, with offsets), `core_dense` (16 bits, without offsets) and `core_fp8` (8
bits). cuDNN and flex_attention get the two parts of the keys joined. TFLOP/s count the causal half.
host: CPU microseconds of a repeated call, without waiting for the GPU.

All of tilewright's kernels compile first; then each case runs in a separate process
(`side_by_side.py`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compiling import failures_of
from mla_layers import NOPE, ROPE, SCALE, V_DIM, Layer, error, stock
from side_by_side import finished_rows, has_turn
from timing import Call, capture, cpu_us, interleaved_us, keep
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tilewright.codegen.targets import SM90
from tilewright.ops.mla.attention.lowering import attention_steps
from tilewright.ops.mla.attention.operands import AttentionCall
from tilewright.ops.mla.prefill.branch import OP as BRANCH
from tilewright.ops.mla.prefill.prefill import OP as PREFILL
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Planner, drive

FP8 = torch.float8_e4m3fn
# The lengths of the sequences of one batch. The last three batches are like those of a server.
BATCHES = {str(n): (n,) for n in (512, 1024, 2048, 4096, 8192, 16384)} | {
    "even": (1024,) * 4,
    "one long": (4096, 512, 256, 128, 64, 64),
    "many short": (200, 120, 333, 64, 512, 90, 256, 128, 400, 77, 300, 150),
}
# CAPTURED_TFLOP is the largest number of TFLOP in one captured graph, and CAPTURED_CALLS the
# largest number of calls.
CAPTURED_TFLOP, CAPTURED_CALLS = 0.2, 8
HOST_CALLS = 20

Calls = dict[str, Callable[[], Any]]


def causal_tflop(heads: int, lengths: tuple[int, ...]) -> float:
    return sum(n * n for n in lengths) * heads * (NOPE + ROPE + V_DIM) * 1e-12


def branch_calls(layer: Layer) -> Calls:
    compiled = torch.compile(stock, dynamic=False, fullgraph=True)
    calls: Calls = {"stock": partial(compiled, *layer.stock())}
    for name, op, a in (
        ("bf16", PREFILL, layer.bf16()),
        ("fp8", BRANCH, layer.fp8()),
        ("fp8_core", BRANCH, layer.fp8(FP8)),
    ):
        positional, named = op.split(a)
        calls[name] = partial(op.torch_op, *positional, **named)
    return calls


def core_operands(heads: int, length: int, device: str) -> dict[str, AttentionCall]:
    """Returns the calls of attention for each variant."""
    q = torch.randn(1, length, heads, NOPE + ROPE, device=device).bfloat16()
    kv = torch.randn(1, length, heads, NOPE + V_DIM, device=device).bfloat16()
    shared = torch.randn(1, length, ROPE, device=device).bfloat16()
    k, v = kv[..., :NOPE], kv[..., NOPE:]
    offsets = torch.tensor((0, length), dtype=torch.int32).to(device)
    ragged = {"query_offsets": offsets, "key_offsets": offsets, "scale": SCALE}
    v8 = v[0].to(FP8).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    narrow = (q[0].to(FP8), None, k[0].to(FP8).contiguous(), v8, shared[0].to(FP8))
    return {
        "core_dense": AttentionCall(q, None, k, v, shared, scale=SCALE),
        "core_ragged": AttentionCall(q[0], None, k[0], v[0], shared[0], **ragged),
        "core_fp8": AttentionCall(*narrow, **ragged),
    }


def attend(call: AttentionCall) -> Any:
    machine = machine_of(call.q.device)
    return drive(attention_steps(call, machine.target), machine).outcome.result


def core_calls(heads: int, length: int) -> Calls:
    given = core_operands(heads, length, "cuda")
    calls: Calls = {name: partial(attend, call) for name, call in given.items()}
    dense = given["core_dense"]
    q, k, v, shared = dense.q, dense.k, dense.v, dense.k_rope
    joined = torch.cat((k, shared.unsqueeze(2).expand(-1, -1, heads, -1)), -1)
    parts = [t.transpose(1, 2) for t in (q, joined, v)]
    flex = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(_causal, None, None, length, length, device="cuda")

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*parts, is_causal=True, scale=SCALE)

    calls["core_cudnn"] = cudnn
    calls["core_flex"] = lambda: flex(*parts, block_mask=mask, scale=SCALE)
    return calls


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def specs_of(heads: int, lengths: tuple[int, ...]) -> dict[Any, None]:
    """Returns the kernels of tilewright's variants, without running anything."""
    layer = Layer(heads, lengths, "meta")
    reports = [PREFILL.plan_for(layer.bf16(), "sm90")]
    reports += [BRANCH.plan_for(layer.fp8(core), "sm90") for core in (None, FP8)]
    specs = {spec: None for report in reports for spec in report.specs}
    if len(lengths) == 1:
        for call in core_operands(heads, lengths[0], "meta").values():
            specs |= dict.fromkeys(drive(attention_steps(call, SM90), Planner(SM90)).specs)
    return specs


def compile_all(cases: list[tuple[int, tuple[int, ...]]]) -> None:
    specs: dict[Any, None] = {}
    for heads, lengths in cases:
        specs |= specs_of(heads, lengths)
    failures_of(specs)


def run_case(heads: int, batch: str) -> None:
    """Measures one case in its own process, and prints its row."""
    torch.manual_seed(0)
    lengths = BATCHES[batch]
    layer = Layer(heads, lengths, "cuda")
    calls = branch_calls(layer)
    rows = layer.checked_rows()
    want = layer.exact(rows)
    row: dict[str, Any] = {"heads": heads, "batch": batch, "tokens": layer.tokens}
    row |= {f"{name}_error": error(call()[rows], want) for name, call in calls.items()}
    if len(lengths) == 1:
        calls |= core_calls(heads, lengths[0])
    size = causal_tflop(heads, lengths)
    count = max(1, min(CAPTURED_CALLS, int(CAPTURED_TFLOP / max(size, 1e-3))))
    graphs: dict[str, Any] = {}
    for name, call in calls.items():
        once: list[Call] = [call] * count
        graphs[name] = capture(once, warmup=1)
    if not has_turn():
        return
    row |= interleaved_us(graphs, count, rounds=7, replays=2)
    for name in ("bf16", "fp8", "fp8_core"):
        row[f"{name}_speedup"] = row["stock"] / row[name]
    for name in calls:
        if name.startswith("core"):
            row[f"{name}_tflops"] = 1e6 * size / row[name]
    row["host"] = {name: cpu_us(calls[name], HOST_CALLS) for name in ("bf16", "fp8", "fp8_core")}
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--batches", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--case", nargs=2, help="heads and batch; set by the parent process")
    parser.add_argument("--hold", type=Path, help="start timing once this file exists")
    options = parser.parse_args()
    if options.case:
        run_case(int(options.case[0]), options.case[1])
        return
    cases = [(heads, batch) for batch in options.batches for heads in options.heads]
    compile_all([(heads, BATCHES[batch]) for heads, batch in cases])
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # many cases compile at once
    commands = {
        f"H={heads} {batch}": [__file__, "--case", str(heads), batch] for heads, batch in cases
    }
    rows: list[dict[str, Any]] = []
    for name, row in finished_rows(commands, options.hold):
        rows.append(row)
        keep("mla", rows, options.out)
        shown = " ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
        hosts = {name: round(us) for name, us in row["host"].items()}
        print(f"{name:16} {shown} host {hosts}", flush=True)


if __name__ == "__main__":
    main()
