"""How a projection's weights are stored as codes: static data of a problem, without torch."""

from __future__ import annotations

from dataclasses import dataclass

# Where element j of a word of eight nibbles lies in AWQ's words.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Codes of 4 bits in a word.
NIBBLES = {"u8": 2, "i32": 8}


@dataclass(frozen=True)
class XScale:
    """Scales of fp8 activations: a dtype, strides (token, block), and the columns of a block."""

    dtype: str
    strides: tuple[int, int]
    block: int


@dataclass(frozen=True)
class Quantization:
    """weight_format "int8", "fp8", "int4_k" or "int4_n"; w = (code - zero) * scale.

    word_dtype: of the stored tensors. block: rows and columns that share a scale. scale_strides and
    zero_strides: (row, column) of q, k and v, in elements of their tensors; None where there is no
    v. zero_dtype None: the zero is zero_point, else zero_point and the tensor's value together.
    packed_zeros: a zero word holds those of eight rows. order: of the nibbles in a word.
    x_dtype: of the activations; x_scale where they are codes too. differs: what q, k and v do not
    share, for want of which no kernel makes all three.
    """

    weight_format: str
    word_dtype: str
    block: tuple[int, int]
    scale_dtype: str
    scale_strides: tuple[tuple[int, int] | None, ...]
    zero_dtype: str | None = None
    zero_strides: tuple[tuple[int, int] | None, ...] = (None, None, None)
    packed_zeros: bool = False
    zero_point: int = 0
    order: tuple[int, ...] = ()
    x_dtype: str = "bf16"
    x_scale: XScale | None = None
    differs: str = ""

    @property
    def is_int4(self) -> bool:
        return self.weight_format.startswith("int4")

    @property
    def packed_rows(self) -> bool:
        return self.weight_format == "int4_n"

    @property
    def per_word(self) -> int:
        """Codes in a word."""
        return NIBBLES[self.word_dtype] if self.is_int4 else 1

    @property
    def code_bytes(self) -> float:
        return 0.5 if self.is_int4 else 1.0

    @property
    def coded_x(self) -> bool:
        return self.x_dtype == "fp8e4nv"

    @property
    def has_zeros(self) -> bool:
        """Whether anything but `code_offset` is subtracted from a code."""
        return self.zero_dtype is not None or self.zero_point != self.code_offset

    @property
    def code_offset(self) -> int:
        """The part of the zero that codes lose while they are made, exactly in any 16-bit type."""
        if not self.is_int4:
            return 0
        if self.zero_dtype is None and 0 <= self.zero_point <= 15:
            return self.zero_point
        return 8

    def scales_whole_rows(self, hidden: int) -> bool:
        """Whether a row has one scale, and a token too."""
        return self.block[1] >= hidden and (self.x_scale is None or self.x_scale.block >= hidden)
