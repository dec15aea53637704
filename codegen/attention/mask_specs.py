"""Lists of blocks as plain data: problem, config and spec of the `mask_blocks` kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.attention.blocks import KEYS, LOWEST, ORDINARY, QUERIES
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec

# Entries of a list that are written at a time.
LEAST_LISTED, MOST_LISTED = 16, 1024


@dataclass(frozen=True)
class MaskProblem:
    """The static part of a call. mask: u8 of booleans, else a float that is added; contiguous: a
    row's keys lie side by side. rows, key_blocks: the next powers of two of its rows, at most
    QUERIES, and of its blocks of keys. divisible: names of run-time numbers that 16 divides. unit:
    the largest power of two of a mask whose lowest numbers hide, too; 0 where they do not."""

    mask: Operand
    contiguous: bool
    rows: int
    key_blocks: int
    divisible: tuple[str, ...] = ()
    unit: float = 0.0


@dataclass(frozen=True)
class MaskConfig:
    """Blocks of a program's step, and the parts that a tile's blocks are cut into."""

    blocks: int
    parts: int
    num_warps: int = 8

    def __str__(self) -> str:
        return f"{self.blocks} blocks at a time, {self.parts} parts"


def blocks_per_part(config: MaskConfig, key_blocks: int) -> int:
    """Of `key_blocks`, in whole steps; the last part has what is left."""
    return max(cdiv(cdiv(key_blocks, config.parts), config.blocks), 1) * config.blocks


def numbers_per_tile(problem: MaskProblem, config: MaskConfig, key_blocks: int) -> int:
    """That the programs of a tile hand over: a flag of each block, and where the lowest numbers
    hide, of each part's rows whether they have an ordinary one."""
    return key_blocks + (config.parts * problem.rows if problem.unit and config.parts > 1 else 0)


def mask_spec(problem: MaskProblem, config: MaskConfig, target: str) -> KernelSpec:
    """The `mask_blocks` kernel of a problem."""
    counts = (
        "num_heads", "num_queries", "num_keys", "query_tiles", "key_blocks", "blocks_per_part",
        "parts",
    )  # fmt: skip
    strides = ("sequence_stride", "head_stride", "row_stride")
    return KernelSpec.of(
        "attention.mask_blocks",
        "mask_blocks",
        {
            "KIND": "bool" if problem.mask.dtype == "u8" else "additive",
            "QUERIES": QUERIES,
            "KEYS": KEYS,
            "ROWS": problem.rows,
            "BLOCKS": config.blocks,
            "LISTED": max(min(problem.key_blocks, MOST_LISTED), LEAST_LISTED),
            "SPLIT": config.parts > 1,
            **_bounds(problem.unit),
        },
        {
            "mask_ptr": problem.mask,
            "out_ptr": Operand("i32"),
            "flags_ptr": Operand("fp32"),
            "counters_ptr": Operand("i32", aligned=False),
            **dict.fromkeys(counts, "i32"),
            **dict.fromkeys(strides, "i64"),
            "column_stride": 1 if problem.contiguous else "i64",
        },
        divisible=problem.divisible,
        ranges=("num_heads", "query_tiles", "blocks_per_part", "parts"),
        dependent=True,
        num_warps=config.num_warps,
        target=target,
    )


def _bounds(unit: float) -> dict[str, float]:
    return {"LOWEST": LOWEST * unit, "ORDINARY": ORDINARY * unit} if unit else {}
