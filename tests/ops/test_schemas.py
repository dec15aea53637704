"""The ops' schemas stay what they are: exported programs and other people's calls name them.

A change that is meant is made in `schemas.txt`, by hand.
"""

from __future__ import annotations

from pathlib import Path

from tilewright.ops.contract import all_ops

SCHEMAS = Path(__file__).with_name("schemas.txt")


def test_every_schema_is_what_it_was():
    ours = [op for op in all_ops() if op.namespace == "tilewright"]
    assert [str(op.torch_op._schema) for op in ours] == SCHEMAS.read_text("utf-8").splitlines()
