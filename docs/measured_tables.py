"""Writes docs/measured.md from benchmarks/results/*.json.

python docs/measured_tables.py

The page has only the contents of these files. A test fails if the page differs from what this
script makes of the files.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: The rows of the largest table that the page shows.
SHOWN_MODELS, SHOWN_TOKENS = ("llama3-8b", "llama3-70b"), (1, 64, 1024, 8192)
#: A plan counts as near the best if the ratio of its time to the best time is at most this number.
NEAR_BEST = 1.05
PAGE = ROOT / "docs" / "measured.md"
HEAD = """# Measured

`python docs/measured_tables.py` makes all tables of this page from the files in
`benchmarks/results/`. Below each table stand the GPU, the versions, the date and the command.
`torch.compile` is stock Inductor. For GPU times, each variant (a column such as `eager`) is
captured in a CUDA graph. The graphs are replayed in turn, and the times are medians.
`best / tilewright` is the time of the fastest other variant divided by tilewright's: above 1,
tilewright is faster. These pages say what limits the kernels, what was tried, and which cases are
slower: [qkv-performance.md](qkv-performance.md),
[attention-performance.md](attention-performance.md), [moe-performance.md](moe-performance.md),
[mla-performance.md](mla-performance.md), [lora-performance.md](lora-performance.md),
[quantised-performance.md](quantised-performance.md).
"""


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns a Markdown table. All columns except the first are aligned to the right."""
    rule = ("---", *("---:",) * (len(header) - 1))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def end_to_end(data: dict[str, Any]) -> str:
    """Returns the table of whole forward passes of one model."""
    name, layers, rows = passes(data)
    head = f"## {name}, end to end\n\nThe table has the time in µs of a forward pass of {layers} "
    head += "layers at the model's true widths, with random weights and a static cache, in "
    head += "bfloat16:"
    return f"{head}\n\n{table(PASSES, rows)}"


def end_to_end_h100(data: dict[str, Any]) -> str:
    """Returns the table of whole forward passes of one model on an H100."""
    name, layers, rows = passes(data)
    head = f"## {name}, end to end on an H100\n\nThe table has the time in µs of a forward pass of "
    head += f"{layers} layers as above, but on another GPU and with later kernels. The predictions "
    head += f"of step times do not use these rows.{explained(data)}"
    return f"{head}\n\n{table(PASSES, rows)}"


PASSES = ("batch x tokens", "eager", "torch.compile", "tilewright", "best / tilewright")


# Words after the size of a case, for passes other than those that `generate()` makes with prompts
# of one length.
KINDS = {
    "padded": ", left padding",
    "nomask": ", no mask",
    "nocache": ", no cache",
}


def passes(data: dict[str, Any]) -> tuple[str, int, list[tuple[str, ...]]]:
    """Returns a model's name, the number of its layers, and a row under PASSES for each case."""
    rows = []
    for row in data["rows"]:
        times = [row[name] for name in ("eager", "stock", "tilewright")]
        speed = f"{min(row['eager'], row['stock']) / row['tilewright']:.2f}"
        case = f"{row['batch']} x {row['tokens']}"
        case += f" after {row['present']} cached" if "present" in row else ""
        case += KINDS.get(row["kind"], "")
        rows.append((case, *map(microseconds, times), speed))
    first = data["rows"][0]
    return first["model"], first["layers"], rows


def explained(data: dict[str, Any]) -> str:
    """Returns a sentence on the names of cases with cached tokens; "" without such cases."""
    cached = {row["present"] for row in data["rows"] if "present" in row}
    text = ' "After {0} cached" means that the cache holds {0} tokens before the pass.'
    return "".join(map(text.format, sorted(cached)))


def overview() -> str:
    """Returns the first table, which has the times of `generate()` for every model."""
    found = [json.loads((RESULTS / name).read_text("utf-8")) for name in GENERATE]
    first = [data["rows"][0] for data in found]
    *others, last = (f"{row['model']} ({row['layers']} layers)" for row in first)
    names = f"{', '.join(others)} and {last}"
    head = "The table has the tokens per second of `generate()` by the wall clock, for "
    head += f"{names}. Prompts have {first[0]['prompt']} tokens, and {first[0]['new']} new ones "
    head += "are generated:"
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
    """Returns a row under GENERATED for each batch size, in tokens per second."""
    rows = []
    for row in data["rows"]:
        own = [row[f"{name}_tokens"] for name in ("tilewright", "tilewright-paged")]
        others = [row[f"{name}_tokens"] for name in ("eager", "stock")]
        speed = f"{own[0] / max(others):.2f}"
        rows.append((str(row["batch"]), *(f"{rate:.0f}" for rate in (*others, *own)), speed))
    return rows


