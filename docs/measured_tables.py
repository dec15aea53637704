"""Writes docs/measured.md from benchmarks/results/*.json.

    python docs/measured_tables.py

The page is made of those files alone. A test fails where it is not what they say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: What is shown of the largest table.
SHOWN_MODELS, SHOWN_TOKENS = ("llama3-8b", "llama3-70b"), (1, 64, 1024, 8192)
PAGE = ROOT / "docs" / "measured.md"
HEAD = """# Measured

All tables are made by `python docs/measured_tables.py` from the files in `benchmarks/results/`.
Under each stand GPU, versions, date and command. GPU times are medians of CUDA graphs, the variants
run in turn. `best / tilewright` is the time of the fastest of the others divided by ours: above 1,
tilewright is faster. Bounds of the kernels, attempts, and cases that are slower:
[qkv-performance.md](qkv-performance.md), [attention-performance.md](attention-performance.md),
[moe-performance.md](moe-performance.md), [mla-performance.md](mla-performance.md),
[lora-performance.md](lora-performance.md), [quantised-performance.md](quantised-performance.md).
"""


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table, numbers to the right."""
    rule = ("---", *("---:",) * (len(header) - 1))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def end_to_end(data: dict[str, Any]) -> str:
    """The whole passes of one model."""
    name, layers, rows = passes(data)
    head = f"## {name}, end to end\n\n{layers} layers of the model's true widths, random weights, "
    head += "static cache, bfloat16; µs per forward pass:"
    return f"{head}\n\n{table(PASSES, rows)}"


PASSES = ("batch x tokens", "eager", "torch.compile", "tilewright", "best / tilewright")


# How a pass is called, where it is not as `generate()` does with prompts of one length.
KINDS = {
    "padded": ", left padding",
    "nomask": ", no mask",
    "nocache": ", no cache",
}


def passes(data: dict[str, Any]) -> tuple[str, int, list[tuple[str, ...]]]:
    """A model's name, how many layers ran, and a row under PASSES for each setting."""
    rows = []
    for row in data["rows"]:
        times = [row[name] for name in ("eager", "stock", "tilewright")]
        speed = f"{min(row['eager'], row['stock']) / row['tilewright']:.2f}"
        case = f"{row['batch']} x {row['tokens']}"
        case += KINDS.get(row["kind"], "")
        rows.append((case, *map(microseconds, times), speed))
    first = data["rows"][0]
    return first["model"], first["layers"], rows


def overview() -> str:
    """The first table: `generate()` of every model."""
    found = [json.loads((RESULTS / name).read_text("utf-8")) for name in GENERATE]
    first = [data["rows"][0] for data in found]
    names = ", ".join(f"{row['model']} of {row['layers']} layers" for row in first)
    head = f"Tokens per second of `generate()` by the wall clock; {names}; prompts of "
    head += f"{first[0]['prompt']} tokens, {first[0]['new']} new ones:"
    rows = [
        (row["model"], *cells)
        for data, row in zip(found, first, strict=True)
        for cells in generated_rows(data)
    ]
    places = dict.fromkeys(map(place, found))
    return f"{head}\n\n{table(('model', *GENERATED), rows)}\n\n{'; '.join(places)}."


GENERATED = (
    "batch",
    "eager",
    "torch.compile",
    "tilewright",
    "with PagedCache",
    "tilewright / best",
)


