"""Writes docs/predictions.md from the results files of `benchmarks/predictions.py`,
`predicted_ops.py` and `published.py`.

python docs/predictions_page.py

A test fails if the page differs from these files.
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
#: The largest relative error of a row that counts as near.
NEAR = 0.15
#: The headings of cells that say how far predictions are from measurements.
FAR = ("median error", "within 15 %", "worst")
Row = dict[str, Any]

HEAD = """# How near the modelled times are to measured times

`tilewright inspect` prints a time for each step. A cost model predicts this time; nothing is
measured ([report.md](report.md#the-step), `compiler/report/times.py`). This page compares the cost
model with steps that were measured on an H200 and an H100, and with figures of a B200 that others
published. `python docs/predictions_page.py` makes all tables from files in `benchmarks/results/`;
`python benchmarks/predictions.py` writes the file of the steps, without a GPU.

The cost model has some twenty constants. Each row of these files is one measured step. A constant
either is fitted to the rows that are not *held out*, or follows from stored measurements of single
ops, which the comment on the constant names. Two sets of rows are held out:

- From `steps.json`, all rows of 23 of the 46 models, and for the other models all decode steps of
  four sequences and all prompts of 256 tokens (`benchmarks/steps_models.py`). This choice was
  written down before any row of these models was measured.
- From the other files, the models Qwen3-30B-A3B, GLM-4.7-Flash and Youtu; the formats
  `ct-fp8-block`, `ct-nvfp4a16`, `ct-mxfp4a16`, `finegrained-fp8` and `mxfp4-gpu`; and all models in
  bfloat16 of `quantised_step.json`. These models and formats were chosen before any constant was
  fitted, except `mxfp4-gpu` and the models in bfloat16.

The constants were fitted to the other rows of `steps.json` before any held-out row was predicted.
In this first comparison, 92 % of the predictions for the file's 135 held-out rows were within 15 %
of the measurement, and so were 90 % of the predictions for all 169 held-out rows. The held-out rows
then showed three mistakes in counting, which are fixed: writes into buffers that nothing reads
counted as kernels; the list of a mask's blocks counted once for each layer; and the weights of
experts counted once, although for a few tokens the kernels of dot products read them once for each
token. No constant describes these counts, but the constant `FILL_S` (`compiler/report/times.py`)
was fitted again afterwards, to the same rows as before. The tables below were made after these
changes, so the held-out rows are not entirely new to the cost model of these tables.

Steps with adapters were measured last, and no constant was changed for them.

`quantised_step.json` was measured again with the kernels that put activations into the order of the
codes. For these rows, the cost model of the earlier kernels predicted up to 2.8 times the measured
time. The formulas for codes were then replaced: a weight is decoded once for each 64 tokens, at a
rate that depends on its format, and the kernel for many tokens hides the decoding. The rates come
from linears that were measured alone ([quantised-performance.md](quantised-performance.md)) and
from the steps of `ct-w4a16`, `ct-fp8-dynamic` and `bitsandbytes-nf4`. The held-out rows showed
three mistakes in counting, which are fixed: the products of MXFP4 experts were not counted, the
decoding of experts was not counted, and a change of shape counted as a kernel.
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a Markdown table; columns after the first `left` are aligned to the right."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def kept(name: str) -> Row:
    """Returns the content of a results file."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def summary(rows: Sequence[Row]) -> list[str]:
    """Returns cells that sum up rows: their number, their median ratio, their median absolute
    error, the share of rows that are near, and the worst row."""
    ratios = [row["ratio"] for row in rows]
    off = f"{100 * statistics.median(abs(ratio - 1) for ratio in ratios):.1f} %"
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios) / len(ratios)
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    said = f"{worst['ratio']:.2f} ({worst['model']} {worst['form']} {worst['case']})"
    median = f"{statistics.median(ratios):.2f}"
    return [str(len(rows)), median, off, f"{100 * near:.0f} %", said]


def whole() -> str:
    """Returns the lines of a table that compares predicted with measured times. A line has either
    the first predictions for some rows, which were made before any constant was fitted to these
    rows, or today's predictions."""
    now = kept("predictions")["rows"]
    measured = {_key(row): row["measured_us"] for row in now}
    lines = []
    for said, name in (
        ("an earlier cost model", "predictions_before"),
        ("`steps.json`, before constants were fitted to it", "predictions_unseen"),
    ):
        # Rows that were measured again after the first prediction are left out.
        rows = kept(name)["rows"]
        before = [row for row in rows if measured.get(_key(row)) == row["measured_us"]]
        names = {_key(row) for row in before}
        lines.append([said, *summary(before)])
        lines.append(
            [
                "the same rows, today's cost model",
                *summary([row for row in now if _key(row) in names]),
            ]
        )
    lines += [
        ["all rows, today's cost model", *summary(now)],
        [
            "of these, the rows that constants were fitted to",
            *summary([row for row in now if not row["held_out"]]),
        ],
        ["of these, the held-out rows", *summary([row for row in now if row["held_out"]])],
    ]
    header = ("modelled / measured", "rows", "median", *FAR)
    note = """The first pair of rows compares today's cost model with an earlier one. In the earlier
cost model, a step took the time of its bytes or of its products with weights, whichever is longer,
plus 2.5 µs for each kernel. The second pair has the steps of
`steps.json`, which were measured after the constants in use at the time had been fitted. Its first
row therefore says how well the cost model predicted steps to which it was not fitted."""
    return f"## Steps on an H200 and an H100\n\n{table(header, lines)}\n\n{note}"


def _key(row: Row) -> tuple[str, ...]:
    return row["source"], row["model"], row["form"], row["case"]


def classes() -> str:
    """Returns the section on the error bars, by class."""
    held: dict[str, list[Row]] = {}
    for row in kept("predictions")["rows"]:
        if row["held_out"]:
            held.setdefault(row["class"], []).append(row)
    lines = [
        [name, *summary(rows), f"± {held_percent([row['ratio'] for row in rows])} %"]
        for name, rows in sorted(held.items())
    ]
    header = ("class", "held-out rows", "median", *FAR, "bar")
    return f"""## The bar of each class

`inspect` prints an error bar beside the time: `2.6 ms ± 8 %`. The error bar of a class of steps is
the smallest percentage within which nine of ten held-out rows of the class lie, and at least 10 %
if there are fewer than ten rows. A class is a kind of step (*prompt* means 64 or more new tokens of
a sequence, *decode* fewer) and a kind of weights. A class without held-out rows has at least the
widest bar of this table (`compiler/report/bars.py` `UNHELD`). One or two rows say little, so read
such a bar as a guess.

{table(header, lines)}"""


def steps() -> str:
    """Returns the section with every measured step."""
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
    header += ("modelled µs", "ratio", "largest part")
    return f"""## All steps

The steps are of 1 to 8 layers at the models' true widths, in CUDA graphs. A decode step has 1000
tokens in the cache of each sequence, unless its row gives another number. The rows come from
`*_end_to_end.json`, `quantised_step.json` and `steps.json`. The rows of `*_generate.json` are left
out, since their times include the host's work.

{table(header, lines, left=6)}

The cost model has these known faults:

- It assumes that tokens are spread evenly over experts, but the random weights of Qwen3-30B-A3B
  send the tokens of a prompt to fewer experts.
- It has one rate for a library product of 1024 rows or more, but such a product runs at 680 to 790
  TFLOP/s, depending on the GPU's power.
- It predicts too long a time for prompts of 256 tokens.
- It predicts too long a time for decode steps of one sequence that consist of many small kernels:
  steps with adapters on all linears, and steps of small experts whose weights are codes.
- It does not count the arithmetic of rounding latents to float8, so it predicts too short a time
  for DeepSeek-V2-Lite in `finegrained-fp8` with many sequences."""


def ops() -> str:
    """Returns the section on single ops, by file and format."""
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

This table compares the parts of the cost model with measured calls of single ops (`python
benchmarks/predicted_ops.py`). Some constants follow from these files, so the comparison checks the
formulas, but it is not a held-out test. The rows of `moe_quantized.json` were measured before there
were kernels that multiply one token by codes of experts. The rows of several tokens in
`linears_quantized.json` are left out, because they were measured before there were kernels that put
activations into the order of the codes.

{table(header, lines, left=2)}

For mixtures with weights of codes, the predicted times are up to 3.3 times too short and up to 2.3
times too long. For attention of one long sequence over latents with many heads, they are too short.
The measured time of a step that consists mostly of such parts may be outside of its error bar."""


def chips() -> str:
    """Returns the section on figures of a B200 that others published."""
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
    said = f"median of {statistics.median(ratios):.2f}; {100 * near:.0f} % are within 15 %"
    return f"""## A chip on which tilewright was not measured

For sm100 the cost model uses the rates of `codegen/targets.py`, and assumes that kernels reach the
same shares of these rates as on Hopper. The table compares its predictions with {len(rows)} figures
of a B200 from public threads, which measured kernels of other projects. (One figure is of a GB200;
the thread of the attention rows says only sm100.) If a thread states a rate, the time is the
product's FLOPs divided by this rate.

For products and mixtures, the ratio of predicted to published time has a {said}, and nine of ten
are within {percent_of(ratios)} %. The last figure is used as the error bar of sm100, because no
better one is known. It says how far the cost model is from the kernels of other projects, not how
far it is from tilewright's kernels. The predictions for products of one token have the largest
errors: these products take longer than starting a kernel and reading their bytes. Attention does
not count for the error bar: for attention, the cost model assumes the rate that tilewright's
kernels reach on Hopper with a mask tensor, and FlashAttention-4 takes about a quarter of the
resulting time. We found no published time of a whole step together with its sizes, batch and
context, except times of servers.

On other chips, no prediction was compared with a measurement. The error bar of these chips is a
guess: ± 50 %.

{table(header, lines, left=2)}"""


def _short(address: str) -> str:
    """Returns the short name of a thread, such as `vllm #19566`."""
    parts = address.split("/")
    return f"{parts[4]} #{parts[6]}"


def page() -> str:
    """Returns the text of docs/predictions.md."""
    return "\n\n".join([HEAD.rstrip(), whole(), classes(), steps(), ops(), chips()]) + "\n"


def main() -> None:
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
