"""Reads linears of bitsandbytes.

With 4 bits, codes are indices into a table, and the codes in a block of the flattened weight share
a scale. In a graph, the library's operator is a single node, which hides the codes from patterns.
The arithmetic is that of the library's default `dequantize_4bit` and `linear`: numbers of the table
are multiplied by the scale of their block in fp32, and rounded to the dtype of the computation.

With 8 bits, the weight has int8 codes and a scale for each row. x is rounded to codes, too, row by
row. The library takes out the columns of x that have an outlier, and multiplies them separately.
Both products read the same weight. Therefore one product computes both here: its x is rounded
except in these columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.codegen.formats import TABLES
from tilewright.compiler.quantised.coded_linear import CodedLinear

_FOUR_BITS = ("Linear4bit", "LinearNF4", "LinearFP4")
# The number of scales that share a second-level scale, if the scales are themselves stored as
# codes. The library fixes this number.
_SCALES = 256


class TableLinear(CodedLinear):
    """A linear whose 4-bit codes are indices into a table.

    codes: uint8 [N * K / 2]. The first of a byte's two codes is in the high nibble.
    absmax: fp32 [blocks], for the blocks of the flattened weight [N, K].
    quant_type: a name in `codegen.formats.TABLES`.
    compute_dtype: the dtype to which x is cast and the weight is rounded; None for the dtype of x.
    """

    codes: torch.Tensor
    absmax: torch.Tensor

    def __init__(self, module: Any, tensors: dict[str, torch.Tensor | None]) -> None:
        super().__init__(module.in_features, module.out_features, tensors)
        self.quant_type = module.weight.quant_state.quant_type
        self.compute_dtype: torch.dtype | None = module.compute_dtype

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.quant_type}, compute_dtype={self.compute_dtype}"

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        # Make the table a constant of the graph. If the module held it, the table could change, and
        # patterns would not know its numbers.
        table = torch.tensor(TABLES[self.quant_type], dtype=torch.float32, device=self.codes.device)
        shape = self.out_features, self.in_features
        return decoded(self.codes, table, self.absmax, shape, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight_of_codes(dtype), bias).to(x.dtype)


class ByteLinear(CodedLinear):
    """A linear of codes [N, K] int8. `scale` [N] fp32 is the largest magnitude of each row.

    The forward pass calls the library's own operators, whose meaning is declared. They round x to
    int8 row by row. The library's module itself is not used, because it changes a parameter in each
    call.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tensors: Mapping[str, torch.Tensor | None],
        threshold: float = 0.0,
    ) -> None:
        super().__init__(in_features, out_features, tensors)
        self.threshold = threshold

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, threshold={self.threshold}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        library, bias = torch.ops.bitsandbytes, self.bias
        rows = x.reshape(-1, self.in_features)
        codes, largest, _ = library.int8_vectorwise_quant.default(rows.to(torch.float16))
        y = library.int8_scaled_mm.default(
            codes, self.codes, largest, self.scale,
            bias=None if bias is None else bias.to(x.dtype), dtype=x.dtype,
        )  # fmt: skip
        return y.view(*x.shape[:-1], self.out_features)


class OutlierLinear(ByteLinear):
    """A linear like :class:`ByteLinear` that does not round some columns of x. A column is not
    rounded if any of its numbers has a magnitude of `threshold` or more."""

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).to(torch.float16)
        outliers = rows.abs() >= self.threshold
        rows = torch.where(outliers, 0.0, rows)
        largest = rows.abs().amax(-1, keepdim=True).float()
        codes = torch.round(rows * torch.where(largest == 0, 0.0, 127.0 / largest))
        rounded = (codes * (largest / 127.0)).to(x.dtype).view(x.shape)
        return torch.where(outliers.any(0), x, rounded)

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.codes.float() * (self.scale / 127.0).unsqueeze(-1)).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(self.rounded(x), self.weight_of_codes(x.dtype), bias)


def decoded(
    codes: torch.Tensor,
    table: torch.Tensor,
    absmax: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns the weight [N, K] in `dtype`. It is decoded in fp32 from codes [N * K / 2] uint8, a
    table, and scales [blocks]."""
    nibbles = torch.stack([codes >> 4, codes & 15], -1).view(len(absmax), -1)
    weight = table[nibbles.int()] * absmax.unsqueeze(-1)
    return weight.view(*shape).to(dtype)


def replacement(module: nn.Module) -> nn.Module | str | None:
    """Returns a module that decodes in PyTorch, or the reason why there is none. Returns None for
    other libraries' modules."""
    if not type(module).__module__.startswith("bitsandbytes."):
        return None
    name, found = type(module).__name__, module
    if name == "Linear8bitLt":
        return _eight_bits(found)
    return _four_bits(found) if name in _FOUR_BITS else None


def _eight_bits(module: Any) -> nn.Module | str:
    state, weight = module.state, module.weight
    # The library's module makes codes and scales from its weight in the first call.
    codes, scale = (
        getattr(weight if state.CB is None else state, name, None) for name in ("CB", "SCB")
    )
    if codes is None or scale is None:
        return (
            "its weight is not quantised yet: the library quantises weights when their module is "
            "moved to its device"
        )
    tensors = {"codes": codes, "scale": scale, "bias": module.bias}
    made = ByteLinear if state.threshold == 0 else OutlierLinear
    return made(module.in_features, module.out_features, tensors, state.threshold)


def _four_bits(module: Any) -> nn.Module | str:
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        return (
            "its weight is not quantised yet: the library quantises weights when their module is "
            "moved to its device"
        )
    if getattr(state, "packing_format_for_cpu", False):
        return "its codes are in another order for this CPU because the model ran before `prepare`"
    rows, columns = module.out_features, module.in_features
    if tuple(state.shape) != (rows, columns):
        return f"its weight is {list(state.shape)}, not [{rows}, {columns}]"
    if rows * columns % state.blocksize:
        return "its last block is not full"
    if state.absmax.is_meta:
        return "its tensors are on the meta device, where its table is not known"
    if state.quant_type not in TABLES or not _has_table(state):
        return f"its table is not that of {' or '.join(TABLES)}"
    if state.nested and state.state2.blocksize != _SCALES:
        return f"its second-level scales cover {state.state2.blocksize} scales each, not {_SCALES}"
    codes = module.weight.data.reshape(-1).view(torch.uint8)
    return TableLinear(module, {"codes": codes, "absmax": _scales(state), "bias": module.bias})


def _has_table(state: Any) -> bool:
    """Whether a weight's table has the numbers that the name of the table stands for."""
    expected = torch.tensor(TABLES[state.quant_type], dtype=torch.float32)
    return torch.equal(state.code.float().cpu(), expected)


def _scales(state: Any) -> torch.Tensor:
    """Returns absmax [blocks] in fp32. If it is stored as codes, decodes it here, once."""
    if not state.nested:
        found: torch.Tensor = state.absmax.float()
        return found
    second = state.state2
    of_block = second.absmax.repeat_interleave(_SCALES)[: len(state.absmax)]
    made: torch.Tensor = second.code[state.absmax.int()] * of_block + state.offset
    return made
