"""Compares the parts of the cost model with measured calls of single ops.

    python benchmarks/predicted_ops.py

The ops are mixtures (moe.json, moe_quantized.json), linears of codes (linears_quantized.json) and
attention over a cache (cache_attention.json). Each is modelled as one part of a step
(`compiler/report/times.py`). A mixture's row says how many experts its tokens reached. Some
constants follow from these files, so the summary checks the formulas; it is not a held-out test.
The program needs no GPU. Results go to benchmarks/results/predicted_ops.json, a row for each file
and format.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_layers import BY_NAME, WEIGHT_BYTES
from published import unit
from timing import keep

from tilewright.codegen.targets import Target, get_target
from tilewright.compiler.report.times import spent_of
from tilewright.compiler.report.traffic import Unit
from tilewright.ops.cache.read import CacheRead

RESULTS = Path(__file__).resolve().parent / "results"
H200 = get_target("sm90")
H100 = replace(H200, hbm_bytes_per_s=3.0e12)
#: For each linear of Llama-3-8B: (rows, columns) of its weight.
LINEARS = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
#: Formats of linears that have another name in the cost model.
NAMES = {"bf16": "", "fp8_block": "fp8", "int4": "int4_k", "gptq": "int4_n", "awq": "int4_n"}
#: The sizes in the benchmark of attention: the number of query heads, the columns of a head, the
#: numbers of a latent, and the rotated columns.
HEADS, WIDTH, LATENT, ROPE = 32, 128, 512, 64


def kept(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["rows"]


def mixtures(name: str) -> Iterator[tuple[str, float, Unit, Target]]:
    """Yields the rows of a file of mixtures. Each row is (format, measured microseconds, part of a
    step, chip)."""
    for row in kept(name):
        shape, tokens, form = BY_NAME[row["model"]], row["tokens"], row["format"]
        coded = "" if form == "dense" else form.removesuffix("fp8") or "fp8"
        # Products with activations in codes have a separate rate.
        rate = "fp8e4nv" if form == "fp8fp8" else "bf16"
        elements = shape.expert_elements
        one = unit(
            "fused",
            family="moe",
            codes=coded if form != "fp8fp8" else "fp8",
            launches=2 if tokens == 1 else 4,
            weights=int(WEIGHT_BYTES[form] * row["experts"] * elements),
            activations=4 * tokens * shape.hidden,
            flops=2 * tokens * shape.num_slots * elements,
            flop_rate=H200.flops_per_s(rate),
        )
        yield form, row["tilewright"], one, H200


def linears() -> Iterator[tuple[str, float, Unit, Target]]:
    """Yields the rows of linears of Llama-3-8B, in the form that `mixtures` has.

    Rows of several tokens and codes are left out, because they are older than the kernels that put
    activations into the order of the codes.
    """
    for row in kept("linears_quantized"):
        older = row["tokens"] > 1 and row["format"] != "bf16"
        if row["model"] != "llama3-8b" or not row.get("us") or older:
            continue
        (rows, columns), tokens = LINEARS[row["op"]], row["tokens"]
        # `prepare` lays codes out along columns, as int4 has them.
        form = "int4" if row["format"].endswith(("_prepared", "_zeros")) else row["format"]
        one = unit(
            "fused",
            codes=NAMES.get(form, form),
            launches=2 if row["op"] == "gate_up" and tokens > 16 else 1,
            weights=row["bytes"],
            activations=2 * tokens * (rows + columns),
            flops=2 * tokens * rows * columns,
            flop_rate=H100.flops_per_s("bf16"),
        )
        yield row["format"], row["us"], one, H100


def attention() -> Iterator[tuple[str, float, Unit, Target]]:
    """Yields the rows of attention with a mask tensor, in the form that `mixtures` has."""
    for row in kept("cache_attention"):
        latent = row["case"].startswith("mla")
        heads = int(row["case"].rpartition("-")[2]) if latent else HEADS
        token = 2 * (LATENT + ROPE) if latent else 2 * 8 * 2 * WIDTH
        pair = 2 * heads * ((2 * LATENT + ROPE) if latent else 2 * WIDTH)
        queries, batch = row["queries"], row["batch"]
        read = CacheRead((), token, batch, row["capacity"], queries=queries, pair_flops=pair)
        out = 2 * 2 * batch * queries * heads * (LATENT if latent else WIDTH)
        few = queries < 64
        one = unit(
            "fused",
            cache_reads=(read,),
            launches=2 if few else 1,
            caches=read.bytes_of(row["present"]),
            activations=out,
            flop_rate=H200.flops_per_s("bf16"),
        )
        yield row["case"].partition("-")[0], row["us"]["mask"], one, H200


def main() -> None:
    rows = []
    presents = {row["us"]["mask"]: row["present"] for row in kept("cache_attention")}
    sources = {
        "moe": mixtures("moe"),
        "moe_quantized": mixtures("moe_quantized"),
        "linears_quantized": linears(),
        "cache_attention": attention(),
    }
    for source, calls in sources.items():
        ratios: dict[str, list[float]] = {}
        for form, us, one, chip in calls:
            spent = spent_of(one, one.caches, presents.get(us), chip)
            ratios.setdefault(form, []).append(spent.us / us)
        for form, found in ratios.items():
            near = sum(abs(ratio - 1) <= 0.15 for ratio in found) / len(found)
            worst = max(found, key=lambda ratio: abs(ratio - 1))
            row = {"source": source, "form": form, "rows": len(found)}
            row |= {"median": round(statistics.median(found), 2), "near": round(near, 2)}
            rows.append(row | {"worst": round(worst, 2)})
            print(rows[-1])
    keep("predicted_ops", rows)


if __name__ == "__main__":
    main()