def generated(data: dict[str, Any]) -> str:
    """Returns the tables of `generate()` by the wall clock: whole calls, and only the steps."""
    first = data["rows"][0]
    head = (
        f"## generate(), {first['model']}\n\nThe model has {first['layers']} layers and random "
        f"weights, in bfloat16. Prompts have up to {first['prompt']} tokens, padded on the left, "
        f"and {first['new']} new tokens are chosen greedily. Eager has a dynamic cache and "
        "torch.compile a static one, both made by transformers. The first table has tokens per "
        "second of whole calls, summed over the batch; the prompt runs uncompiled:\n\n"
        f"{table(GENERATED, generated_rows(data))}\n\n"
        "The second table has tokens per second of only the steps after the prompt. Its last two "
        "columns have the peak memory of a call in MiB, without the model and the cache: `stock "
        "peak` is that of torch.compile, and `own peak` that of tilewright:"
    )
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
    head += "The table has the time in µs of the projections, rotation and cache write of one "
    head += "attention layer for 64 tokens. The layer writes by "
    head += "`cache.view(-1, H, D)[slots] = k`:"
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
    head += "The table has the time in µs by model, kind of cache and number of tokens. It shows "
    head += f"a part of the {len(data['rows'])} rows in `benchmarks/results/qkv_cache.json`. "
    head += (
        "Two columns are lower bounds: `read` is a kernel that reads the three weights and does "
    )
    head += (
        "nothing else, and `GEMM` is one library GEMM of all three weights, without rotation or "
    )
    head += "cache write. `best` is the fastest of eager and both kinds of torch.compile. "
    head += "`of copy` is the rate at which tilewright reads the weights, as a share of the "
    head += f"{data['rows'][0]['copy_tb_per_s']:.2f} TB/s at which 2 GiB are copied:"
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
    head = "## The routed experts of one layer\n\nThe table has times in µs, in bfloat16 with "
    head += "random routing. The last "
    head += (
        "column is about single kernels: the time of `torch._grouped_mm` divided by that of our "
    )
    head += (
        "kernel, for the gate and up projection and for the down projection. Skewed routing and "
    )
    head += "quantised experts are in [moe-performance.md](moe-performance.md):"
    header = ("dims, tokens", "eager", "torch.compile", "tilewright", "best / tilewright", "GEMMs")
    return f"{head}\n\n{table(header, rows)}"


def _is_usual(row: dict[str, Any]) -> bool:
    """Whether a row of adapters is one of the few that the page shows."""
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
    head += (
        "The table is for DeepSeek-V3's widths. The first columns have the time in µs of the whole "
    )
    head += "branch (norm, rotation, cache write, gather, up-projection and attention) in "
    head += "bfloat16, with fp8 latents, and with an 8-bit attention core too. "
    head += (
        "The last four have TFLOP/s of the attention core alone, counting the causal half: "
        "cuDNN's, and ours for one dense sequence, for a ragged "
    )
    head += "batch, and in 8 bits. [mla-performance.md](mla-performance.md) says more.\n\n"
    header = (
        "heads, tokens", "torch.compile", "bf16", "fp8", "fp8 and core", "torch.compile / bf16",
        "cuDNN", "dense", "ragged", "8 bits",
    )  # fmt: skip
    return f"{head.rstrip()}\n\n{table(header, rows)}"