def generated_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row under GENERATED for each batch, in tokens per second."""
    rows = []
    for row in data["rows"]:
        own = [row[f"{name}_tokens"] for name in ("tilewright", "tilewright-paged")]
        others = [row[f"{name}_tokens"] for name in ("eager", "stock")]
        speed = f"{own[0] / max(others):.2f}"
        rows.append((str(row["batch"]), *(f"{rate:.0f}" for rate in (*others, *own)), speed))
    return rows


def generated(data: dict[str, Any]) -> str:
    """`generate()` by the wall clock: whole calls, and the steps alone."""
    first = data["rows"][0]
    head = (
        f"## generate(), {first['model']}\n\n{first['layers']} layers, random weights, prompts of "
    )
    head += f"up to {first['prompt']} tokens padded on the left, {first['new']} new ones, greedy, "
    head += "bfloat16. Eager has a dynamic cache, torch.compile a static one, both as transformers "
    head += "calls them. Tokens of the batch per second of whole calls, which run the prompt "
    head += f"uncompiled:\n\n{table(GENERATED, generated_rows(data))}\n\n"
    head += "Tokens of the batch per second of the steps after the prompt; peak memory of a call "
    head += "above model and cache, MiB, of torch.compile and tilewright:"
    names = ("eager", "stock", "tilewright", "tilewright-paged")
    rows = [
        (
            str(row["batch"]),
            *(f"{row[f'{name}_steps']:.0f}" for name in names),
            f"{row['tilewright_steps'] / max(row['eager_steps'], row['stock_steps']):.2f}",
            *(f"{row[f'{name}_peak_mib']:.0f}" for name in names[1:3]),
        )
        for row in data["rows"]
    ]
    return f"{head}\n\n{table((*GENERATED, 'stock peak', 'own peak'), rows)}"


def cache_size(data: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['cache_mib']} MiB",
            *(microseconds(row[n]) for n in ("eager", "stock", "tilewright")),
        )
        for row in data["rows"]
    ]
    head = "## A step's time by the size of the cache\n\n"
    head += "Projections, rotation and cache write of one attention layer, 64 tokens, "
    head += "`cache.view(-1, H, D)[slots] = k`; µs by the size of each cache:"
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
    head = "## Projections, rotation and cache write of one attention layer\n\n"
    head += "µs by model, kind of cache and number of tokens; a part: "
    head += f"all {len(data['rows'])} rows are in `benchmarks/results/qkv_cache.json`. "
    head += "Two bounds: `read` is a kernel that reads the three weights and does nothing else, "
    head += "`GEMM` one library GEMM of all three without rotation or cache write. "
    head += "Best is the fastest of eager and both kinds of torch.compile. "
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
    head = "## The routed experts of one layer\n\nbfloat16, random routing, µs. The last column is "
    head += (
        "the time of `torch._grouped_mm` alone over that of our kernel alone, for the gate and up "
    )
    head += "projection and for the down projection. Skewed routing and quantised experts are in "
    head += "[moe-performance.md](moe-performance.md):"
    header = ("dims, tokens", "eager", "torch.compile", "tilewright", "best / tilewright", "GEMMs")
    return f"{head}\n\n{table(header, rows)}"


def _is_usual(row: dict[str, Any]) -> bool:
    """Whether a row of adapters is among those that the page has room for."""
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
    head = "## Latent attention (MLA) of one layer, prefill\n\n"
    head += "DeepSeek-V3's widths. First µs of the whole: norm, rotation, cache write, gather, "
    head += (
        "up-projection and attention, in bfloat16, with fp8 latents, and with an 8-bit attention "
    )
    head += (
        "core too. Then TFLOP/s of the attention core alone, counting the causal half: cuDNN, and "
    )
    head += "ours for one dense sequence, for a ragged batch, and in 8 bits. More: "
    head += "[mla-performance.md](mla-performance.md).\n\n"
    header = (
        "heads, tokens", "torch.compile", "bf16", "fp8", "fp8 and core", "torch.compile / bf16",
        "cuDNN", "dense", "ragged", "8 bits",
    )  # fmt: skip
    return f"{head.rstrip()}\n\n{table(header, rows)}"


def cache_attention(data: dict[str, Any]) -> str:
    """A table of decode and one of prefill, each cell a time and what it comes to."""
    head = "## Attention over a cache\n\n"
    head += "Llama-3-8B's widths; µs, and the share of the rate of a copy in the same run at which "
    head += "keys and values of the tokens present would be read once; of prefill TFLOP/s of what "
    head += "is seen. Cases: sequences x tokens present, where not all the capacity. "
    head += "`benchmarks/cache_attention.py` describes the variants. `flex` is compiled "
    head += "flex_attention, "
    head += "`sdpa` PyTorch's attention of the tokens present alone, `torch.compile` that of the "
    head += "whole cache with repeated heads and the mask. The last rows are `mla_decode`, "
    head += "16 or 128 heads:"
    rows = [
        (_attention_case(row), *(_attention_cell(row, name) for name in ATTENTION_VARIANTS))
        for row in data["rows"]
    ]
    names = ("torch.compile" if name == "stock" else name for name in ATTENTION_VARIANTS)
    return f"{head}\n\n{table(('case', *names), rows)}"


ATTENTION_VARIANTS = (
    "position", "mask", "padded", "paged", "sdpa", "sdpa_mask", "flex", "stock",
)  # fmt: skip


def _attention_case(row: dict[str, Any]) -> str:
    kind = row["case"].partition("-")[0]
    text = f"{kind}, {row['batch']} x {row['present']}"
    if row["capacity"] != row["present"]:
        text += f" of {row['capacity']}"
    if row["queries"] not in (1, row["present"]):
        text += f", {row['queries']} queries"
    return text + (f", {row['case'].rpartition('-')[2]} heads" if kind == "mla" else "")


def _attention_cell(row: dict[str, Any], name: str) -> str:
    if name not in row["us"]:
        return ""
    rate = f"{row['share'][name]:.2f}" if "share" in row else f"{row['tflops'][name]:.0f}"
    return f"{microseconds(row['us'][name])} ({rate})"


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
    head = "## LoRA adapters of q, k and v\n\nhidden 4096, 8 adapters, µs. The shrink computes "
    head += "q, k and v at once; `gather` is `A[ids]` and bmm, `grouped_mm` is `torch._grouped_mm` "
    head += "and a permute. Other hidden sizes, ranks and 1 to 64 adapters are in "
    head += "[lora-performance.md](lora-performance.md), as is the one case that is slower: "
    head += "hidden 8192, 2048 tokens, 32 adapters of rank 128."
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
    header = ("layers", "nodes", "Dynamo, s", "tilewright, s", "of Dynamo's")
    head = "## What tilewright adds to compile time\n\nLlama-3-70B on the meta device:"
    return f"{head}\n\n{table(header, rows)}"


def large_graphs(data: dict[str, Any]) -> str:
    by_structure: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        by_structure.setdefault(row["structure"], []).append(row)
    rows = [
        (
            name.replace("_", " "),
            f"{several[0]['nodes']} to {several[-1]['nodes']}",
            str(several[-1]["sites"]),
            *(f"{row['us_per_node']:.0f}" for row in several),
        )
        for name, several in by_structure.items()
    ]
    sizes = [f"about {row['size']}" for row in next(iter(by_structure.values()))]
    header = ("structure, repeated", "nodes", "sites of the largest", *sizes)
    head = "## Time of a node in large graphs\n\nCPU us of tilewright for each node of a graph:"
    return f"{head}\n\n{table(header, rows)}"


def cpu_step(data: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['batch']} x {row['tokens']}",
            *(f"{ms:.1f}" for ms in row["ms"].values()),
            "yes" if row["same_program"] else "no",
        )
        for row in data["rows"]
    ]
    header = ("batch x tokens", *data["rows"][0]["ms"], "stock's program is ours")
    head = """## On a CPU

