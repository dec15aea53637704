"""The weight of a linear, as the arguments of an op describe it.

    w[n, k] = (code[n, k] - zero[n // bn, k // bk]) * scale[n // bn, k // bk] * factor

n counts the rows of one weight. In a weight of heads [H, D], row n is `h * D + d`.
`codegen.formats.WEIGHT_FORMATS` describes how each format is stored, and
`ops.formats.quantized_weight` describes how nibbles are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch

from tilewright.codegen.formats import TABLES, WEIGHT_FORMATS, WeightFormat, linear_formats
from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_choice,
    check_device,
    check_dtype,
    check_operand,
    check_scale_block,
    check_shape,
    check_tensor,
    holds,
    shape_text,
)
from tilewright.ops.formats import e8m0, fp4
from tilewright.ops.formats.quantized_weight import (
    expand_blocks,
    nibbles_per_word,
    unpack_nibbles,
    zeros_are_packed,
)
from tilewright.ops.groups import ArgumentGroup
from tilewright.ops.runtime.dtypes import torch_types

_ZERO_DTYPES = (*FLOAT_DTYPES, torch.uint8, torch.int8, torch.int32, torch.int64)


@dataclass(frozen=True)
class StoredWeight(ArgumentGroup):
    """The fields that weights of linears and weights of experts share: dense numbers, or codes in a
    `weight_format` with a scale for each block of rows and columns, and a bias."""

    data: torch.Tensor
    weight_format: str = "dense"
    scale: torch.Tensor | None = None
    scale_block: Sequence[int] = ()
    bias: torch.Tensor | None = None

    # The fields that a dense weight does not have.
    _of_codes: ClassVar[tuple[str, ...]] = ("scale",)

    @property
    def format(self) -> WeightFormat | None:
        """The format of the codes; None for a dense weight."""
        return WEIGHT_FORMATS.get(self.weight_format)

    @property
    def is_coded(self) -> bool:
        return self.weight_format != "dense"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes in which the codes may be stored; empty for a dense weight."""
        return () if self.format is None else torch_types(self.format.stored)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the weight in numbers, that is, after unpacking."""
        form = self.format
        if form is None or form.packed_axis is None:
            return self.data.shape
        shape = list(self.data.shape)
        shape[form.packed_axis] *= nibbles_per_word(self.data.dtype)
        return tuple(shape)

    def check_scale_given(self, op: str) -> bool:
        """Checks that a quantised weight has a scale, and that a dense weight has no field of
        quantised weights. Returns whether the weight is quantised. Raises ArgumentError."""
        if self.format is None:
            for field in self._of_codes:
                if getattr(self, field) is not None:
                    expected = "None, since weights are dense"
                    raise ArgumentError(op, self.named(field), expected, "a tensor")
        elif self.scale is None:
            expected = f"a tensor, since weights are {self.weight_format}"
            raise ArgumentError(op, self.named("scale"), expected, None)
        return self.format is not None


@dataclass(frozen=True)
class Weight(StoredWeight):
    """A weight [N, K], or [..., D, K] in heads, with its scales, zeros and bias.

    - `data`: the numbers of a dense weight, or the stored codes. weight_format determines the form
      of `data`:
        - `"dense"`: numbers.
        - `"int8"` (int8 or uint8), `"fp8"` (float8_e4m3fn): codes with any strides.
        - `"int4_k"`: nibbles packed along K, [.., K / 2] uint8 or [.., K / 8] int32, with any
          strides.
        - `"int4_k_offset"`: like int4_k, but the zero is a float that is added after the
          multiplication by the scale.
        - `"nvfp4"`, `"mxfp4"`: 4-bit E2M1 floats, [.., K / 2] uint8. The low nibble has the even
          column.
        - `"nf4"`, `"fp4"`: nibbles that stand for the 16 numbers of a table
          (`codegen.formats.TABLES`), [.., K / 2] uint8.
        - `"int4_n"`: nibbles packed along the rows of a head, [.., D / 2, K] uint8 or [.., D / 8,
          K] int32, with any strides.

    A code stands for (code - zero) * scale. In int4_k_offset, it stands for (code - zero_point) *
    scale + zero.

    - `scale` [ceil(N / bn), ceil(K / bk)] with scale_block = [bn, bk]: any float dtype. For nvfp4,
      the scales may also be float8_e4m3fn. For fp8, they may also be e8m0 as uint8, and for mxfp4,
      they must be e8m0 as uint8. A block as large as the weight is one scale for the whole tensor.
      For 4-bit codes, bk divides K.
    - `zero`: the zero of a code is zero_point, plus `zero` if `zero` is given. `zero` has the shape
      of the scales, or consists of int32 words that hold the zeros of eight rows, [N / (8 bn), K /
      bk].
    - `nibble_order`: the place of each code in a word, as in `ops.formats.quantized_weight`; empty
      for ascending order.
    - `bias`: the bias of the linear, [N] or [..., D].
    - `factor`: a float32 tensor with one element, by which the whole weight is multiplied. If it is
      None, the factor is 1.
    """

    zero: torch.Tensor | None = None
    zero_point: int = 0
    nibble_order: Sequence[int] = ()
    factor: torch.Tensor | None = None

    _of_codes = ("scale", "zero", "factor")

    @property
    def rows(self) -> Any:
        """N, the number of rows of all heads together."""
        return prod(self.shape[:-1])

    @property
    def has_packed_zeros(self) -> bool:
        """Whether one word holds the zeros of eight rows. Call this only for a weight that has been
        checked: zeros that are not packed have the shape of the scales."""
        zero, scale = self.zero, self.scale
        return zero is not None and scale is not None and zero.shape != scale.shape

    def dequantize(self, compute: torch.dtype) -> torch.Tensor:
        """Returns the weight [..., D, K] in `compute` precision. A quantised weight is
        dequantised."""
        if self.format is None:
            return self.data.to(compute)
        assert self.scale is not None
        codes = code_numbers(self.data, self.format, compute, self.nibble_order)
        rows = codes.flatten(0, -2)
        values = rows - self.zero_point
        scale = expand_blocks(scale_numbers(self.scale, compute), rows.shape, self.scale_block)
        if self.zero is not None and self.format.added_zeros:
            added = expand_blocks(self.zero.to(compute), rows.shape, self.scale_block)
            values = values * scale + added
        elif self.zero is not None:
            zero = self.zero
            if zeros_are_packed(zero, rows.shape[0], self.scale_block):
                zero = unpack_nibbles(zero, 0, self.nibble_order)
            zeros = expand_blocks(zero.to(compute), rows.shape, self.scale_block)
            values = (values - zeros) * scale
        else:
            values = values * scale
        if self.factor is not None:
            values = values * self.factor.to(compute).reshape(())
        return values.view(codes.shape)

    # --- checks: they read only metadata, and raise ArgumentError -----------------------------

    def check_format(self, op: str) -> None:
        """Checks the options of the format: block, zero point and nibble order."""
        check_choice(op, "weight_format", self.weight_format, linear_formats())
        block, order = list(self.scale_block), list(self.nibble_order)
        if self.format is None:
            given = {"scale_block": block, "nibble_order": order, "zero_point": self.zero_point}
            for name, value in given.items():
                if value:
                    raise ArgumentError(op, name, "nothing, since weights are dense", value)
            return
        check_scale_block(op, block)
        if self.zero_point and not self.format.zeros:
            expected = f"0 for {self.weight_format} weights"
            raise ArgumentError(op, "zero_point", expected, self.zero_point)
        if not order:
            return
        packed = self.format.packed_axis is not None
        per = nibbles_per_word(self.data.dtype) if packed else 0
        if sorted(order) != list(range(per)):
            expected = (
                f"an order of the {per} nibbles of a word"
                if per
                else "nothing, because no nibbles are packed"
            )
            raise ArgumentError(op, "nibble_order", expected, order)

    def check_dtype(self, op: str, dtype: torch.dtype) -> None:
        """Checks the dtype of the data. A dense weight must have `dtype`."""
        check_dtype(op, self.named("data"), self.data, self.dtypes or (dtype,))

    def check_shape(self, op: str, letters: str, sizes: Sequence[Any]) -> None:
        """Checks the unpacked shape of the data."""
        packed = self.format is not None and self.format.packed_axis is not None
        if not packed or self.data.dim() != len(sizes):
            check_shape(op, self.named("data"), self.data, letters, sizes)
            return
        shape = self.shape
        if not all(w is None or holds(n == w) for n, w in zip(shape, sizes, strict=True)):
            known = shape_text(["*" if size is None else size for size in sizes])
            expected = f"words that hold {letters} = {known} ({self.weight_format})"
            actual = f"shape {shape_text(self.data.shape)}, which holds {shape_text(shape)}"
            raise ArgumentError(op, self.named("data"), expected, actual)

    def check(
        self,
        op: str,
        x: torch.Tensor,
        rows: Any = None,
        bias_dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        """Checks a weight [N, K] of x [T, K], with its scales, zeros and bias. The weight may have
        any strides.

        bias_dtypes: the allowed dtypes of the bias; by default x's dtype and float32.
        """
        self.check_format(op)
        argument = self.named("data")
        check_tensor(op, argument, self.data)
        self.check_dtype(op, x.dtype)
        self.check_shape(op, "[N, K]", (rows, x.shape[1]))
        check_device(op, argument, self.data, x.device)
        self.check_blocks(op, x.device)
        if self.bias is not None:
            dtypes = tuple(bias_dtypes) or (x.dtype, torch.float32)
            form = "[N]", (self.rows,), dtypes, x.device
            check_operand(op, self.named("bias"), self.bias, *form)

    def check_blocks(self, op: str, device: torch.device) -> None:
        """Checks the scale, the zero and the factor."""
        if not self.check_scale_given(op):
            return
        assert self.format is not None
        name = self.named("scale")
        rows, columns, (bn, bk) = self.rows, self.shape[-1], self.scale_block
        if self.format.packed_axis is not None and not holds(columns % bk == 0):
            expected = f"a group that divides K = {columns}"
            raise ArgumentError(op, "scale_block", expected, [bn, bk])
        grid, letters = (-(-rows // bn), -(-columns // bk)), f"[ceil(N / {bn}), ceil(K / {bk})]"
        dtypes = torch_types(self.format.scales) or FLOAT_DTYPES
        check_operand(op, name, self.scale, letters, grid, dtypes, device)
        if self.zero is not None:
            self._check_zero(op, letters, grid, device)
        if self.factor is not None:
            name, ones = self.named("factor"), (1,) * self.factor.dim()
            check_operand(op, name, self.factor, "of one number", ones, (torch.float32,), device)

    def _check_zero(
        self, op: str, letters: str, grid: tuple[Any, Any], device: torch.device
    ) -> None:
        name, zero, (bn, bk) = self.named("zero"), self.zero, self.scale_block
        assert self.format is not None
        assert zero is not None
        if not self.format.zeros:
            raise ArgumentError(op, name, f"None for {self.weight_format} weights", "a tensor")
        words = self.format.packed_axis is not None and zero.dim() == 2
        dtypes = FLOAT_DTYPES if self.format.added_zeros else _ZERO_DTYPES
        if words and zeros_are_packed(zero, self.rows, self.scale_block):
            if len(self.nibble_order) not in (0, 8):
                expected = "an order of 8 nibbles, because a word holds 8 zeros"
                raise ArgumentError(op, "nibble_order", expected, list(self.nibble_order))
            letters, grid = f"[N / {8 * bn}, K / {bk}] words", (zero.shape[0], grid[1])
        check_operand(op, name, zero, letters, grid, dtypes, device)


def code_numbers(
    stored: torch.Tensor, form: WeightFormat, dtype: torch.dtype, order: Sequence[int] = ()
) -> torch.Tensor:
    """Returns the numbers that stored codes stand for, unpacked and in `dtype`, before zeros and
    scales are applied. order: the order of the codes in an element
    (`ops.formats.quantized_weight`)."""
    axis = form.packed_axis
    codes = stored if axis is None else unpack_nibbles(stored, axis, order)
    if form.number == "e2m1":
        return fp4.decode(codes, dtype)
    if form.number in TABLES:
        return torch.tensor(TABLES[form.number], dtype=dtype, device=codes.device)[codes.long()]
    return codes.to(dtype)


def scale_numbers(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers that stored scales stand for, in `dtype`. uint8 scales are e8m0."""
    return scale.to(dtype) if scale.is_floating_point() else e8m0.scale_numbers(scale, dtype)
