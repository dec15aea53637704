"""Reads linears whose weight is a tensor subclass of torchao or quanto. The module reads the
tensors inside the subclass.

The arithmetic is that of torchao's `quantization/quantize_/workflows/` and of quanto's
`library/qbytes_mm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.compiler import _compat
from tilewright.compiler.quantised.coded_linear import CodedLinear, floats_of_bytes
from tilewright.ops.formats import scale_layout


class ScaledBehind(CodedLinear):
    """A linear of codes [N, K] int8 with scale [N]. It computes x @ codes^T, rounds the product to
    x's dtype, and multiplies it by the scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = F.linear(x, self.codes.to(x.dtype)) * self.scale.to(x.dtype)
        return (product if self.bias is None else product + self.bias).to(x.dtype)


class ScaledInside(CodedLinear):
    """A linear of codes [N, K] that multiplies the codes by their scales before the product. There
    is a scale for each row, for the whole weight, or for each block of a row's columns."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    #: The dtype in which the weight is decoded; None for the dtype of the scale.
    decoded: torch.dtype | None = None

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        within = self.decoded or self.scale.dtype
        scale = self.scales()
        codes = self.numbers(within).unflatten(-1, (scale.shape[-1], -1))
        if (zero := self.zero) is not None:
            codes = codes - zero.unsqueeze(-1).to(within)
        weight = codes * scale.unsqueeze(-1)
        return weight.reshape(self.out_features, self.in_features).to(dtype)

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the numbers [N, K] that the codes stand for, in `dtype`."""
        return self.codes.to(dtype)

    def scales(self) -> torch.Tensor:
        """Returns the factors of each row's codes. Each block has one factor."""
        return self.scale


class Float4(ScaledInside):
    """A linear in NVFP4. Each byte holds two E2M1 codes, with the even column in the low nibble.
    The e4m3 scales are multiplied by one factor that all share."""

    decoded = torch.float32
    factor: torch.Tensor | None

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        return floats_of_bytes(self.codes, dtype)

    def scales(self) -> torch.Tensor:
        scale = self.scale.to(torch.float32)
        return scale if self.factor is None else self.factor * scale


class Float8(ScaledInside):
    """A linear that decodes in float32, as torchao does."""

    decoded = torch.float32


class Int4(ScaledInside):
    """A linear of codes [N, K / 2]. Each byte holds two codes, with the even column in the low
    nibble.

    Scales and zeros are [N, K / group]. The weight is (code - 8) * scale + zero, rounded to
    bfloat16, which is the dtype in which torchao's kernels multiply.
    """

    zero: torch.Tensor

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)
        blocks = (codes.float() - 8).unflatten(-1, (self.scale.shape[-1], -1))
        shifted = blocks * self.scale.float().unsqueeze(-1) + self.zero.float().unsqueeze(-1)
        return shifted.flatten(-2).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        rows = x.to(torch.bfloat16)
        return F.linear(rows, self.weight_of_codes(rows.dtype), bias).to(x.dtype)


class Intx(ScaledInside):
    """A linear that decodes in bfloat16 or in the subclass's own dtype, as torchao does."""

    def __init__(self, *arguments: Any, dtype: torch.dtype) -> None:
        super().__init__(*arguments)
        self.decoded = dtype


def _int8(weight: Any, bias: torch.Tensor | None) -> CodedLinear | str:
    """Reads torchao's Int8Tensor. Its linear ignores zero points."""
    if weight.act_quant_kwargs is not None:
        return "its activations are int8, which no fused op takes"
    if weight.block_size[-1] < weight.qdata.shape[-1]:
        return "its rows have several scales"
    tensors = {"codes": weight.qdata, "scale": weight.scale.flatten(), "bias": bias}
    rows, columns = weight.shape
    return ScaledBehind(columns, rows, tensors)


