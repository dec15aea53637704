"""Formats of weights that are stored as codes, and the static facts about the codes of a problem.

Every layer of the package uses the table WEIGHT_FORMATS. The module does not need torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant

# The nibble that holds element j of a word of eight, in AWQ's order.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_COUNTED_UP = (tuple(range(8)), (0, 1))
# The nibble that holds element j of a word whose bytes have their first nibble on top.
_HIGH_FIRST = (1, 0, 3, 2, 5, 4, 7, 6)
#: 32-bit words in the 128 bytes that dot products load at a time.
DOT_LINE = 32
# The largest code of four bits.
_MOST_NIBBLE = 15
# Possible numbers of groups of columns in a step. Kernels scale the sum over each group separately.
_GROUPS = (1, 2, 4)


#: The numbers that the 16 codes of a format stand for, exact in fp32, for each format that has a
#: table (bitsandbytes).
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
# Factors (for bfloat16, for float16) by which kernels multiply the numbers of a table before they
# round them. This halves the rounding error of nf4, and makes fp4 exact: its numbers are multiples
# of 1/192.
_FACTORS = {"nf4": (1.43701171875, 1.6776885986328125), "fp4": (192.0, 192.0)}


@dataclass(frozen=True)
class WeightFormat:
    """The format of a stored weight [..., N, K]: w = (number of the code - zero) * scale, or, with
    added_zeros, w = (number of the code - zero_point) * scale + zero.

    Attributes:
        stored: possible dtypes of a stored element, in Triton's names.
        bits: bits of a code.
        packed_axis: the axis, -1 (K) or -2 (N), along which codes share an element; None if each
            element is one code.
        number: the number of a code: "" for the code itself, "e2m1" (`ops.formats.fp4`), or a name
            in TABLES.
        order: the nibble of a byte that holds each of its two codes, unless a checkpoint has
            another order.
        linears: whether the linears of dense layers take the format.
        zeros: whether linears may have zero points.
        added_zeros: whether zeros are added after scaling.
        scales: possible dtypes of a scale of linears; empty for any float.
        expert_scales: possible dtypes of a scale of experts ("u8" means e8m0); empty if experts do
            not take the format.
        expert_zero: the zero that all codes of experts have.
        expert_block: rows and columns of experts that share a scale; None if the format does not
            fix them.
        expert_kernel: whether `codegen.templates.expert_weights` decodes the format; if not,
            references compute calls with such experts.
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
        """Number of codes in a byte."""
        return 8 // self.bits


