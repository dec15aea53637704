"""The shipped tables of measured times of QKV lowerings. Each row applies to one set of dims, one
format and one number of tokens.

`benchmarks/tune_qkv.py` writes `measured_qkv.json`. `benchmarks/tune_quantized.py` writes
`measured_quantized.json`, which is for quantised weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.codegen.qkv.kernels import CONFIGS, Config
from tilewright.codegen.qkv.problem import QkvProblem
from tilewright.codegen.targets import Target

NUMBERS_FILE, CODES_FILE = (
    Path(__file__).with_name(f"measured_{name}.json") for name in ("qkv", "quantized")
)


@cache
def measured_table(file: Path) -> tuple[dict, ...]:
    """Returns the rows of the table in a file."""
    return tuple(json.loads(file.read_text("utf-8"))["rows"])


def row_key(problem: QkvProblem, target: Target) -> dict[str, Any]:
    """Returns the facts that identify a row, except the number of tokens."""
    q, heads = problem.quantization, problem.epilogue
    key = {
        "target": target.name,
        "hidden": problem.hidden,
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "norm": heads.has_norm,
    }
    if q is None:
        return key
    return key | {
        "weight_format": q.weight_format,
        "word_dtype": problem.weights[0].dtype,
        "k_major": problem.k_major,
        "block": list(q.block),
        "zeros": q.has_zero_tensors,
        "coded_x": problem.coded_x,
    }


def measured_row(problem: QkvProblem, num_tokens: int, target: Target) -> dict | None:
    """Returns the row for the problem's dims and, if weights are quantised, for their format. The
    row's number of tokens is the smallest measured number that is at least `num_tokens`. Returns
    None if there is no such row."""
    coded, heads = problem.quantization is not None, problem.epilogue
    if heads.dtype not in ("bf16", "fp16") or not heads.writes_v:
        return None
    if not coded and (heads.group or not problem.k_major):
        return None
    key = row_key(problem, target)
    above = [
        row
        for row in measured_table(CODES_FILE if coded else NUMBERS_FILE)
        if row["num_tokens"] >= num_tokens and key.items() <= row.items()
    ]
    return min(above, key=lambda row: row["num_tokens"], default=None)


def write_config(config: Config) -> dict[str, Any]:
    """Returns a config in the form in which tables store it."""
    return {"kind": config.kind, **asdict(config)}


def read_config(values: Mapping[str, Any]) -> Config:
    """Reads a config that `write_config` wrote."""
    fields = {key: value for key, value in values.items() if key != "kind"}
    return CONFIGS[values["kind"]](**fields)


def table_text(facts: Mapping[str, object], rows: Iterable[Mapping[str, object]]) -> str:
    """Returns the text of a measured table: facts about the measurement, then one row on each
    line."""
    head = json.dumps({**facts, "rows": []}, indent=1).removesuffix("]\n}")
    return head + "\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]\n}\n"
