"""How weights are stored as codes: the table of formats, for all floors, and what is static about
the codes of a problem; without torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant

# Where element j of a word of eight nibbles lies in AWQ's words.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_COUNTED_UP = (tuple(range(8)), (0, 1))
# The same where each byte has its first nibble on top.
_HIGH_FIRST = (1, 0, 3, 2, 5, 4, 7, 6)
#: 32-bit words of 128 bytes, which dot products ask for at a time.
DOT_LINE = 32
# The largest code of four bits.
_MOST_NIBBLE = 15
# Groups of columns in a step whose sums are scaled apart.
_GROUPS = (1, 2, 4)


#: What the codes of formats stand for that have a table of 16 numbers, exact in fp32: those of
#: bitsandbytes.
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
# What kernels multiply the numbers of a table by before they round them to bfloat16, and to
# float16, so that they lose less: half as much of nf4's, nothing of fp4's, which are 192nds.
_FACTORS = {"nf4": (1.43701171875, 1.6776885986328125), "fp4": (192.0, 192.0)}


@dataclass(frozen=True)
class WeightFormat:
    """How a weight [..., N, K] is stored: w = (number of the code - zero) * scale, or, with
    added_zeros, w = (number of the code - zero_point) * scale + zero.

    stored: Triton's names of the dtypes that a stored element may have. bits: of a code.
    packed_axis: the axis, -1 (K) or -2 (N), along which codes share an element; None: a code is an
    element. number: what a code stands for, "" itself, "e2m1" (`ops.formats.fp4`) or a name in
    TABLES. order: which nibble of a byte each of its two codes is, where checkpoints have no other.

    linears: whether the linears of dense layers take it. zeros: whether these may have zero points.
    scales: the types that a scale of linears may have where it is not just any float.
    expert_scales: the types that a scale of experts may have ("u8": e8m0); empty: experts do not
    take it. expert_zero: the zero of all their codes. expert_block: the rows and columns that share
    a scale there, where the format fixes them. expert_kernel: whether
    `codegen.templates.expert_weights` decodes it; without, references compute such calls.
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
        """Codes in a byte."""
        return 8 // self.bits


_NIBBLES_OF_ROWS: dict[str, Any] = {"bits": 4, "packed_axis": -1}
_EXPERTS: dict[str, Any] = {"expert_kernel": True, **_NIBBLES_OF_ROWS}
_E2M1: dict[str, Any] = {"number": "e2m1", "linears": True, **_EXPERTS}
_TABLE: dict[str, Any] = {"order": (1, 0), "linears": True, **_NIBBLES_OF_ROWS}
#: Every format by its name in `weight_format`; "dense" has none. A format is added here: what ops
#: check, compute, sample and recognise follows.
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


#: Twice the numbers of E2M1's 16 codes, as bytes, four in a signed word.
E2M1_BYTES = struct.unpack(
    "<4i", struct.pack("<16b", *(0, 1, 2, 3, 4, 6, 8, 12), *(0, -1, -2, -3, -4, -6, -8, -12))
)


def table_words(name: str) -> tuple[int | float, ...]:
    """A table as kernels look it up: the low bytes of its 16 numbers in bfloat16, then their high
    bytes, four in a signed word; the same in float16; then the factors by which bfloat16 and
    float16 are too small."""
    made: list[int | float] = []
    for bits, factor in zip((_bfloat16_bits, _float16_bits), _FACTORS[name], strict=True):
        codes = [bits(factor * number) for number in TABLES[name]]
        for shift in (0, 8):
            made += struct.unpack("<4i", bytes((code >> shift) & 0xFF for code in codes))
    return (*made, *(1 / factor for factor in _FACTORS[name]))