_NIBBLES_OF_ROWS: dict[str, Any] = {"bits": 4, "packed_axis": -1}
_EXPERTS: dict[str, Any] = {"expert_kernel": True, **_NIBBLES_OF_ROWS}
_E2M1: dict[str, Any] = {"number": "e2m1", "linears": True, **_EXPERTS}
_TABLE: dict[str, Any] = {"order": (1, 0), "linears": True, **_NIBBLES_OF_ROWS}
#: Every format by its name in `weight_format`; "dense" is not in the table. To add a format, add a
#: row: the checks, references and samples of ops, and the patterns, follow.
WEIGHT_FORMATS = {
    "int8": WeightFormat(("i8", "u8"), linears=True, zeros=True),
    "fp8": WeightFormat(
        ("fp8e4nv",), linears=True, expert_scales=("fp32", "bf16"), expert_kernel=True
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


#: The numbers of E2M1's 16 codes times two, as bytes, four in a signed word.
E2M1_BYTES = struct.unpack(
    "<4i", struct.pack("<16b", *(0, 1, 2, 3, 4, 6, 8, 12), *(0, -1, -2, -3, -4, -6, -8, -12))
)


def table_words(name: str) -> tuple[int | float, ...]:
    """Returns a table in the form in which kernels look it up.

    First come the low bytes of its 16 numbers in bfloat16, then their high bytes, four in a signed
    word; then the bytes of the numbers in float16; then the factors that restore the numbers of
    bfloat16 and of float16.
    """
    made: list[int | float] = []
    for bits, factor in zip((_bfloat16_bits, _float16_bits), _FACTORS[name], strict=True):
        codes = [bits(factor * number) for number in TABLES[name]]
        for shift in (0, 8):
            made += struct.unpack("<4i", bytes((code >> shift) & 0xFF for code in codes))
    return (*made, *(1 / factor for factor in _FACTORS[name]))


def _bfloat16_bits(number: float) -> int:
    """Returns the bfloat16 bits of a finite number, rounded to nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _float16_bits(number: float) -> int:
    (bits,) = struct.unpack("<H", struct.pack("<e", number))
    return bits


def high_first(per_word: int) -> tuple[int, ...]:
    """Returns the order of `per_word` nibbles in bytes whose first nibble is on top."""
    return _HIGH_FIRST[:per_word]


def linear_formats() -> tuple[str, ...]:
    """Returns the names of the formats that the linears of dense layers take."""
    return ("dense", *(name for name, form in WEIGHT_FORMATS.items() if form.linears))


def expert_formats() -> tuple[str, ...]:
    """Returns the names of the formats that experts take."""
    return ("dense", *(name for name, form in WEIGHT_FORMATS.items() if form.expert_scales))


def scales_are_exact(form: WeightFormat, scale: str, columns: int) -> bool:
    """Whether each number times its scale is exact in 16 bits and the codes of a word of eight
    share one scale. This holds for E2M1 with e4m3 scales: 2 + 4 significant bits. columns: the
    columns that share a scale."""
    exact = form.number == "e2m1" and scale == "fp8e4nv"
    return exact and columns % 16 == 0 and 128 % columns == 0


@dataclass(frozen=True)
class Quantization:
    """Static facts about the codes of a call's weights: w = (number of the code - zero) * scale.

    Attributes:
        weight_format: one of `linear_formats`.
        block: rows and columns that share a scale.
        scales, zeros: operands of each weight (q, k and v; or gate and up), with strides (row,
            column), 0 along an axis of one element; None if there is no such weight. The zero is
            zero_point plus the tensor's value, or zero_point without a tensor. With added_zeros,
            the tensor's value is added after scaling instead.
        per_word: codes in a stored word.
        packed_zeros: whether one stored word holds the zeros of eight rows.
        zero_point: the constant part of the zero.
        order: order of the nibbles in a word; empty if element j is in nibble j.
        x_scale: scales of x if x has codes too, with strides (token, block).
        x_block: columns of x that share a scale.
        differs: a property that the weights do not share, so that no kernel computes all of them;
            "" if there is none.
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
        """Whether the numbers of the codes come from a table."""
        return self.format.number in TABLES

    @property
    def scales_numbers(self) -> bool:
        """Whether kernels multiply numbers by their scales before the product, in registers. If
        not, they scale the sums over groups of columns."""
        scale = self.scales[0]
        assert scale is not None
        exact = scales_are_exact(self.format, scale.dtype, self.block[1])
        return exact and self.per_word == 8

    @property
    def staged_bytes(self) -> float:
        """Bytes that a code takes in shared memory, including its share of a scale if kernels also
        load scales there."""
        return self.code_bytes + (1 / self.block[1] if self.scales_numbers else 0)

    @property
    def joins_neighbours(self) -> bool:
        """Whether kernels decode neighbouring codes of a word of eight together. If not, they
        decode codes four apart together."""
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
        exact in any 16-bit type: bfloat16 has all integers from -256 to 256."""
        whole = self.format.packed_axis is None
        subtracted = self.has_zero_tensors and not self.format.added_zeros
        if not subtracted and 0 <= self.zero_point <= (128 if whole else _MOST_NIBBLE):
            return self.zero_point
        return 0 if whole else 8

    @property
    def known_order(self) -> bool:
        """Whether kernels support the order of the nibbles in a word."""
        if self.order == _HIGH_FIRST:
            return self.has_table
        return self.format.packed_axis is None or self.order in (
            (),
            *_COUNTED_UP,
            AWQ_ORDER,
            (1, 0),
        )

    def block_constants(self, columns: int, block_k: int) -> dict[str, Constant]:
        """Returns the constants that all kernels which read words of codes need. columns: columns
        of the weight. block_k: columns of a step."""
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
            # A scale for all columns also covers the columns that the last step masks.
            "SCALE_COLUMNS": max(columns, block_k) if whole else self.block[1],
            "ZERO_OFFSET": self.zero_point - self.code_offset,
        }

    @property
    def dots_integers(self) -> bool:
        """Whether kernels of dot products multiply codes as integers."""
        return not self.has_table and self.weight_format != "fp8"

    @property
    def per_int32(self) -> int:
        """Number of codes in a word of 32 bits."""
        return 32 // self.format.bits

    @property
    def dot_run(self) -> int:
        """Number of words that share a sum of dot products: 16 bytes, or 8 if a scale covers fewer
        codes."""
        return 2 if self.format.bits == 4 and self.block[1] == 16 else 4

    def dot_obstacle(self, columns: int) -> str | None:
        """Returns why no kernel of dot products takes rows of `columns` codes; None if one does."""
        per = self.per_int32
        if columns % per:
            return f"{columns} columns are no whole words"
        if self.block[1] < columns and self.block[1] % (self.dot_run * per):
            return f"scales of {self.block[1]} columns"
        if self.x_scale is not None and self.x_block < columns and self.x_block % per:
            return f"scales of {self.x_block} columns of x"
        if self.packed_rows:
            return "a word has the codes of several rows"
        if per == 8 and self.per_word != 8:
            return "bytes that are no words"
        if self.order and self.order not in (*_COUNTED_UP, AWQ_ORDER, (1, 0), _HIGH_FIRST):
            return f"nibbles in the order {list(self.order)}"
        if per == 8 and not 0 <= self.zero_point <= _MOST_NIBBLE:
            # An int32 sums 32 products of a code of at most 15 and an integer of 22 bits.
            return f"zeros of {self.zero_point}, by which sums of integers overflow"
        return None

    def dot_constants(self, columns: int, stored: str) -> dict[str, Constant]:
        """Returns the constants that all kernels of dot products need. columns: columns of the
        weight. stored: Triton's name of the weight's dtype."""
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
        """Returns the strides (row, column) of the index-th weight's scales, then of its zeros; 0
        for a weight without them."""
        found = (self.scales[index], self.zeros[index])
        return tuple(stride for one in found for stride in (one.strides if one else (0, 0)))

    def groups_in(self, columns: int, block_k: int) -> int:
        """Returns how many scales of a row apply to a step of block_k columns; 0 if kernels cannot
        take such a step, because it covers a part of a scale or too many scales."""
        if self.x_scale is not None and self.x_block < columns and self.x_block % block_k:
            return 0
        wide = self.block[1]
        if self.scales_numbers:
            return 1 if block_k % wide == 0 else 0
        if wide >= columns or wide % block_k == 0:
            return 1
        return block_k // wide if block_k % wide == 0 and block_k // wide in _GROUPS else 0

    def step_fits(self, columns: int, block_k: int) -> bool:
        """Whether a tensor core can take steps of block_k of the weight's columns."""
        groups = self.groups_in(columns, block_k)
        least = 32 if self.per_word == 8 and not self.packed_rows else 16
        # If a byte holds two codes, kernels multiply groups of 16 columns in pairs
        # (`add_scaled_groups`).
        pairs = self.per_word != 2 or block_k >= 32
        return groups > 0 and block_k // groups >= least and pairs

    def longest_step(self, columns: int) -> int:
        """Returns the longest step, up to 128 columns, that covers whole scales or a part of one
        scale."""
        wide = self.block[1]
        return 128 if wide >= columns or 128 % wide == 0 else wide & -wide

    def scales_whole_rows(self, hidden: int) -> bool:
        """Whether each row has one scale, and each token too if x has codes."""
        return self.block[1] >= hidden and (self.x_scale is None or self.x_block >= hidden)