Ops have no kernels there, and a graph is left as it is. Four layers of a Llama of 1024 columns,
static cache, bfloat16; ms of the wall clock per forward pass, stock compiled and timed twice:"""
    return f"{head}\n\n{table(header, rows)}"


END_TO_END = (
    "llama3_8b_end_to_end.json",
    "qwen3_30b_a3b_end_to_end.json",
    "deepseek_v2_lite_end_to_end.json",
    "youtu_end_to_end.json",
    "glm_4_7_flash_end_to_end.json",
    "minicpm3_end_to_end.json",
)
GENERATE = (
    "llama3_8b_generate.json",
    "qwen3_30b_a3b_generate.json",
    "deepseek_v2_lite_generate.json",
)
SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(GENERATE, generated),
    **dict.fromkeys(END_TO_END, end_to_end),
    "cache_size.json": cache_size,
    "qkv_cache.json": attention_layer,
    "cache_attention.json": cache_attention,
    "moe.json": experts,
    "mla.json": latent_attention,
    "lora.json": adapters,
    "compile_time.json": compile_time,
    "large_graphs.json": large_graphs,
    "cpu_step.json": cpu_step,
}


def place(data: dict[str, Any]) -> str:
    """GPU, versions and date of a measurement."""
    where = data.get("gpu", "CPU")
    return f"{where}, torch {data['torch']}, triton {data['triton']}, {data['date']}"


def _again(data: dict[str, Any]) -> str:
    """A sentence about rows that a later run replaced; empty without any."""
    again = data.get("again")
    if again is None:
        return ""
    rows = ", ".join(row.replace("x", " x ") for row in again["rows"])
    return f". {rows} again, {again['date']}, after {again['after']}: `{again['command']}`"


def measured() -> str:
    """docs/measured.md: the tables of all results, each with where it was measured and how."""
    parts = [HEAD.rstrip(), f"## generate()\n\n{overview()}"]
    for name, render in SECTIONS.items():
        data = json.loads((RESULTS / name).read_text("utf-8"))
        command = data["command"].partition(" --out")[0]
        parts.append(f"{render(data)}\n\n{place(data)}: `{command}`{_again(data)}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    PAGE.write_text(measured(), "utf-8")


if __name__ == "__main__":
    main()
