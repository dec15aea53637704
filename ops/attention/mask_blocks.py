"""`mask_blocks`: lists, for each tile of queries, the blocks of keys that the mask shows to at
least one query.

Attention that gets the list reads only the blocks in it. If all queries of a tile attend to all
keys of a block, attention does not read the mask of that block. All layers of a model can share one
list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.ops.attention.block_lists import (
    NAME,
    MaskBlocksArguments,
    fake,
    mask_blocks_steps,
    reference,
    unsupported,
    validate,
    validate_values,
)
from tilewright.ops.contract import EXACT, FusedOp, emitted_kernel, register


@dataclass(frozen=True)
class MaskCase:
    """One case of `mask_blocks`: a mask [batch, heads, queries, keys].

    Attributes:
        name: The name of the case.
        queries, keys, batch, heads: The sizes of the mask.
        cached: The number of keys before the first query's own key. Keys after a query's own key
            are hidden.
        padding: The number of keys that are hidden at the left of every second sequence.
        transposed: Whether queries, and not keys, are contiguous in memory.
        dtype: The dtype of the mask.
        hide_lowest: The op's argument.
    """

    name: str
    queries: int
    keys: int
    cached: int = 0
    batch: int = 1
    heads: int = 1
    padding: int = 0
    transposed: bool = False
    dtype: torch.dtype = torch.bool
    hide_lowest: bool = False


CASES = (
    MaskCase("added", 200, 333, cached=100, dtype=torch.float32),
    MaskCase("decode", 1, 1024, cached=400, batch=3, padding=70),
    MaskCase("prefill", 300, 512, batch=2, padding=65),
    MaskCase("heads", 5, 130, cached=64, heads=3, transposed=True),
    MaskCase("added_bf16", 1, 640, cached=320, batch=2, padding=128, dtype=torch.bfloat16),
    MaskCase("added_fp16", 130, 192, cached=62, padding=64, batch=2, dtype=torch.float16),
    MaskCase("lowest", 130, 700, cached=200, padding=70, batch=2, dtype=torch.float32,
             hide_lowest=True),
    MaskCase("lowest_bf16", 1, 640, cached=320, batch=2, dtype=torch.bfloat16, hide_lowest=True),
    MaskCase("lowest_fp16", 200, 333, cached=100, dtype=torch.float16, hide_lowest=True),
    MaskCase("double", 3, 70, dtype=torch.float64),
    MaskCase("one_key", 1, 1),
    MaskCase("no_queries", 0, 70),
    MaskCase("no_keys", 3, 0),
)  # fmt: skip


def sample_inputs(
    case: MaskCase, device: str | torch.device = "cpu", seed: int = 0
) -> MaskBlocksArguments:
    """Returns a mask made of positions and padding. In a mask of numbers, some visible keys have a
    number that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    positions = case.cached + torch.arange(case.queries)
    keys = torch.arange(case.keys)
    mask = (keys <= positions[:, None]).repeat(case.batch, case.heads, 1, 1)
    mask[1::2, ..., : case.padding] = False
    if case.dtype != torch.bool:
        lowest = case.hide_lowest or seed % 2
        hidden = torch.finfo(case.dtype).min if lowest else float("-inf")
        numbers = torch.zeros(mask.shape, dtype=case.dtype).masked_fill(~mask, hidden)
        biased = torch.rand(mask.shape, generator=generator) < 1 / 4096
        mask = torch.where(mask & biased, 0.5, numbers).to(case.dtype)
    if case.transposed:
        mask = mask.mT.contiguous().mT
    return MaskBlocksArguments(mask.to(device), hide_lowest=case.hide_lowest)


OP = register(
    FusedOp(
        name=NAME,
        arguments=MaskBlocksArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel(mask_blocks_steps, unsupported),),
        cases=CASES,
        sample_inputs=sample_inputs,
        tolerances={torch.int32: EXACT},
        error_model="None: results are integers, the same on every device.",
    )
)
