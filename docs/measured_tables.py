"""Writes the measured tables of README.md from benchmarks/results/*.json.

    python docs/measured_tables.py

Every number between the two marks comes from those files; a test says when they have changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: What the README shows of the largest table.
SHOWN_MODELS, SHOWN_TOKENS = ("llama3-8b", "llama3-70b"), (1, 64, 1024, 8192)
START, END = "<!-- measured -->", "<!-- /measured -->"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table, numbers to the right."""
    rule = ("---", *("---:",) * (len(header) - 1))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def end_to_end(data: dict[str, Any]) -> str:
    rows = []
    for row in data["rows"]:
        times = [row[name] for name in ("eager", "stock", "tilewright")]
        speed = f"{min(row['eager'], row['stock']) / row['tilewright']:.2f}"
        case = f"{row['batch']} x {row['tokens']}"
        case += ", no cache" if row.get("cache") == "nocache" else ""
        rows.append((case, *map(microseconds, times), speed))
    first = data["rows"][0]
    layers = first.get("layers") or first["layers_fused"]
    head = f"**{first.get('model', 'Llama-3-8B')}, {layers} layers of true dims**, "
    head += "random weights, static cache, bfloat16, µs per forward pass:"
    header = ("batch x tokens", "eager", "torch.compile", "tilewright", "best / tilewright")
    return f"{head}\n\n{table(header, rows)}"


def cache_size(data: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['cache_mib']} MiB",
            *(microseconds(row[n]) for n in ("eager", "stock", "tilewright")),
        )
        for row in data["rows"]
    ]
    head = "**One attention layer's projections, rotation and cache write**, 64 tokens, "
    head += "`cache.view(-1, H, D)[slots] = k`, µs by the size of each cache:"
    return (
        f"{head}\n\n{table(('K and V cache, each', 'eager', 'torch.compile', 'tilewright'), rows)}"
    )


def attention_layer(data: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['model']}, {row['layout']}, {row['tokens']}",
            *(microseconds(row[n]) for n in ("read", "gemm", "eager", "stock")),
            microseconds(row["autotuned"]) if "autotuned" in row else "",
            microseconds(row["tilewright"]),
            f"{row['speedup_over_best']:.2f}",
            f"{row['of_gemm']:.2f}",
            f"{100 * row['of_copy']:.0f} %",
        )
        for row in data["rows"]
        if row["model"] in SHOWN_MODELS and row["tokens"] in SHOWN_TOKENS
    ]
    head = "**The same by model, cache and number of tokens**, µs (a part: "
    head += f"all {len(data['rows'])} rows are in `benchmarks/results/qkv_cache.json`). "
    head += "Bounds: `read` reads all three "
    head += "weights and does nothing else, `GEMM` is a single library GEMM of all three, without "
    head += "rotation or cache write. Best is the best of eager and both kinds of torch.compile; "
    head += "`of copy` is the weights' bytes over our time, as a share of the "
    head += f"{data['rows'][0]['copy_tb_per_s']:.2f} TB/s that copying 2 GiB reached:"
    header = (
        "dims, cache, tokens",
        "read",
        "GEMM",
        "eager",
        "torch.compile",
        "max-autotune",
        "tilewright",
        "best / tilewright",
        "tilewright / GEMM",
        "of copy",
    )
    return f"{head}\n\n{table(header, rows)}"


def experts(data: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['model']}, {row['tokens']}",
            *(microseconds(row[n]) for n in ("eager", "stock", "tilewright")),
            f"{min(row['eager'], row['stock']) / row['tilewright']:.2f}",
            f"{row['up_speedup']:.2f}, {row['down_speedup']:.2f}",
        )
        for row in data["rows"]
        if row["routing"] == "random"
    ]
    head = "**The routed experts of one layer**, bfloat16, random routing, µs. Last: our gate/up "
    head += "and down GEMM alone against `torch._grouped_mm` alone. Skewed routing and quantised "
    head += "experts: [docs/moe-performance.md](docs/moe-performance.md):"
    header = ("dims, tokens", "eager", "torch.compile", "tilewright", "best / tilewright", "GEMMs")
    return f"{head}\n\n{table(header, rows)}"


