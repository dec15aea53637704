"""Measured times of QKV lowerings, as they are shipped: rows for dims, formats and token counts.

`measured_qkv.json` is written by `benchmarks/tune_qkv.py`, `measured_quantized.json`, of weights of
codes, by `benchmarks/tune_quantized.py`.
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
    """The rows of a table."""
    return tuple(json.loads(file.read_text("utf-8"))["rows"])


def row_key(problem: QkvProblem, target: Target) -> dict[str, Any]:
    """What a row is for, beside the token count."""
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
    """The row for the problem's dims, and its format where weights are codes, at the smallest
    measured token count that is not below."""
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
    """A config as a table holds it."""
    return {"kind": config.kind, **asdict(config)}


def read_config(values: Mapping[str, Any]) -> Config:
    """The inverse of `write_config`."""
    fields = {key: value for key, value in values.items() if key != "kind"}
    return CONFIGS[values["kind"]](**fields)


def table_text(facts: Mapping[str, object], rows: Iterable[Mapping[str, object]]) -> str:
    """A measured table as it is shipped: where it was measured, then its rows, one a line."""
    head = json.dumps({**facts, "rows": []}, indent=1).removesuffix("]\n}")
    return head + "\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]\n}\n"
