"""What is static about one call of a LoRA op, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant


@dataclass(frozen=True)
class RowForm:
    """How a kernel learns which adapter each row has; see `lora.templates.rows`.

    addressing: "single" (one adapter), "sequences" (an id for every rows_per_id rows), "groups"
    (offsets, and ids of the groups), "rows" (an id for each row, which every program looks through)
    or "sorted" (the same, sorted by a kernel before). ids None: groups are numbered as their
    adapters. inclusive: offsets are ends alone. one_each: an id for every row. groups, rows: powers
    of two that hold the groups and one more, and the rows of "rows".
    """

    addressing: str
    num_adapters: int
    ids: Operand | None = None
    offsets: Operand | None = None
    inclusive: bool = False
    one_each: bool = True
    groups: int = 1
    rows: int = 1

    @property
    def known(self) -> dict[str, Constant]:
        """The counts of a launch that are constants."""
        return {"rows_per_id": 1} if self.one_each else {}


@dataclass(frozen=True)
class RowCounts:
    """The row counts of one call. groups: of a_offsets; rows_per_id: where ids are given alone."""

    num_rows: int
    total_rows: int
    groups: int = 0
    rows_per_id: int = 1


def tile_bound(form: RowForm, counts: RowCounts, block_m: int) -> int:
    """Tiles that cover all rows, whatever the adapters are."""
    rest = cdiv(counts.total_rows - counts.num_rows, block_m)
    if block_m == 1:
        return counts.total_rows
    if form.addressing == "single":
        return cdiv(counts.num_rows, block_m) + rest
    if form.addressing == "sequences":
        sequences = counts.num_rows // max(counts.rows_per_id, 1)
        return sequences * cdiv(counts.rows_per_id, block_m) + rest
    kinds = counts.groups if form.addressing == "groups" else form.num_adapters
    # The last tile of each adapter's rows, and of the rows without one, may be partly empty.
    partial = min(kinds + 1, counts.total_rows)
    return partial + (counts.total_rows - partial) // block_m


@dataclass(frozen=True)
class ShrinkProblem:
    """The static part of a `shrink_qkv_permute_3mn` call, over the weights that are given.

    hidden: K. ranks: of each weight. a: strides (row,). weights: strides (adapter, row, column of
    K); kernels are given the address of the first and the others' distances from it, so that the
    alignment of the first alone counts.
    """

    hidden: int
    ranks: tuple[int, ...]
    a: Operand
    weights: tuple[Operand, ...]
    form: RowForm

    @property
    def planes(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """N, that of the result."""
        return max(self.ranks)

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants of three planes; where there are fewer, the last one's again."""
        last = self.planes - 1
        strides = [self.weights[min(plane, last)].strides for plane in range(3)]
        adapter, row, column = zip(*strides, strict=True)
        return {
            "HIDDEN": self.hidden,
            "N": self.rank,
            "PLANES": self.planes,
            "RANKS": tuple([self.ranks[min(plane, last)] for plane in range(3)]),
            "ADAPTER_STRIDES": adapter,
            "ROW_STRIDES": row,
            "COLUMN_STRIDES": column,
        }