def cache_attention(data: dict[str, Any]) -> str:
    """Returns a table of decode and prefill. A cell has a time, and the rate that follows from this
    time."""
    head = "## Attention over a cache\n\n"
    head += (
        "The table is for Llama-3-8B's widths. A cell has the time in µs, and in brackets a rate. "
    )
    head += "For decode, it is the rate at which a kernel would read the keys and values of the "
    head += "present tokens once in this time, as a share of the rate of a copy in the same run. "
    head += "For prefill, it is TFLOP/s, counting only visible keys. "
    head += "A case is named by sequences x present tokens, then the capacity of the cache if it "
    head += "is larger. The first four columns are tilewright's op, which knows the mask by "
    head += "positions, as a tensor, as a tensor with padding, or by positions in a paged cache "
    head += (
        "(`benchmarks/cache_attention.py`). `sdpa` is PyTorch's attention over only the present "
    )
    head += "tokens, `flex` is compiled flex_attention, and `torch.compile` is PyTorch's attention "
    head += "over the whole cache with repeated heads and the mask. The last rows are `mla_decode` "
    head += "with 16 or 128 heads:"
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
    head = "## LoRA adapters of q, k and v\n\nThe table has times in µs for a hidden size of 4096 "
    head += "and 8 adapters. The shrink computes q, k and v at once. `gather` is `A[ids]` and bmm, "
    head += "and `grouped_mm` is "
    head += (
        "`torch._grouped_mm` and a permute. [lora-performance.md](lora-performance.md) has other "
    )
    head += "hidden sizes, other ranks and 1 to 64 adapters. It also has the one case that is "
    head += "slower: hidden size 8192, 2048 tokens, 32 adapters of rank 128."
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
    head = "## What tilewright adds to compile time\n\nThe table has the seconds that Dynamo and "
    head += "tilewright need for Llama-3-70B on the meta device, and tilewright's time as a share "
    head += "of Dynamo's:"
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
    head = "## Time of a node in large graphs\n\nThe table has the CPU time in µs that tilewright "
    head += "needs for each node of a graph. The headers of the last columns say how many nodes a "
    head += "graph has:"
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
    header = ("batch x tokens", *data["rows"][0]["ms"], "same program")
    head = """## On a CPU

Ops have no kernels on a CPU, so tilewright leaves a graph unchanged. The table has ms by the wall
clock per forward pass of four layers of a Llama with 1024 columns, with a static cache, in
bfloat16. Stock `torch.compile` is compiled and timed twice, to show how much times vary. The last
column says whether Inductor made the same program for both:"""
    return f"{head}\n\n{table(header, rows)}"


def layer_norms(data: dict[str, Any]) -> str:
    rows = [
        (
            row["model"],
            row["part"],
            str(row["tokens"]),
            *(microseconds(row[name]) for name in ("eager", "stock", "tilewright")),
            microseconds(row["rms"]) if "rms" in row else "",
            microseconds(row["floor"]),
            f"{row['speedup_over_best']:.2f}",
        )
        for row in data["rows"]
    ]
    header = ("model", "part", "tokens", "eager", "torch.compile", "tilewright")
    header += ("with an RMSNorm", "floor", "best / tilewright")
    head = """## Linears behind a LayerNorm

The table has the time in µs of one part of a layer in bfloat16, with a cold L2 cache. *up* is a
LayerNorm, the first linear of the MLP and its activation; *qkv* is a LayerNorm, the projections of
Q, K and V, and the write of K and V into a static cache. "With an RMSNorm" is tilewright's time for
the same part with an RMSNorm instead, which was not compared with other variants. The floor is the
time of copying as many bytes as the weights have. In empty cells, and in the
rows of *qkv* with 64 tokens, which are left out, Dynamo ran the part uncompiled. The benchmark has
been fixed since then, but was not run again:"""
    return f"{head}\n\n{table(header, rows)}"


def plans(data: dict[str, Any]) -> str:
    """Returns the tables that compare the planner's tiles with the best tiles of a sweep."""
    most = max(row["tried"] for row in data["rows"]) - 1
    head = f"""## Plans compared with the best tiles of a sweep

Each row of `plans.json` is one call of an op at the sizes of a published model. The call is timed
with the tiles that the planner chooses and with up to {most} others: for `qkv` the candidates of
`tune`, for the other ops the same tiles with one or two numbers changed. The ratio is the plan's
time divided by the time of the fastest tiles. The rules of the planner were fitted to earlier
sweeps of most of these calls, on an H100 and an H200. The last column counts the other calls, to
which no rule was fitted:"""
    return "\n\n".join((head, *_plan_tables(data["rows"])))


def plans_h200(data: dict[str, Any]) -> str:
    """Returns the tables that `plans` returns, for a chip with faster memory."""
    head = """## Plans on an H200

This is the same comparison on an H200. An H200 reads memory 1.4 times as fast as an H100, and the
planner splits keys into more parts on an H200:"""
    return "\n\n".join((head, *_plan_tables(data["rows"])))