def _is_usual(row: dict[str, Any]) -> bool:
    """Of all that is measured of adapters, what the README has room for."""
    usual = {"hidden": 4096, "adapters": 8, "routing": "uniform"}
    return row.get("rank") in (16, 64) and all(row[name] == usual[name] for name in usual)


def latent_attention(data: dict[str, Any]) -> str:
    def rate(row: dict[str, Any], name: str) -> str:
        return f"{row[name]:.0f}" if name in row else ""

    cores = ("core_cudnn_tflops", "core_dense_tflops", "core_ragged_tflops", "core_fp8_tflops")
    rows = [
        (
            f"{row['heads']}, {row['batch']}",
            *(microseconds(row[n]) for n in ("stock", "bf16", "fp8", "fp8_core")),
            f"{row['stock'] / row['bf16']:.2f}",
            *(rate(row, name) for name in cores),
        )
        for row in data["rows"]
        if "stock" in row
    ]
    head = (
        "**MLA prefill of one layer**, DeepSeek-V3's widths: norm, rotation, cache write, gather, "
    )
    head += "up-projection, attention, in µs; then the attention core alone, TFLOP/s of the causal "
    head += "half, ours for one dense sequence, ragged, and in 8 bits "
    head += "([docs/mla-performance.md](docs/mla-performance.md)):"
    header = (
        "heads, tokens", "torch.compile", "bf16", "fp8", "fp8 and core", "torch.compile / bf16",
        "cuDNN", "dense", "ragged", "8 bits",
    )  # fmt: skip
    return f"{head}\n\n{table(header, rows)}"


def adapters(data: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['op']}, rank {row['rank']}, {row['tokens']}",
            *(microseconds(row[n]) if row.get(n) else "" for n in ("gather", "grouped_mm")),
            microseconds(row["tilewright"]),
            f"{row['speedup_over_best']:.2f}",
        )
        for row in data["rows"]
        if _is_usual(row)
    ]
    head = "**Adapters of q, k and v**, hidden 4096, 8 adapters, µs; the shrink makes all three "
    head += "planes, `gather` is `A[ids]` and bmm, `grouped_mm` is `torch._grouped_mm` and a "
    head += "permute. K 8192, where 32 adapters of rank 128 are slower than that at 2048 tokens, "
    head += "other ranks, and 1 to 64 adapters: "
    head += "[docs/lora-performance.md](docs/lora-performance.md)."
    header = ("op, rank, tokens", "gather", "grouped_mm", "tilewright", "best / tilewright")
    return f"{head}\n\n{table(header, rows)}"


def compile_time(data: dict[str, Any]) -> str:
    rows = [
        (
            str(row["layers"]),
            str(row["nodes"]),
            f"{row['dynamo_s']:.2f}",
            f"{row['ours_s']:.2f}",
            f"{100 * row['ours_of_dynamo']:.1f} %",
        )
        for row in data["rows"]
    ]
    header = ("layers", "nodes", "Dynamo, s", "view + match + rewrite, s", "of Dynamo's")
    head = "**What tilewright adds to compile time**, Llama-3-70B on the meta device:"
    return f"{head}\n\n{table(header, rows)}"


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "llama3_8b_end_to_end.json": end_to_end,
    "qwen3_30b_a3b_end_to_end.json": end_to_end,
    "deepseek_v2_lite_end_to_end.json": end_to_end,
    "cache_size.json": cache_size,
    "qkv_cache.json": attention_layer,
    "moe.json": experts,
    "mla.json": latent_attention,
    "lora.json": adapters,
    "compile_time.json": compile_time,
}


def source(name: str, data: dict[str, Any]) -> str:
    where = data.get("gpu", "CPU")
    versions = f"torch {data['torch']}, triton {data['triton']}"
    return f"{where}, {versions}, {data['date']}: `{data['command'].partition(' --out')[0]}`"


def measured() -> str:
    """The tables of all results that are there, each with where it was measured."""
    parts = []
    for name, render in SECTIONS.items():
        if (RESULTS / name).exists():
            data = json.loads((RESULTS / name).read_text("utf-8"))
            parts.append(f"{render(data)}\n\n{source(name, data)}")
    return "\n\n".join(parts)


def with_tables(readme: str) -> str:
    """The README's text with the tables between the marks."""
    before, rest = readme.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{measured()}\n{END}{after}"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
