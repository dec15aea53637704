"""The static part of a call of a LoRA op."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant


@dataclass(frozen=True)
class RowForm:
    """How a kernel gets the adapter of each row (`lora.templates.rows`).

    Attributes:
        addressing: "single" (there is one adapter), "sequences" (there is an id for every
            rows_per_id rows), "groups" (there are offsets and ids of groups), "rows" (there is an
            id for each row, and every program reads all ids) or "sorted" (like "rows", but an
            earlier kernel sorts the rows).
        num_adapters: The number of adapters.
        ids: The operand of the adapters' ids; None if group g has adapter g.
        offsets: The operand of the groups' offsets; None if there are no groups.
        inclusive: Whether the offsets contain only the ends of groups.
        one_each: Whether there is an id for every row.
        groups: A power of two greater than the number of groups.
        rows: For "rows", a power of two that is at least the number of rows.
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
    """The row counts of one call.

    Attributes:
        num_rows: The number of rows of the result.
        total_rows: The number of rows of the call.
        groups: The number of groups of a_offsets.
        rows_per_id: The number of rows that each id applies to, if there are ids and no offsets.
    """

    num_rows: int
    total_rows: int
    groups: int = 0
    rows_per_id: int = 1


def tile_bound(form: RowForm, counts: RowCounts, block_m: int) -> int:
    """Returns an upper bound of the number of tiles, which holds for any choice of adapters."""
    rest = cdiv(counts.total_rows - counts.num_rows, block_m)
    if block_m == 1:
        return counts.total_rows
    if form.addressing == "single":
        return cdiv(counts.num_rows, block_m) + rest
    if form.addressing == "sequences":
        sequences = counts.num_rows // max(counts.rows_per_id, 1)
        return sequences * cdiv(counts.rows_per_id, block_m) + rest
    kinds = counts.groups if form.addressing == "groups" else form.num_adapters
    # The last tile of each adapter's rows may be partly empty, and so may the last tile of the rows
    # that have no adapter.
    partial = min(kinds + 1, counts.total_rows)
    return partial + (counts.total_rows - partial) // block_m


@dataclass(frozen=True)
class ShrinkProblem:
    """The static part of a call of `shrink_qkv_permute_3mn`. It describes only the weights that the
    call gives.

    Kernels get the address of the first weight and the distances of the other weights from the
    first, so only the alignment of the first weight matters.

    Attributes:
        hidden: The number of columns of `a`, K.
        ranks: The rank of each weight.
        a: The operand `a`, with strides (row,).
        weights: The weights, with strides (adapter, row, column of K).
        form: How kernels get the adapter of each row.
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
        """The rank of the result, N."""
        return max(self.ranks)

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants of three planes. If there are fewer planes, the constants of the last plane
        are repeated."""
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
