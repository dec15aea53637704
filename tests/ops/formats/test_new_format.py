"""Tests that one row of `codegen/formats.py` adds a format to every op and pattern that has
weights."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tilewright.ops import ArgumentError, linear_activation

# The code of a separate process: the row must exist before any module that reads the table is
# imported. One process runs all checks, because starting it takes most of the time.
SCRIPT = """
from tilewright.codegen.formats import WEIGHT_FORMATS, WeightFormat

WEIGHT_FORMATS["uint8"] = WeightFormat(
    ("u8",), linears=True, zeros=True, expert_scales=("fp32", "bf16"), expert_zero=128
)
from tests.ops.formats import new_format

for part in new_format.mlp, new_format.qkv, new_format.experts, new_format.patterns:
    part()
"""


def test_a_row_of_the_table_is_a_format():
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def test_without_the_row_it_is_refused():
    x, codes = torch.zeros(2, 32), torch.zeros(8, 32, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=r"weight_format: expected one of 'dense', .*'uint8'"):
        linear_activation(x, codes, weight_format="uint8")