def _float8(weight: Any, bias: torch.Tensor | None) -> CodedLinear | str:
    """Reads torchao's Float8Tensor."""
    if weight.act_quant_kwargs is not None:
        return "its activations are float8, which the fused MLP does not take"
    if weight.block_size[0] not in (1, weight.qdata.shape[0]):
        return "its rows share scales by blocks"
    return _made(Float8, weight, bias, weight.qdata, weight.scale)


def _intx(weight: Any, bias: torch.Tensor | None) -> CodedLinear | str:
    """Reads torchao's IntxUnpackedToInt8Tensor."""
    if weight.activation_quantization is not None:
        return "its activations are quantised"
    zero = weight.zero_point
    return _made(Intx, weight, bias, weight.qdata, weight.scale, zero, dtype=weight.dtype)


def _int4(weight: Any, bias: torch.Tensor | None) -> CodedLinear | str:
    """Reads torchao's Int4Tensor, which has signed codes, and scales and zeros by columns."""
    if weight.activation_dtype != torch.bfloat16:
        return "its activations are float8, which no fused op takes with int4"
    # With bit 3 flipped, codes of -8 to 7 become 0 to 15.
    codes = weight.qdata.view(torch.uint8) ^ 0x88
    return _of_groups(weight, bias, codes, weight.scale.t(), weight.zero_point.t())


def _tiled_int4(weight: Any, bias: torch.Tensor | None) -> CodedLinear | str:
    """Reads torchao's Int4TilePackedTo4dTensor.

    It has a padded weight, with words in the order of tensor cores' operands, and scales and zeros
    by columns (PyTorch, `native/cuda/int4mm.cu`).
    """
    words = weight.qdata
    if words.dim() != 4 or words.shape[2:] != (32, 4):
        return f"its words do not form tiles of 8 rows and 128 columns: {[*words.shape]}"
    rows, columns = weight.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)
    # The axes are: tile of rows; tile of columns; row; pair in 8 columns; block of 32 columns in
    # the tile; even or odd column of the pair; half of the 32 columns; half of these 16 columns.
    codes = codes.unflatten(-1, (2, 2, 2)).unflatten(2, (8, 4)).permute(0, 2, 1, 4, 6, 7, 3, 5)
    codes = codes.flatten(2).flatten(0, 1)[:rows, :columns]
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    scale, zero = weight.scale_and_zero.permute(2, 1, 0)[:, :rows]
    groups = columns // weight.block_size[-1]
    return _of_groups(weight, bias, packed, scale[:, :groups], zero[:, :groups])


def _of_groups(
    weight: Any,
    bias: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
) -> CodedLinear | str:
    if weight.shape[1] % weight.block_size[-1]:
        return f"its columns do not fill groups of {weight.block_size[-1]}"
    return _made(Int4, weight, bias, codes, scale, zero)


def _nvfp4(weight: Any, bias: torch.Tensor | None) -> CodedLinear | str:
    """Reads torchao's NVFP4Tensor, and puts its scales in row order."""
    if weight.act_quant_kwargs is not None:
        return "its activations are NVFP4, which no fused op of dense layers takes"
    rows, groups = weight.shape[0], weight.shape[1] // weight.block_size
    if weight.qdata.stride(-1) != 1 or weight.block_size != 16:
        return "its codes are not row-major in groups of 16"
    scale = weight.scale
    if weight.is_swizzled_scales:
        shape = scale_layout.layout_shape(rows, groups)
        scale = scale_layout.unswizzle(scale.reshape(shape), rows, groups)
    made = _made(Float4, weight, bias, weight.qdata, scale)
    made.register_buffer("factor", weight.per_tensor_scale)
    return made


def _quanto(weight: Any, bias: torch.Tensor | None) -> CodedLinear | str:
    """Reads quanto's WeightQBytesTensor."""
    if weight.activation_qtype is not None:
        return "its activations are quantised"
    if weight.axis not in (0, None):
        return "its scales follow the columns"
    return _made(ScaledInside, weight, bias, weight._data, weight._scale)


