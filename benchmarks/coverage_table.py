"""Generates docs/coverage.md from the kept results of `coverage.py`.

    python benchmarks/coverage_table.py

The page is generated from benchmarks/results/coverage.json only, so after a run for a few models
the page still shows all other models. A test compares the page with the file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOC = Path(__file__).parents[1] / "docs" / "coverage.md"
KEPT = Path(__file__).parent / "results" / "coverage.json"
Row = Mapping[str, Any]
NONE = "-"
#: The fields of a row that say when it was made, and with which releases.
MADE = ("date", "torch", "transformers")
#: The lists of rows in the file of results: unmodified classes, and models with quantised weights.
SECTIONS = ("rows", "coded")

#: For each column, the patterns whose matches and misses the column shows.
FAMILIES = {
    "K and V": ("qkv_cache", "mla_latent_store", "cache_store", "cache_absent"),
    "attention": ("cache_attention", "mla_prefill", "mla_decode"),
    "mixtures": ("moe", "moe_dense", "grouped_gemm"),
    "router": ("moe_router",),
    "MLP": ("linear_activation",),
    "residual": ("linear_residual",),
}
SHORT = {"qkv_cache": "", "mla_latent_store": "latent ", "cache_store": "store ", "moe": ""}
SHORT |= {"cache_attention": "", "moe_router": "", "linear_activation": "", "linear_residual": ""}
SHORT |= {"mla_prefill": "mla ", "mla_decode": "mla "}


def cell(row: Row, family: str) -> str:
    """Returns the cell of one family of one model: the result of decode, followed by the result of
    prefill if that differs."""
    parts = [_phase(row[phase], family) for phase in ("decode", "prefill") if phase in row]
    return " / ".join(dict.fromkeys(parts))


def _phase(step: Row, family: str) -> str:
    said = []
    for pattern in FAMILIES[family]:
        if count := step["fused"].get(pattern):
            said.append(f"{SHORT.get(pattern, pattern + ' ')}{count}")
    for name, count in (step["lost"] | step["advice"]).items():
        pattern, code = name.split()
        if pattern in FAMILIES[family]:
            said.append(f"{code} {count}")
    return ", ".join(said) or NONE


def numbers(row: Row) -> str:
    steps = steps_of(row)
    if any(step["wrong"] for step in steps):
        return "**wrong**"
    if any(step["unjudged"] for step in steps):
        return "not judged"
    return "good" if any(step["fused"] for step in steps) else NONE


def unaccounted(row: Row) -> str:
    """Returns the number of census points that nothing accounts for, in both phases together."""
    counted = [step["unaccounted"] for step in steps_of(row) if "unaccounted" in step]
    return str(sum(map(len, counted))) if counted else NONE


def steps_of(row: Row) -> list[Row]:
    return [row[phase] for phase in ("decode", "prefill") if phase in row]


def attention_layers(row: Row) -> int:
    """Counts the layers whose cache write is fused. The count is taken in decode and in prefill,
    and the smaller one is returned."""
    fewest = [
        sum(step["fused"].get(p, 0) for p in ("qkv_cache", "mla_latent_store"))
        + (step["stored"] + 1) // 2
        for step in steps_of(row)
    ]
    return min(fewest, default=0)


def is_whole(row: Row) -> bool:
    """Whether every attention layer and every mixture of both phases is fused."""
    mixed = [sum(s["fused"].get(p, 0) for p in ("moe", "moe_dense")) for s in steps_of(row)]
    return attention_layers(row) >= row["attention_layers"] and min(mixed) >= row["mixtures"]


def silent(row: Row) -> bool:
    """Whether no layer or no mixture is fused in a phase, and no miss says why."""
    return any(
        step["fused"].keys().isdisjoint(FAMILIES[family])
        and not any(name.split()[0] in (*FAMILIES[family], "capture") for name in step["lost"])
        for step in steps_of(row)
        for family, wanted in (("K and V", row["attention_layers"]), ("mixtures", row["mixtures"]))
        if wanted
    )


def totals(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of the table of totals, and of the list of misses."""
    built = [r for r in rows if "decode" in r]
    static = [r for r in built if r["static"]]
    whole = [r for r in static if is_whole(r)]
    projected = [
        r for r in whole if all("cache_store" not in step["fused"] for step in steps_of(r))
    ]
    judged = [r for r in built if any(s["fused"] for s in steps_of(r))]
    lost: Counter[str] = Counter()
    for r in static:
        lost.update({name for step in steps_of(r) for name in step["lost"]})
    ours, dynamo = (sum(s[k] for r in built for s in steps_of(r)) for k in ("ours_s", "dynamo_s"))
    left = [len(s["unaccounted"]) for r in built for s in steps_of(r) if "unaccounted" in s]
    internal = [r for r in built for s in steps_of(r) if any("INTERNAL" in n for n in s["lost"])]
    return [
        "| Counted | Result |",
        "|---|---|",
        f"| classes in transformers' mapping of causal language models | {len(rows)} |",
        f"| classes that are not a decoder by themselves | {sum('skipped' in r for r in rows)} |",
        f"| classes that were run | {len(built)} |",
        f"| classes run with a static cache | {len(static)} |",
        f"| of these, with every attention layer and every mixture fused | {len(whole)} "
        f"({100 * len(whole) / max(len(static), 1):.0f} %) |",
        f"| of these, with all projections fused with the cache writes | {len(projected)} |",
        f"| classes with an unfused part and no miss that says why | {sum(map(silent, static))} |",
        f"| points of the census unaccounted for | {sum(left)}, in {len(left)} steps counted |",
        f"| wrong numbers | {sum(numbers(r) == '**wrong**' for r in built)} of {len(judged)} |",
        f"| internal errors | {len(internal)} |",
        f"| tilewright's compile time / Dynamo's | {100 * ours / max(dynamo, 1e-9):.0f} % |",
        "",
        "This list has the lost misses by pattern and code. Each number counts the classes with a "
        "static cache that have such a miss: "
        + (", ".join(f"{code} {n}" for code, n in lost.most_common()) or "none")
        + ".",
    ]


