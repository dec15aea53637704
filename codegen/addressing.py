"""How a kernel finds the slot of a paged cache that each token is written to."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.operand import Operand, first_strides
from tilewright.codegen.spec import Constant, constants_of, operands_of


@dataclass(frozen=True)
class Addressing:
    """The static part of the arguments that name the slots; `ops.cache.addressing` has their
    meaning.

    form: "flat", "per_sequence", "block_table" or "ragged"; "none": nothing is written.
    slots: the slot of each token, or the lookup table of pages; strides (step,), of a table that
    from column to column.
    sequences, positions: of each token, where there is a table; "ragged": row offsets and cache
    lengths of the sequences. Strides (step,).
    wrap_negative: a negative index counts from the end.
    search_steps: 2 ** search_steps is more than the number of sequences ("ragged").
    """

    form: str = "none"
    slots: Operand | None = None
    sequences: Operand | None = None
    positions: Operand | None = None
    wrap_negative: bool = False
    search_steps: int = 0

    def constants(self) -> dict[str, Constant]:
        """The constexpr parameters of `templates.places`, beside the page size."""
        return {
            "ADDRESSING": self.form,
            **constants_of(self, "wrap_negative", "search_steps"),
            "ADDRESS_STRIDES": first_strides(self.slots, self.sequences, self.positions),
        }

    def pointers(self) -> dict[str, Operand | None]:
        return {
            **operands_of(self, "slots", "sequences", "positions"),
        }

    def counts(self) -> dict[str, str | None]:
        """Sizes of the table, known at the launch; None where there is none."""
        kind = "i32" if self.sequences else None
        return dict.fromkeys(("num_sequences", "lookup_columns", "lookup_stride"), kind)
