"""Compares the cost model of `tilewright inspect` with measured steps.

    python benchmarks/predictions.py [--only llama3-8b ...] [--out DIR]

For each row of `predicted_rows.py`, the program computes the modelled time on the chip of the row,
divided by the measured time. It needs no GPU; rows of the formats of compressed-tensors need that
library. Each row belongs to one class of steps (`compiler/report/bars.py` `class_of`). The
constants of `compiler/report/times.py` are fitted to the rows that HELD_OUT does not name, and the
error bars follow from the rows that HELD_OUT names. Results go to
benchmarks/results/predictions.json, from which `python docs/predictions_page.py` makes
docs/predictions.md. With --only, the file keeps its predictions for other rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import steps_models
from predicted_rows import QUANTISED, STEPS, Row, counts, measured_rows, step_behind
from timing import RESULTS, keep

from tilewright.compiler.report.bars import held_percent
from tilewright.compiler.report.step import SPENT

#: Models and formats to which no constant was fitted. The list was written before any constant was
#: fitted.
HELD_OUT_MODELS = frozenset({"qwen3-30b-a3b", "glm-4.7-flash", "youtu"})
HELD_OUT_FORMATS = frozenset(
    {"ct-fp8-block", "ct-nvfp4a16", "ct-mxfp4a16", "finegrained-fp8", "mxfp4-gpu"}
)


def is_held_out(row: Row) -> bool:
    """Whether no constant may be fitted to a row.

    This holds if the row's model or format is held out. It also holds for a row of a dense model on
    the H100, whose memory has another rate than the H200's.
    """
    if row.source == STEPS:
        return steps_models.is_held_out(row.model, row.batch, row.tokens)
    other_chip = row.source == QUANTISED and row.form == "bf16"
    return row.model in HELD_OUT_MODELS or row.form in HELD_OUT_FORMATS or other_chip


def predicted(row: Row) -> dict[str, Any]:
    """Returns a row of the results."""
    step = step_behind(row)
    spent = dict.fromkeys(SPENT, 0.0)
    modelled = 0.0
    for part, count in zip(step.parts, counts(step, row.layers), strict=True):
        modelled += count * part.amounts.modelled_us
        for name in SPENT:
            spent[name] += count * getattr(part.amounts, name)
    longest = max(spent, key=lambda name: spent[name])
    return {
        "source": row.source,
        "gpu": row.gpu,
        "model": row.model,
        "form": row.form,
        "layers": row.layers,
        "case": row.case,
        "class": step.kind,
        "held_out": is_held_out(row),
        "measured_us": round(row.us, 1),
        "modelled_us": round(modelled, 1),
        "ratio": round(modelled / row.us, 3),
        "bound": SPENT[longest],
    }


def said_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields lines that sum up the rows: all rows, all held-out rows, and the held-out rows of each
    class."""
    yield _line("all", rows)
    yield _line("held out", [row for row in rows if row["held_out"]])
    classes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["held_out"]:
            classes[row["class"]].append(row)
    for name, own in sorted(classes.items()):
        yield f"{_line(name, own)}  bar {held_percent([row['ratio'] for row in own])} %"


def _line(name: str, rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return f"{name:30}  no rows"
    ratios = [row["ratio"] for row in rows]
    errors = [abs(ratio - 1) for ratio in ratios]
    within = sum(error <= 0.15 for error in errors) / len(errors)
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    said = f"{worst['model']} {worst['form']} {worst['case']} {worst['ratio']:.2f}"
    return (
        f"{name:30}  {len(rows):3} rows  median {statistics.median(ratios):.2f}  "
        f"off by {100 * statistics.median(errors):.1f} %  "
        f"within 15 %: {100 * within:.0f} %  worst {said}"
    )


def kept_rows() -> dict[Any, dict[str, Any]]:
    """Returns the rows of the results file by their keys."""
    rows = json.loads((RESULTS / "predictions.json").read_text("utf-8"))["rows"]
    return {_key(row): row for row in rows}


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["source"], row["model"], row["form"], row["case"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="models or formats; other rows stay as they are")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    known = kept_rows() if given.only else {}
    rows: list[dict[str, Any]] = []
    for row in measured_rows():
        if given.only and not {row.model, row.form} & set(given.only):
            rows.append(known[row.source, row.model, row.form, row.case])
            continue
        rows.append(predicted(row))
        print(f"{rows[-1]['ratio']:.2f}  {row.model} {row.form} {rows[-1]['case']}", flush=True)
    print(*said_of(rows), sep="\n")
    keep("predictions", rows, given.out)


if __name__ == "__main__":
    main()
