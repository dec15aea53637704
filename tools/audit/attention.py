"""Kernels of attention over a cache that every compiler release is tried on: masks as `generate()`
hands them over."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilewright.codegen.attention.mask_plan import PROGRAMS_PER_SM
from tilewright.codegen.audit import Expectations
from tilewright.codegen.targets import Target
from tilewright.ops.attention import mask_blocks
from tilewright.ops.attention.mask_blocks import MaskBlocksArguments
from tilewright.tools.audit.cases import AuditCase, distinct

# (sequences, queries, keys, dtype): decode steps, prefills, a cache of no round length.
MASKS = (
    (64, 1, 2048, torch.bool),
    (1, 1, 131072, torch.bool),
    (8, 1024, 2048, torch.bool),
    (1, 8192, 8192, torch.bool),
    (16, 4, 1000, torch.bool),
    (64, 1, 2048, torch.bfloat16),
    (8, 1024, 2048, torch.bfloat16),
    (1, 512, 512, torch.float32),
)


def attention_cases(target: Target) -> list[AuditCase]:
    return distinct(list(_mask_cases(target)))


def _mask_cases(target: Target) -> Iterator[AuditCase]:
    for sequences, queries, keys, dtype in MASKS:
        mask = torch.empty(sequences, 1, queries, keys, dtype=dtype, device="meta")
        report = mask_blocks.OP.plan_for(MaskBlocksArguments(mask), target.name)
        for spec in report.specs:
            name = f"mask blocks {sequences} x {queries} x {keys} {dtype}: {report.reason}"
            yield AuditCase(name, spec, Expectations(blocks_per_sm=PROGRAMS_PER_SM))