def _plan_tables(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Returns the summary by op, and the table of the plans that are slower than the best."""
    by_op: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_op.setdefault(row["op"], []).append(row)
    summed = [(f"`{op}`", *_plan_cells(of_op)) for op, of_op in by_op.items()]
    summed.append(("all", *_plan_cells(rows)))
    slower = [
        (
            f"`{row['op']}`: {row['case']}",
            f"{row['plan']:.1f}",
            f"{row['best']:.1f}",
            f"{row['ratio']:.3f}",
            row["plan_tiles"].partition(": ")[0],
            row["best_tiles"],
        )
        for row in sorted(rows, key=lambda row: -row["ratio"])
        if row["ratio"] > NEAR_BEST
    ]
    header = ("op", "calls", "median ratio", "worst ratio", "within 5 %", "of calls not fitted")
    tiles = ("op and call", "plan µs", "best µs", "ratio", "plan's tiles", "best tiles")
    between = "These plans are more than 5 % slower than the best:"
    return table(header, summed), between, table(tiles, slower)


def _plan_cells(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Returns the cells that sum up the calls of an op."""
    ratios = [row["ratio"] for row in rows]
    others = [row["ratio"] for row in rows if not row["fitted"]]
    near, others_near = (sum(one <= NEAR_BEST for one in found) for found in (ratios, others))
    median, worst = statistics.median(ratios), max(ratios)
    apart = f"{others_near} of {len(others)}" if others else ""
    return str(len(rows)), f"{median:.3f}", f"{worst:.3f}", str(near), apart


END_TO_END = (
    "llama3_8b_end_to_end.json",
    "qwen3_30b_a3b_end_to_end.json",
    "deepseek_v2_lite_end_to_end.json",
    "youtu_end_to_end.json",
    "glm_4_7_flash_end_to_end.json",
    "minicpm3_end_to_end.json",
)
END_TO_END_H100 = (
    "llama3_8b_end_to_end_h100.json",
    "youtu_end_to_end_h100.json",
    "minicpm3_end_to_end_h100.json",
)
GENERATE = (
    "llama3_8b_generate.json",
    "qwen3_30b_a3b_generate.json",
    "deepseek_v2_lite_generate.json",
)
SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(GENERATE, generated),
    **dict.fromkeys(END_TO_END, end_to_end),
    **dict.fromkeys(END_TO_END_H100, end_to_end_h100),
    "cache_size.json": cache_size,
    "qkv_cache.json": attention_layer,
    "cache_attention.json": cache_attention,
    "moe.json": experts,
    "mla.json": latent_attention,
    "lora.json": adapters,
    "layer_norm.json": layer_norms,
    "plans.json": plans,
    "plans_h200.json": plans_h200,
    "compile_time.json": compile_time,
    "large_graphs.json": large_graphs,
    "cpu_step.json": cpu_step,
}


def place(data: dict[str, Any]) -> str:
    """Returns the GPU, the versions and the date of a measurement."""
    where = data.get("gpu", "CPU")
    return f"{where}, torch {data['torch']}, triton {data['triton']}, {data['date']}"


def _again(data: dict[str, Any]) -> str:
    """Returns a sentence about rows that a later run replaced, or "" if there are none."""
    again = data.get("again")
    if again is None:
        return ""
    rows = ", ".join(row.replace("x", " x ") for row in again["rows"])
    return (
        f". On {again['date']}, after {again['after']}, these rows were measured again by "
        f"`{again['command']}`: {rows}"
    )


def _more(data: dict[str, Any]) -> str:
    """Returns a sentence about rows of a second run, or "" if there are none."""
    more = data.get("more")
    if more is None:
        return ""
    rows = ", ".join(f"`{row}`" for row in more["rows"])
    return (
        f". A second run on {more['date']} measured {rows}, because {more['because']}: "
        f"`{more['command']}`"
    )


def measured() -> str:
    """Returns docs/measured.md: a table for each file of results, with its GPU and command."""
    parts = [HEAD.rstrip(), f"## generate()\n\n{overview()}"]
    for name, render in SECTIONS.items():
        data = json.loads((RESULTS / name).read_text("utf-8"))
        command = data["command"].partition(" --out")[0]
        parts.append(f"{render(data)}\n\n{place(data)}: `{command}`{_again(data)}{_more(data)}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    PAGE.write_text(measured(), "utf-8")


if __name__ == "__main__":
    main()