def _marlin(weight: Any, bias: torch.Tensor | None) -> CodedLinear | str:
    """Reads quanto's MarlinF8QBytesTensor. Its float8 codes and scales are in the order that a
    GPU's kernel needs."""
    if bias is not None:
        return "the library's kernel ignores the bias"
    plain = weight.weight_qbytes_tensor()  # its method for saving, which gives plain order
    return _made(ScaledInside, weight, bias, plain._data, plain._scale)


#: A function that reads a weight of one class, with a bias. It returns the linear that decodes the
#: weight, or the reason why there is none.
_Read = Callable[[Any, torch.Tensor | None], CodedLinear | str]


@dataclass(frozen=True)
class _Class:
    """A class of weights.

    read: the function that reads a weight of this class.
    once: the reason why only `prepare` decodes the weight; "" if the backend, too, can decode the
    weight in a graph.
    """

    read: _Read
    once: str = ""


_CLASSES = {
    "torchao.Int8Tensor": _Class(_int8),
    "torchao.Float8Tensor": _Class(_float8),
    "torchao.Int4Tensor": _Class(_int4, "`prepare` makes its codes unsigned, once"),
    "torchao.Int4TilePackedTo4dTensor": _Class(_tiled_int4, "`prepare` unpacks its tiles, once"),
    "torchao.IntxUnpackedToInt8Tensor": _Class(_intx),
    "torchao.NVFP4Tensor": _Class(_nvfp4, "`prepare` puts its scales in order, once"),
    "optimum.WeightQBytesTensor": _Class(_quanto),
    "optimum.MarlinF8QBytesTensor": _Class(_marlin, "`prepare` puts its codes in order, once"),
}


def _made(
    kind: type[CodedLinear],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    **options: Any,
) -> CodedLinear:
    scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    tensors = {"codes": codes, "scale": scale, "zero": zero, "bias": bias}
    rows, columns = weight.shape
    return kind(columns, rows, tensors, **options)


#: The hint for a weight that cannot be read.
INSTEAD = (
    "store the decoded weight in its place (`module.weight = "
    "nn.Parameter(module.weight.dequantize())`)"
)


def read(kind: type, weight: Any, bias: torch.Tensor | None) -> CodedLinear | str:
    """Returns the linear that decodes a weight in PyTorch, or the reason why there is none.

    `kind` is the class of the weight. `weight` is the weight, or an object with its attributes.
    """
    known = _class_of(kind)
    if known is None:
        return f"`prepare` does not read weights of the class {kind.__module__}.{kind.__name__}"
    if getattr(weight, "act_pre_scale", None) is not None:
        return "its activations are scaled before they are read"
    try:
        return known.read(weight, bias)
    except AttributeError as error:
        return f"the installed release of its library has another {kind.__name__}: {error}"


def obstacle(weight: torch.Tensor) -> tuple[str, bool]:
    """Returns why the backend does not decode a weight that is an input of a graph, and whether
    `prepare` reads the weight. The reason is "" if the backend decodes the weight."""
    known = _class_of(type(weight))
    with _compat.fake_mode_of(_compat.parts_of(weight)) or nullcontext():
        made = read(type(weight), weight, None)
    if known is None or isinstance(made, str):
        return str(made), False
    return known.once, True


def _class_of(kind: type) -> _Class | None:
    return _CLASSES.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")


def replacement(module: nn.Module) -> nn.Module | str | None:
    """Returns a module that decodes in PyTorch, or the reason why there is none. Returns None for a
    plain weight."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or not hasattr(weight, "__tensor_flatten__"):
        return None
    if type(weight).__module__.startswith("torch."):
        return None  # such as a DTensor
    made = read(type(weight), weight, module.bias)
    return f"{made}; {INSTEAD}" if isinstance(made, str) else made
