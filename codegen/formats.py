"""How a projection's weights are stored as codes: static data of a problem, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.operand import Operand

# Where element j of a word of eight nibbles lies in AWQ's words.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Quantization:
    """weight_format "int8", "fp8", "int4_k" or "int4_n"; w = (code - zero) * scale.

    per_word: codes in a stored word. block: rows and columns that share a scale. scales, zeros: of
    q, k and v, strides (row, column), 0 along an axis of one; None where there is no v. No zeros:
    the zero is zero_point, else zero_point and the tensor's value together. packed_zeros: a zero
    word holds those of eight rows. order: of the nibbles in a word.
    x_scale: where x has codes too, strides (token, block), of x_block columns each. differs: what
    q, k and v do not share, for want of which no kernel makes all three.
    """

    weight_format: str
    block: tuple[int, int]
    scales: tuple[Operand, Operand, Operand | None]
    zeros: tuple[Operand | None, ...] = (None, None, None)
    per_word: int = 1
    packed_zeros: bool = False
    zero_point: int = 0
    order: tuple[int, ...] = ()
    x_scale: Operand | None = None
    x_block: int = 0
    differs: str = ""

    @property
    def is_int4(self) -> bool:
        return self.weight_format.startswith("int4")

    @property
    def packed_rows(self) -> bool:
        return self.weight_format == "int4_n"

    @property
    def code_bytes(self) -> float:
        return 0.5 if self.is_int4 else 1.0

    @property
    def has_zero_tensors(self) -> bool:
        return any(self.zeros)

    @property
    def code_offset(self) -> int:
        """The part of the zero that codes lose while they are made, exactly in any 16-bit type."""
        if not self.is_int4:
            return 0
        if not self.has_zero_tensors and 0 <= self.zero_point <= 15:
            return self.zero_point
        return 8

    def scales_whole_rows(self, hidden: int) -> bool:
        """Whether a row has one scale, and a token too."""
        return self.block[1] >= hidden and (self.x_scale is None or self.x_block >= hidden)