def made_with(kept: Mapping[str, Any]) -> str:
    """Describes when the rows were made, and with which releases.

    A row without these fields has the fields of the file.
    """
    rows = [row for section in SECTIONS for row in kept.get(section, ())]
    dates, torches, libraries = (
        sorted({row.get(name, kept[name]) for row in rows}) for name in MADE
    )
    when = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
    return f"{when}: torch {' and '.join(torches)}, transformers {' and '.join(libraries)}"


def coded(rows: Sequence[Row]) -> list[str]:
    """Returns the section on combinations of quantised formats and models, which shows where a
    format differs from bf16."""
    found = {tuple(row["model"].split("+")): row for row in rows}
    models, forms = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    columns = ["bf16", *(form for form in forms if form != "bf16")]
    lines = ["| model | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for model in models:
        plain = found.get((model, "bf16"))
        cells = [_coded_cell(found.get((model, form)), plain) for form in columns]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    wrong = sum(numbers(row) == "**wrong**" for row in rows)
    unjudged = sum(numbers(row) == "not judged" for row in rows)
    return [
        "## Quantised formats x models",
        "The models are small unmodified classes. Every linear of a layer has a weight of codes "
        "that the forward pass decodes in PyTorch, as the loaders of such checkpoints do. Stacked "
        "experts also have such weights, if the format supports them. "
        '"=" means that the same sites are fused as with bf16 weights, in decode and in prefill. '
        'Any other cell has the misses of decode and prefill. "-" means that the format was not '
        "tried with the model. The results of "
        f"{wrong} of {len(rows)} combinations are wrong; the results of {unjudged} were not "
        "judged.",
        "\n".join(lines),
    ]


def _coded_cell(row: Row | None, plain: Row | None) -> str:
    if row is None:
        return NONE
    if "decode" not in row:
        return "failed"
    missed: Counter[str] = Counter()
    for step in steps_of(row):
        missed.update(step["lost"])
        missed.update(step["advice"])
    said = [f"{name} {count}" for name, count in sorted(missed.items())]
    same = plain is not None and [s["fused"] for s in steps_of(row)] == [
        s["fused"] for s in steps_of(plain)
    ]
    if not same and not said:
        said = ["**silent**"]
    said = [] if same else said
    return ", ".join([*said, *(["**wrong**"] if numbers(row) == "**wrong**" else [])]) or "="


def page(kept: Mapping[str, Any]) -> str:
    """Returns the text of docs/coverage.md. `kept` is the content of the file of results."""
    rows = kept["rows"]
    head = f"""# What is fused in every causal language model of transformers

This page is generated by `{kept["command"]}` {made_with(kept)}, on a CPU in bfloat16.
The models are unmodified classes of transformers with random weights, small sizes, and one layer of
each kind. The inputs are those of `prepare_inputs_for_generation`, with a static cache, 4-D masks
and two sequences.

A cell has the result of a decode step. If a prefill has another result, it follows after a slash.
A number counts fused sites. A code with a number counts misses ([miss-codes.md](miss-codes.md)).
A "-" means that there is neither a fused site nor a miss.
The column "K and V" is about layers that write a cache: a plain number counts the layers whose
writes are fused with their projections, "store" counts writes that are fused alone, and "latent"
counts layers that write latents. "silent" counts the points of the [census](soundness.md#census)
that no match, no miss and no known reason accounts for. "numbers" compares outputs and caches with
float64; "good" means that their errors are no larger than eager's. "time" is the processor time
that tilewright needs to compile the steps, as a share of the time that Dynamo needs.

""" + "\n".join(totals(rows))
    columns = ["model", "layers", *FAMILIES, "silent", "numbers", "time"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        if "decode" not in row or not row["static"]:
            continue
        of_dynamo = [sum(s[k] for s in steps_of(row)) for k in ("ours_s", "dynamo_s")]
        cells = [row["model"], f"{row['attention_layers']} + {row['mixtures']}"]
        cells += [cell(row, family) for family in FAMILIES]
        cells += [
            unaccounted(row),
            numbers(row),
            f"{100 * of_dynamo[0] / max(of_dynamo[1], 1e-9):.0f} %",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    rest = [
        "| model | why | fused in a decode step |",
        "|---|---|---|",
        *(
            f"| {r['model']} | {r['why_not_static']} | "
            f"{', '.join(f'{k} {v}' for k, v in r['decode']['fused'].items()) or NONE} |"
            for r in rows
            if "decode" in r and not r["static"]
        ),
    ]
    failed = [
        f"- {r['model']}: {r.get('skipped') or r.get('failed')}" for r in rows if "decode" not in r
    ]
    parts = (
        head,
        '## With a static cache\n\n"layers" is the number of layers with attention, plus the '
        "number of layers with a mixture.",
        "\n".join(lines),
        "## Without a static cache",
        "\n".join(rest),
        *(coded(kept["coded"]) if kept.get("coded") else ()),
        "## Not run",
        "\n".join(failed),
    )
    return "\n\n".join(parts).replace("|\n\n|", "|\n|") + "\n"


def main() -> None:
    DOC.write_text(page(json.loads(KEPT.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
