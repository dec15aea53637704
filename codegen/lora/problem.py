"""The static part of a call of a LoRA op."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant


@dataclass(frozen=True)
class RowForm:
    """The form in which a kernel gets the adapter of each row; see `lora.templates.rows`.

    addressing: "single" (one adapter), "sequences" (an id for every rows_per_id rows), "groups"
    (offsets and ids of groups), "rows" (an id for each row; every program reads all ids) or
    "sorted" (like "rows", but sorted by an earlier kernel). ids None: the adapter of group g is g.
    inclusive: offsets contain only ends. one_each: whether there is an id for every row. groups: a
    power of two above the number of groups. rows: a power of two that covers the rows, for "rows".
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
        """The counts of a launch that are compile-time constants."""
        return {"rows_per_id": 1} if self.one_each else {}


@dataclass(frozen=True)
class RowCounts:
    """The row counts of one call. groups: number of groups of a_offsets. rows_per_id: rows of each
    id, if there are ids without offsets."""

    num_rows: int
    total_rows: int
    groups: int = 0
    rows_per_id: int = 1


def tile_bound(form: RowForm, counts: RowCounts, block_m: int) -> int:
    """Returns the number of tiles that cover all rows for any choice of adapters."""
    rest = cdiv(counts.total_rows - counts.num_rows, block_m)
    if block_m == 1:
        return counts.total_rows
    if form.addressing == "single":
        return cdiv(counts.num_rows, block_m) + rest
    if form.addressing == "sequences":
        sequences = counts.num_rows // max(counts.rows_per_id, 1)
        return sequences * cdiv(counts.rows_per_id, block_m) + rest
    kinds = counts.groups if form.addressing == "groups" else form.num_adapters
    # The last tile of each adapter's rows, and of the rows without an adapter, may be partly empty.
    partial = min(kinds + 1, counts.total_rows)
    return partial + (counts.total_rows - partial) // block_m


@dataclass(frozen=True)
class ShrinkProblem:
    """The static part of a `shrink_qkv_permute_3mn` call. It describes only the weights that the
    call gives.

    hidden: K. ranks: rank of each weight. a: operand with strides (row,). weights: operands with
    strides (adapter, row, column of K). Kernels get the address of the first weight and the
    distances of the others from it, so only the alignment of the first matters.
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
        """The rank N of the result."""
        return max(self.ranks)

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants of three planes. If there are fewer planes, the constants of the last one
        repeat."""
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
