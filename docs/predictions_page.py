"""Writes docs/predictions.md, from what `benchmarks/predictions.py` and `published.py` have kept.

python docs/predictions_page.py

A test fails where the page is not what they say.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.compiler.report.bars import held_percent, percent_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "predictions.md"
#: How far a near row is off at most.
NEAR = 0.15
Row = dict[str, Any]

HEAD = """# How near the modelled times are

`tilewright inspect` gives a time for each step. It is not measured, but predicted by a cost model
([report.md](report.md#the-step), `compiler/report/times.py`). This page compares it with steps
that were measured on an H200 and an H100, and with figures that others published of a B200. All
tables are made by `python docs/predictions_page.py` from files in `benchmarks/results/`; `python
benchmarks/predictions.py` makes those of the steps, without a GPU.

The cost model has some fifteen constants. Each is fitted to the rows that are not *held out*, or
follows from a kept record of single ops, which its comment names. Held out of `steps.json` are 17
of its 37 models, and of the others all decode steps of four sequences and all prompts of 256
tokens (`benchmarks/steps_models.py`); this was written down before any of its rows was measured.
Held out of the older files are the models Qwen3-30B-A3B, GLM-4.7-Flash and Youtu, the formats
`ct-fp8-block`, `ct-nvfp4a16`, `ct-mxfp4a16` and `finegrained-fp8`, and Llama-3-8B in bfloat16 on
the H100. The older models and formats were chosen before any constant was fitted; Llama-3-8B was
added later, because no dense model was among them. Steps with codes that stand for floats first
came out at 0.5 to 0.8 of the measured time. After that had been seen, the constants of such codes
were taken from `linears_quantized.json`.

The constants were fitted to the other rows of `steps.json` before any held-out row was modelled. At
that first look 92 % of its 135 held-out rows were within 15 %, and 90 % of all 169. Held-out rows
then showed faults in what is counted, which are mended: writes into buffers that nothing reads
counted as kernels, as did the list of a mask's blocks once for each layer, and experts of a few
tokens counted once where kernels of dot products read them once for each token. No constant stands
for these, but `FILL_S` was fitted again afterwards, to the same rows as before. So the tables below
are no longer a first look.
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; all columns but the first `left` to the right."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def kept(name: str) -> Row:
    """A results file."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def summary(rows: Sequence[Row]) -> list[str]:
    """Cells that sum rows up: how many, their median, the share that is near, and the worst."""
    ratios = [row["ratio"] for row in rows]
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios) / len(ratios)
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    said = f"{worst['ratio']:.2f} ({worst['model']} {worst['form']} {worst['case']})"
    return [str(len(rows)), f"{statistics.median(ratios):.2f}", f"{100 * near:.0f} %", said]


def whole() -> str:
    """How near all rows are: as they were modelled before any of theirs was fitted to, and now."""
    now = kept("predictions")["rows"]
    lines = []
    for said, name in (
        ("before `times.py`", "predictions_before"),
        ("`steps.json`, before any of it was fitted to", "predictions_unseen"),
    ):
        before = kept(name)["rows"]
        names = {_key(row) for row in before}
        lines.append([said, *summary(before)])
        lines.append(["the same rows now", *summary([row for row in now if _key(row) in names])])
    lines += [
        ["all rows now", *summary(now)],
        ["fitted to", *summary([row for row in now if not row["held_out"]])],
        ["held out", *summary([row for row in now if row["held_out"]])],
    ]
    header = ("modelled / measured", "rows", "median", "within 15 %", "worst")
    note = """Before `times.py`, a step's time was the longer of the times of its bytes and of its
products with weights, plus 2.5 µs for each kernel. The steps of the second pair were measured
after the constants of that time had been fitted."""
    return f"## Steps on an H200 and an H100\n\n{table(header, lines)}\n\n{note}"


def _key(row: Row) -> tuple[str, ...]:
    return row["source"], row["model"], row["form"], row["case"]


def classes() -> str:
    """The bars, by class."""
    held: dict[str, list[Row]] = {}
    for row in kept("predictions")["rows"]:
        if row["held_out"]:
            held.setdefault(row["class"], []).append(row)
    lines = [
        [name, *summary(rows), f"± {held_percent([row['ratio'] for row in rows])} %"]
        for name, rows in sorted(held.items())
    ]
    header = ("class", "held-out rows", "median", "within 15 %", "worst", "bar")
    return f"""## The bar of each class

The bar is the least percentage that holds nine of ten held-out rows of a class, and at least 10 %
where those are fewer than ten; `inspect` prints it beside the time: `2.6 ms ± 8 %`. Classes are
told apart by the number of new tokens (*prompt*: 64 or more of a sequence) and by the weights. No
step with adapters was measured, so the bar of such steps is at least the widest of this table
(`compiler/report/bars.py` `UNHELD`). One or two rows say little: read such a bar as a
guess.

{table(header, lines)}"""


def steps() -> str:
    """Every measured step."""
    data = kept("predictions")
    lines = [
        [
            row["model"],
            row["form"],
            row["case"],
            row["gpu"].split()[1],
            row["class"],
            "yes" if row["held_out"] else "",
            f"{row['measured_us']:.0f}",
            f"{row['modelled_us']:.0f}",
            f"{row['ratio']:.2f}",
            row["bound"],
        ]
        for row in data["rows"]
    ]
    header = ("model", "weights", "batch x tokens", "GPU", "class", "held out", "measured µs")
    header += ("modelled µs", "ratio", "most of it")
    return f"""## All steps

1 to 8 layers at true widths, in CUDA graphs; a decode step has 1000 tokens in the cache of each
sequence, or as many as its row says. The rows are those of `*_end_to_end.json`,
`quantised_step.json` and `steps.json`. Not among them: `*_generate.json`, whose times hold the
host's work too.

{table(header, lines, left=6)}

Known faults: the random weights of Qwen3-30B-A3B send the tokens of a prompt to fewer experts than
even spreading does, which the cost model assumes; a library product of 1024 rows or more runs at
680 to 790 TFLOP/s, depending on the GPU's power, and the cost model has one rate; prompts of 256
tokens come out too long. The steps whose weights are codes were measured before the kernels of
today, and the cost model has not been fitted anew. For 16 and 64 sequences and a prompt of 1024
tokens, ct-w4a16 takes 459, 869 and 3352 µs now, and ct-fp8-dynamic 576, 941 and 2308
(quantised_step_ordered.json)."""


def ops() -> str:
    """Single ops, by file and format."""
    lines = [
        [
            f"`{row['source']}.json`",
            row["form"],
            str(row["rows"]),
            f"{row['median']:.2f}",
            f"{100 * row['near']:.0f} %",
            f"{row['worst']:.2f}",
        ]
        for row in kept("predicted_ops")["rows"]
    ]
    header = ("file", "format or case", "rows", "median", "within 15 %", "worst")
    return f"""## Single ops

The cost model's parts beside measured calls of single ops (`python benchmarks/predicted_ops.py`).
Some constants follow from these files, so this is a check of the formula, not a held-out test.
`moe_quantized.json` is older than the kernels that multiply one token by codes of experts.

{table(header, lines, left=2)}

Too low are mixtures of codes, and attention of one long sequence to latents of many heads; too high
are linears of NVFP4 and NF4. A step that such parts dominate may lie outside of its bar."""


def chips() -> str:
    """Published figures of a B200."""
    rows = kept("published_b200")["rows"]
    lines = [
        [
            row["what"],
            row["shape"],
            f"{row['published_us']:.1f}",
            f"{row['modelled_us']:.1f}",
            f"{row['ratio']:.2f}",
            f"[{_short(row['source'])}]({row['source']})",
        ]
        for row in rows
    ]
    ratios = [row["ratio"] for row in rows if row["kind"] != "attention"]
    header = ("measured by others", "shape", "published µs", "modelled µs", "ratio", "source")
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios) / len(ratios)
    said = f"median {statistics.median(ratios):.2f}, {100 * near:.0f} % within 15 %"
    return f"""## A chip without measurements of ours

For sm100 the cost model has the rates of `codegen/targets.py`, and the shares that were fitted on
Hopper. The table compares it with {len(rows)} figures of a B200 from public threads, which are of
other projects' kernels. (One is of a GB200; the thread of the attention rows says sm100 alone.)
Where a thread states a rate, the time is the product's FLOPs divided by it.

Products and mixtures: {said}, nine of ten within {percent_of(ratios)} %. The last figure is the bar
of sm100, for want of a better one. It says how far the cost model is from the kernels of others;
how far it is from ours is not known. Furthest off are products of one token, which take longer than
the start of a kernel and their bytes. Attention is left out of the bar: the cost model has the
share that our kernels reach on Hopper under a mask in a tensor, and FlashAttention-4 takes about a
quarter of that time. No published time of a whole step was found that states dims, batch and
context and is not a server's time.

On other chips no time was compared with anything. Their bar is a guess: ± 50 %.

{table(header, lines, left=2)}"""


def _short(address: str) -> str:
    """`vllm #19566`."""
    parts = address.split("/")
    return f"{parts[4]} #{parts[6]}"


def page() -> str:
    """docs/predictions.md."""
    return "\n\n".join([HEAD.rstrip(), whole(), classes(), steps(), ops(), chips()]) + "\n"


def main() -> None:
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