def _bfloat16_bits(number: float) -> int:
    """The bits of a finite number, rounded to nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _float16_bits(number: float) -> int:
    (bits,) = struct.unpack("<H", struct.pack("<e", number))
    return bits


def high_first(per_word: int) -> tuple[int, ...]:
    """The order of nibbles in a word of bytes whose first nibble is on top."""
    return _HIGH_FIRST[:per_word]


def linear_formats() -> tuple[str, ...]:
    """The names of the formats that linears of dense layers take."""
    return ("dense", *(name for name, form in WEIGHT_FORMATS.items() if form.linears))


def expert_formats() -> tuple[str, ...]:
    """The names of the formats that experts take."""
    return ("dense", *(name for name, form in WEIGHT_FORMATS.items() if form.expert_scales))


def scales_are_exact(form: WeightFormat, scale: str, columns: int) -> bool:
    """Whether numbers times scales are exact in 16 bits, and words of eight have one scale: E2M1 by
    e4m3, 2 + 4 significant bits. columns: that share a scale."""
    exact = form.number == "e2m1" and scale == "fp8e4nv"
    return exact and columns % 16 == 0 and 128 % columns == 0


@dataclass(frozen=True)
class Quantization:
    """weight_format: one of `linear_formats`; w = (code - zero) * scale.

    per_word: codes in a stored word. block: rows and columns that share a scale. scales, zeros: of
    each weight (q, k and v; or gate and up), strides (row, column), 0 along an axis of one; None
    where there is no such weight. No zeros: the zero is zero_point, else zero_point and the
    tensor's value together (of added_zeros, the tensor's is added behind the scale). packed_zeros:
    a zero word holds those of eight rows. order: of the nibbles in a word.
    x_scale: where x has codes too, strides (token, block), of x_block columns each. differs: what
    the weights do not share, for want of which no kernel makes all of them.
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
        """Whether codes stand for the numbers of a table."""
        return self.format.number in TABLES

    @property
    def scales_numbers(self) -> bool:
        """Whether kernels multiply numbers by their scales in registers, and so know no groups."""
        scale = self.scales[0]
        assert scale is not None
        exact = scales_are_exact(self.format, scale.dtype, self.block[1])
        return exact and self.per_word == 8

    @property
    def staged_bytes(self) -> float:
        """Bytes that a code takes in shared memory, with its share of a scale where kernels load
        scales there too."""
        return self.code_bytes + (1 / self.block[1] if self.scales_numbers else 0)

    @property
    def joins_neighbours(self) -> bool:
        """Whether kernels decode neighbours of a word of eight codes together: else those that are
        four apart."""
        return self.order == AWQ_ORDER or (self.has_table and self.per_word == 8)

    @property
    def code_bytes(self) -> float:
        return self.format.bits / 8

    @property
    def has_zero_tensors(self) -> bool:
        return any(self.zeros)

    @property
    def code_offset(self) -> int:
        """The part of the zero that codes lose while they are made, exactly in any 16-bit type:
        bfloat16 has all integers from -256 to 256."""
        whole = self.format.packed_axis is None
        subtracted = self.has_zero_tensors and not self.format.added_zeros
        if not subtracted and 0 <= self.zero_point <= (128 if whole else _MOST_NIBBLE):
            return self.zero_point
        return 0 if whole else 8

    @property
    def known_order(self) -> bool:
        """Whether kernels have the order of the nibbles in a word."""
        if self.order == _HIGH_FIRST:
            return self.has_table
        return self.format.packed_axis is None or self.order in (
            (),
            *_COUNTED_UP,
            AWQ_ORDER,
            (1, 0),
        )

    def block_constants(self, columns: int, block_k: int) -> dict[str, Constant]:
        """What kernels that read words of codes have in common. columns: of the weight; block_k:
        of a step."""
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
            # Of a scale for all columns also those that the last step masks.
            "SCALE_COLUMNS": max(columns, block_k) if whole else self.block[1],
            "ZERO_OFFSET": self.zero_point - self.code_offset,
        }

    @property
    def dots_integers(self) -> bool:
        """Whether kernels of dot products multiply codes as integers."""
        return not self.has_table and self.weight_format != "fp8"

    @property
    def per_int32(self) -> int:
        """Codes in a word of 32 bits."""
        return 32 // self.format.bits

    @property
    def dot_run(self) -> int:
        """Words that share a sum of dot products: 16 bytes, or less where a scale is for less."""
        return 2 if self.format.bits == 4 and self.block[1] == 16 else 4

    def dot_obstacle(self, columns: int) -> str | None:
        """Why no dot product takes rows of `columns` codes; None where one does."""
        per = self.per_int32
        if columns % per:
            return f"{columns} columns are no whole words"
        if self.block[1] < columns and self.block[1] % (self.dot_run * per):
            return f"scales of {self.block[1]} columns"
        if self.x_scale is not None:
            return "x has codes too"
        if self.packed_rows:
            return "a word has the codes of several rows"
        if per == 8 and self.per_word != 8:
            return "bytes that are no words"
        if self.order and self.order not in (*_COUNTED_UP, AWQ_ORDER, (1, 0), _HIGH_FIRST):
            return f"nibbles in the order {list(self.order)}"
        if per == 8 and not 0 <= self.zero_point <= _MOST_NIBBLE:
            # 32 numbers of at most 15 by 22 bits are summed in 32.
            return f"zeros of {self.zero_point}, by which sums of integers overflow"
        return None

    def dot_constants(self, columns: int, stored: str) -> dict[str, Constant]:
        """The constants that kernels of dot products have in common. columns: of the weight;
        stored: Triton's name of its dtype."""
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
        """(row, column) of the index-th weight's scales, then of its zeros; 0 for none."""
        found = (self.scales[index], self.zeros[index])
        return tuple(stride for one in found for stride in (one.strides if one else (0, 0)))

    def groups_in(self, columns: int, block_k: int) -> int:
        """Scales that a step of block_k of the weight's columns meets in a row; 0 where it does not
        meet whole ones, or too many."""
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
        # Groups of 16 in bytes are multiplied two at a time (`add_scaled_groups`).
        pairs = self.per_word != 2 or block_k >= 32
        return groups > 0 and block_k // groups >= least and pairs

    def longest_step(self, columns: int) -> int:
        """The longest step, up to 128, that meets whole scales or parts of one."""
        wide = self.block[1]
        return 128 if wide >= columns or 128 % wide == 0 else wide & -wide

    def scales_whole_rows(self, hidden: int) -> bool:
        """Whether a row has one scale, and a token too."""
        return self.block[1] >= hidden and (self.x_scale is None or self.x_block >= hidden)
