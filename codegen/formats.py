"""Formats of quantised weights, and the static facts about the quantised weights of a problem.

Every layer of the package uses the table WEIGHT_FORMATS. This module does not need torch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant

# For each element j of a word of eight codes, the nibble that holds it in AWQ's order.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_COUNTED_UP = (tuple(range(8)), (0, 1))
# For each element j of a word of eight codes, the nibble that holds it if the high nibble of each
# byte comes first.
_HIGH_FIRST = (1, 0, 3, 2, 5, 4, 7, 6)
#: How many 32-bit words there are in the 128 bytes that kernels of dot products load at a time.
DOT_LINE = 32
# The largest 4-bit code.
_MOST_NIBBLE = 15
# The numbers of groups of columns that a step may cover. Kernels scale the sum over each group
# separately.
_GROUPS = (1, 2, 4)


#: Maps each of bitsandbytes' formats to the table of the numbers that its 16 codes stand for. fp32
#: represents these numbers exactly.
TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0,
        0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        0.0, -0.0052083334885537624, -0.6666666865348816, -1.0,
        -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
}  # fmt: skip
# Maps a format to (the factor for bfloat16, the factor for float16). Kernels multiply the numbers
# of a table by the factor before they round the numbers. The factors of nf4 halve the rounding
# error. The factors of fp4 make it zero, because the numbers of fp4 are multiples of 1/192.
_FACTORS = {"nf4": (1.43701171875, 1.6776885986328125), "fp4": (192.0, 192.0)}


@dataclass(frozen=True)
class WeightFormat:
    """The format of a quantised weight [..., N, K].

    A weight is (number - zero) * scale, where `number` is the number that the code stands for. With
    added_zeros, a weight is (number - zero_point) * scale + zero.

    Attributes:
        stored: The possible dtypes of a stored element, as Triton names.
        bits: The number of bits of a code.
        packed_axis: The axis, -1 (K) or -2 (N), along which several codes share a stored element;
            None if each element is one code.
        number: The kind of number that a code stands for: "" for the code itself, "e2m1"
            (`ops.formats.fp4`), or a name in TABLES.
        order: Which nibble of a byte holds the first code and which holds the second, unless a
            checkpoint has another order.
        linears: Whether linears of dense layers may have this format.
        zeros: Whether linears may have zero points.
        added_zeros: Whether zeros are added after scaling.
        scales: The possible dtypes of the scales of linears ("u8" means e8m0). If it is empty, the
            scales may have any float dtype.
        expert_scales: The possible dtypes of the scales of experts. If this is empty, experts
            cannot have this format.
        expert_zero: The zero that all codes of experts have.
        expert_block: How many rows and columns of an expert's weight share a scale; None if the
            format does not fix this.
        expert_kernel: Whether `codegen.templates.expert_weights` decodes the format. If not, calls
            with such experts run the op's reference.
    """

    stored: tuple[str, ...]
    bits: int = 8
    packed_axis: int | None = None
    number: str = ""
    order: tuple[int, ...] = (0, 1)
    linears: bool = False
    zeros: bool = False
    added_zeros: bool = False
    scales: tuple[str, ...] = ()
    expert_scales: tuple[str, ...] = ()
    expert_zero: int = 0
    expert_block: tuple[int, int] | None = None
    expert_kernel: bool = False

    @property
    def per_byte(self) -> int:
        """The number of codes in a byte."""
        return 8 // self.bits


_NIBBLES_OF_ROWS: dict[str, Any] = {"bits": 4, "packed_axis": -1}
_EXPERTS: dict[str, Any] = {"expert_kernel": True, **_NIBBLES_OF_ROWS}
_E2M1: dict[str, Any] = {"number": "e2m1", "linears": True, **_EXPERTS}
_TABLE: dict[str, Any] = {"order": (1, 0), "linears": True, **_NIBBLES_OF_ROWS}
#: All formats, by their names in `weight_format`. The format "dense" is not in this table. A new
#: format needs only a new row, because the checks, references and samples of ops and the patterns
#: read this table.
WEIGHT_FORMATS = {
    "int8": WeightFormat(("i8", "u8"), linears=True, zeros=True),
    "fp8": WeightFormat(
        ("fp8e4nv",),
        linears=True,
        scales=("fp32", "bf16", "fp16", "fp64", "u8"),
        expert_scales=("fp32", "bf16", "u8"),
        expert_kernel=True,
    ),
    "int4_k": WeightFormat(("u8", "i32"), **_NIBBLES_OF_ROWS, linears=True, zeros=True),
    "int4_k_offset": WeightFormat(
        ("u8", "i32"), **_NIBBLES_OF_ROWS, linears=True, zeros=True, added_zeros=True
    ),
    "int4_n": WeightFormat(("u8", "i32"), bits=4, packed_axis=-2, linears=True, zeros=True),
    "int4": WeightFormat(
        ("u8",), expert_zero=8, expert_scales=("fp32", "bf16", "fp16"), **_EXPERTS
    ),
    "nvfp4": WeightFormat(
        ("u8",),
        scales=("fp8e4nv", "fp32", "bf16", "fp16"),
        expert_scales=("fp8e4nv",),
        expert_block=(1, 16),
        **_E2M1,
    ),
    "mxfp4": WeightFormat(
        ("u8",), scales=("u8",), expert_scales=("u8",), expert_block=(1, 32), **_E2M1
    ),
    **{name: WeightFormat(("u8",), number=name, **_TABLE) for name in TABLES},
}


#: The numbers of the 16 codes of E2M1, multiplied by two, as bytes. Each signed word holds four of
#: them.
E2M1_BYTES = struct.unpack(
    "<4i", struct.pack("<16b", *(0, 1, 2, 3, 4, 6, 8, 12), *(0, -1, -2, -3, -4, -6, -8, -12))
)


def table_words(name: str) -> tuple[int | float, ...]:
    """Returns the table of a format in the form in which kernels read it.

    The result begins with words, each of which holds four bytes and is signed. These words have
    first the low bytes and then the high bytes of the 16 numbers in bfloat16. The low bytes and the
    high bytes of the numbers in float16 follow. After the words come two factors, which restore the
    original numbers from bfloat16 and from float16.
    """
    made: list[int | float] = []
    for bits, factor in zip((_bfloat16_bits, _float16_bits), _FACTORS[name], strict=True):
        made += _words([bits(factor * number) for number in TABLES[name]])
    return (*made, *(1 / factor for factor in _FACTORS[name]))


def bfloat16_table(name: str) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """Returns the numbers of a table as pairs of bfloat16 numbers, whose sums have about 16
    significant bits: eight words with the rounded numbers, eight words with the rounding errors,
    and the factor that restores the original numbers. Words have the same form as in the result of
    `table_words`."""
    factor = _FACTORS[name][0]
    codes = [_bfloat16_bits(factor * number) for number in TABLES[name]]
    rounded = [struct.unpack("<f", struct.pack("<I", code << 16))[0] for code in codes]
    rests = [factor * number - one for number, one in zip(TABLES[name], rounded, strict=True)]
    return _words(codes), _words([_bfloat16_bits(one) for one in rests]), 1 / factor


def _words(codes: Sequence[int]) -> tuple[int, ...]:
    """Returns the low bytes and then the high bytes of 16-bit codes, in signed words of four."""
    return tuple(
        word
        for shift in (0, 8)
        for word in struct.unpack("<4i", bytes((code >> shift) & 0xFF for code in codes))
    )


def _bfloat16_bits(number: float) -> int:
    """Returns the bits of a finite number in bfloat16, rounded to nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _float16_bits(number: float) -> int:
    (bits,) = struct.unpack("<H", struct.pack("<e", number))
    return bits


