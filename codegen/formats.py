"""How weights are stored as codes: the table of formats, for all floors, and what is static about
the codes of a problem; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant

# Where element j of a word of eight nibbles lies in AWQ's words.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_COUNTED_UP = (tuple(range(8)), (0, 1))
# Groups of columns in a step whose sums are scaled apart.
_GROUPS = (1, 2, 4)


@dataclass(frozen=True)
class WeightFormat:
    """How a weight [..., N, K] is stored: w = (number of the code - zero) * scale.

    stored: Triton's names of the dtypes that a stored element may have. bits: of a code.
    packed_axis: the axis, -1 (K) or -2 (N), along which codes share an element; None: a code is an
    element. number: what a code stands for, "" itself or "e2m1" (`ops.formats.fp4`).

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
    linears: bool = False
    zeros: bool = False
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
#: Every format by its name in `weight_format`; "dense" has none. A format is added here: what ops
#: check, compute, sample and recognise follows.
WEIGHT_FORMATS = {
    "int8": WeightFormat(("i8", "u8"), linears=True, zeros=True),
    "fp8": WeightFormat(
        ("fp8e4nv",), linears=True, expert_scales=("fp32", "bf16"), expert_kernel=True
    ),
    "int4_k": WeightFormat(("u8", "i32"), **_NIBBLES_OF_ROWS, linears=True, zeros=True),
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
}


def linear_formats() -> tuple[str, ...]:
    """The names of the formats that linears of dense layers take."""
    return ("dense", *(name for name, form in WEIGHT_FORMATS.items() if form.linears))


def expert_formats() -> tuple[str, ...]:
    """The names of the formats that experts take."""
    return ("dense", *(name for name, form in WEIGHT_FORMATS.items() if form.expert_scales))


@dataclass(frozen=True)
class Quantization:
    """weight_format: one of `linear_formats`; w = (code - zero) * scale.

    per_word: codes in a stored word. block: rows and columns that share a scale. scales, zeros: of
    each weight (q, k and v; or gate and up), strides (row, column), 0 along an axis of one; None
    where there is no such weight. No zeros: the zero is zero_point, else zero_point and the
    tensor's value together. packed_zeros: a zero word holds those of eight rows. order: of the
    nibbles in a word.
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
        if not self.has_zero_tensors and 0 <= self.zero_point <= (128 if whole else 15):
            return self.zero_point
        return 0 if whole else 8

    @property
    def known_order(self) -> bool:
        """Whether kernels have the order of the nibbles in a word."""
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
        return {
            **self.number_constants(),
            "PER": self.per_word,
            "PACKED_ROWS": self.packed_rows,
            "PACKED_ZEROS": self.packed_zeros,
            "CODE_OFFSET": self.code_offset,
            "INTERLEAVED_NIBBLES": self.order == AWQ_ORDER,
            "REVERSED": self.order == (1, 0),
            "SCALE_ROWS": self.block[0],
            # Of a scale for all columns also those that the last step masks.
            "SCALE_COLUMNS": max(columns, block_k) if whole else self.block[1],
            "ZERO_OFFSET": self.zero_point - self.code_offset,
        }

    def number_constants(self) -> dict[str, Constant]:
        """What codes stand for, where it is not themselves."""
        return {"NUMBER": self.format.number} if self.format.number else {}

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