def high_first(per_word: int) -> tuple[int, ...]:
    """Returns the order of `per_word` nibbles if the high nibble of each byte comes first."""
    return _HIGH_FIRST[:per_word]


def linear_formats() -> tuple[str, ...]:
    """Returns the names of the formats that linears of dense layers may have."""
    return ("dense", *(name for name, form in WEIGHT_FORMATS.items() if form.linears))


def expert_formats() -> tuple[str, ...]:
    """Returns the names of the formats that experts may have."""
    return ("dense", *(name for name, form in WEIGHT_FORMATS.items() if form.expert_scales))


def scales_are_exact(form: WeightFormat, scale: str, columns: int) -> bool:
    """Whether 16 bits represent each number times its scale exactly, and the eight codes of a word
    share one scale. Products of E2M1 numbers and e4m3 scales are exact, because they have at most
    six significant bits. columns: the number of columns that share a scale."""
    exact = form.number == "e2m1" and scale == "fp8e4nv"
    return exact and columns % 16 == 0 and 128 % columns == 0


@dataclass(frozen=True)
class Quantization:
    """The static facts about the quantised weights of a call. A weight is (number - zero) * scale,
    where `number` is the number that the code stands for.

    Attributes:
        weight_format: One of `linear_formats`.
        block: How many rows and columns share a scale.
        scales, zeros: The operands of the scales and of the zeros of each weight (q, k and v; or
            gate and up); None for a weight that does not exist. The strides of an operand are (row,
            column), and 0 along an axis that has one element. The zero of a code is zero_point plus
            the value in the tensor of zeros, or zero_point alone if there is no such tensor. With
            added_zeros, the value in the tensor is added after scaling instead.
        per_word: The number of codes in a stored word.
        packed_zeros: Whether a stored word holds the zeros of eight rows.
        zero_point: The constant part of the zero.
        order: Which nibble of a word holds each element; empty if nibble j holds element j.
        x_scale: The operand of the scales of x, with strides (token, block); None if x is not
            quantised.
        x_block: The number of columns of x that share a scale.
        differs: A sentence about a property in which the weights differ, so that no kernel can
            multiply all weights together; "" if there is no such property.
    """

    weight_format: str
    block: tuple[int, int]
    scales: tuple[Operand | None, ...]
    zeros: tuple[Operand | None, ...] = (None, None, None)
    per_word: int = 1
    packed_zeros: bool = False
    zero_point: int = 0
    order: tuple[int, ...] = ()
    x_scale: Operand | None = None
    x_block: int = 0
    differs: str = ""

    @property
    def format(self) -> WeightFormat:
        return WEIGHT_FORMATS[self.weight_format]

    @property
    def packed_rows(self) -> bool:
        return self.format.packed_axis == -2

    @property
    def has_table(self) -> bool:
        """Whether the format has a table of the numbers that the codes stand for."""
        return self.format.number in TABLES

    @property
    def scales_numbers(self) -> bool:
        """Whether kernels multiply the decoded numbers by their scales before the product, in
        registers. If not, kernels scale the sums over groups of columns."""
        scale = self.scales[0]
        assert scale is not None
        exact = scales_are_exact(self.format, scale.dtype, self.block[1])
        return exact and self.per_word == 8

    @property
    def staged_bytes(self) -> float:
        """The number of bytes that a code takes in shared memory. It includes a part of a scale if
        kernels also load scales into shared memory."""
        return self.code_bytes + (1 / self.block[1] if self.scales_numbers else 0)

    @property
    def joins_neighbours(self) -> bool:
        """Whether kernels decode two neighbouring codes of a word of eight codes together. If not,
        kernels decode two codes together whose places in the word differ by four."""
        return self.order == AWQ_ORDER or (self.has_table and self.per_word == 8)

    @property
    def code_bytes(self) -> float:
        return self.format.bits / 8

    @property
    def has_zero_tensors(self) -> bool:
        return any(self.zeros)

    @property
    def code_offset(self) -> int:
        """The part of the zero that kernels subtract while they convert codes. The difference is
        exact in any 16-bit type: even bfloat16 represents all integers from -256 to 256."""
        whole = self.format.packed_axis is None
        subtracted = self.has_zero_tensors and not self.format.added_zeros
        if not subtracted and 0 <= self.zero_point <= (128 if whole else _MOST_NIBBLE):
            return self.zero_point
        return 0 if whole else 8

    @property
    def known_order(self) -> bool:
        """Whether kernels support this order of the nibbles in a word."""
        if self.order == _HIGH_FIRST:
            return self.has_table
        return self.format.packed_axis is None or self.order in (
            (),
            *_COUNTED_UP,
            AWQ_ORDER,
            (1, 0),
        )

    def block_constants(self, columns: int, block_k: int) -> dict[str, Constant]:
        """Returns the constants of all kernels that read words of codes.

        columns: the number of columns of the weight. block_k: the number of columns of a step.
        """
        whole = self.block[1] >= columns
        number: Constant = table_words(self.format.number) if self.has_table else self.format.number
        return {
            **({"NUMBER": number} if number else {}),
            **({"SCALED": True} if self.scales_numbers else {}),
            **({"ADDED_ZEROS": True} if self.format.added_zeros else {}),
            "PER": self.per_word,
            "PACKED_ROWS": self.packed_rows,
            "PACKED_ZEROS": self.packed_zeros,
            "CODE_OFFSET": self.code_offset,
            "INTERLEAVED_NIBBLES": self.joins_neighbours,
            "REVERSED": self.order in ((1, 0), _HIGH_FIRST),
            "SCALE_ROWS": self.block[0],
            # A scale of all columns also covers the columns that the last step masks.
            "SCALE_COLUMNS": max(columns, block_k) if whole else self.block[1],
            "ZERO_OFFSET": self.zero_point - self.code_offset,
        }

    @property
    def dots_integers(self) -> bool:
        """Whether kernels of dot products multiply the codes as integers."""
        return not self.has_table and self.weight_format != "fp8"

    @property
    def per_int32(self) -> int:
        """The number of codes in a 32-bit word."""
        return 32 // self.format.bits

    @property
    def dot_run(self) -> int:
        """The number of words whose products are added to one sum before the sum is scaled. These
        words take 16 bytes, or 8 bytes if a scale covers fewer codes."""
        return 2 if self.format.bits == 4 and self.block[1] == 16 else 4

    def dot_obstacle(self, columns: int) -> str | None:
        """Returns why no kernel of dot products can read rows of `columns` codes; None if a kernel
        can."""
        per = self.per_int32
        if columns % per:
            return f"{columns} columns do not fill whole words"
        if self.block[1] < columns and self.block[1] % (self.dot_run * per):
            return f"the number of columns that share a scale is {self.block[1]}"
        if self.x_scale is not None and self.x_block < columns and self.x_block % per:
            return f"the number of columns of x that share a scale is {self.x_block}"
        if self.packed_rows:
            return "a word has the codes of several rows"
        if per == 8 and self.per_word != 8:
            return "the codes are stored in bytes and not in 32-bit words"
        if self.order and self.order not in (*_COUNTED_UP, AWQ_ORDER, (1, 0), _HIGH_FIRST):
            return f"the nibbles are in the order {list(self.order)}"
        if per == 8 and not 0 <= self.zero_point <= _MOST_NIBBLE:
            # Kernels add 32 products of a code and a 22-bit integer. An int32 can hold this sum if
            # all codes are at most 15.
            return f"sums of integers would overflow, because the zero point is {self.zero_point}"
        return None

    def dot_constants(self, columns: int, stored: str) -> dict[str, Constant]:
        """Returns the constants that all kernels of dot products need.

        columns: the number of columns of the weight. stored: the Triton name of the weight's dtype.
        """
        integers, twice = self.dots_integers, self.format.number == "e2m1"
        return {
            **({"NUMBER": table_words(self.format.number)} if self.has_table else {}),
            **({"BYTES": E2M1_BYTES} if twice else {}),
            **({"SIGNED": True} if twice or stored == "i8" else {}),
            **({"FLOATS": True} if not integers else {}),
            **({"ADDED_ZEROS": True} if self.format.added_zeros else {}),
            **({"ZERO": self.zero_point} if integers and self.zero_point else {}),
            "PER": self.per_int32,
            "RUN": self.dot_run,
            "LINE": DOT_LINE,
            "PACKED_ZEROS": self.packed_zeros,
            "INTERLEAVED_NIBBLES": self.order == AWQ_ORDER,
            "REVERSED": self.order in ((1, 0), _HIGH_FIRST),
            "SCALE_ROWS": self.block[0],
            "SCALE_COLUMNS": self.block[1] if self.block[1] < columns else columns,
        }

    def block_strides(self, index: int) -> tuple[int, ...]:
        """Returns four strides for the weight with this index: the strides (row, column) of its
        scales, and then the strides (row, column) of its zeros. Strides of scales or zeros that do
        not exist are 0."""
        found = (self.scales[index], self.zeros[index])
        return tuple(stride for one in found for stride in (one.strides if one else (0, 0)))

    def groups_in(self, columns: int, block_k: int) -> int:
        """Returns how many scales of a row apply to a step of block_k columns. Returns 0 if kernels
        cannot use such steps: for example, if a step ends in the middle of the columns of a scale,
        or if a step has too many scales."""
        if self.x_scale is not None and self.x_block < columns and self.x_block % block_k:
            return 0
        wide = self.block[1]
        if self.scales_numbers:
            return 1 if block_k % wide == 0 else 0
        if wide >= columns or wide % block_k == 0:
            return 1
        return block_k // wide if block_k % wide == 0 and block_k // wide in _GROUPS else 0

    def step_fits(self, columns: int, block_k: int) -> bool:
        """Whether a tensor core can multiply the weight in steps of block_k columns."""
        groups = self.groups_in(columns, block_k)
        least = 32 if self.per_word == 8 and not self.packed_rows else 16
        # If a byte holds two codes, kernels multiply groups of 16 columns in pairs
        # (`add_scaled_groups`).
        pairs = self.per_word != 2 or block_k >= 32
        return groups > 0 and block_k // groups >= least and pairs

    def longest_step(self, columns: int) -> int:
        """Returns the longest step, at most 128 columns, that covers whole scales or a part of a
        single scale."""
        wide = self.block[1]
        return 128 if wide >= columns or 128 % wide == 0 else wide & -wide

    def scales_whole_rows(self, hidden: int) -> bool:
        """Whether each row of the weight has one scale and, if x is quantised, each token has one
        scale."""
        return self.block[1] >= hidden and (self.x_scale is None or self.x_block >= hidden)
