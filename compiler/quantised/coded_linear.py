"""A linear whose weight is made of codes in its forward pass, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.codegen.formats import TABLES


class CodedLinear(nn.Module):
    """x [..., K] -> [..., N]: a linear whose weight [N, K] the codes of this module stand for.

    It takes the place of a library's module and holds that module's own tensors, under its names:
    parameters as parameters, other tensors as buffers. A class for each way of storing codes
    implements `weight_of_codes`, and `rounded` where activations are quantised too.
    """

    bias: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, tensors: Mapping[str, torch.Tensor | None]
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in the dtype of the activations."""
        raise NotImplementedError

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The activations as the format has them."""
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.rounded(x), self.weight_of_codes(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def weight_of_table(
    codes: torch.Tensor, absmax: torch.Tensor, quant_type: str, shape: Sequence[int]
) -> torch.Tensor:
    """A weight of bitsandbytes [N, K] in fp32.

    codes [N * K / 2] uint8, the first of a byte's two in its high nibble; absmax [blocks] fp32, of
    blocks of the flattened weight. quant_type: a name in `codegen.formats.TABLES`.
    """
    # A table that a module held would be data that may change.
    table = torch.tensor(TABLES[quant_type], dtype=torch.float32, device=codes.device)
    nibbles = torch.stack([codes >> 4, codes & 15], -1).view(len(absmax), -1)
    return (table[nibbles.int()] * absmax.unsqueeze(-1)).view(*shape)


def absmax_of_codes(
    codes: torch.Tensor, table: torch.Tensor, absmax: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Scales [blocks] of bitsandbytes that are codes of a table [256], 256 with one scale each."""
    of_block = absmax.repeat_interleave(256)[: len(codes)]
    return table[codes.int()] * of_block + offset


def nibbles_of_words(words: torch.Tensor) -> torch.Tensor:
    """[N, W] words of eight codes, the first in the lowest bits -> [N, 8 W] codes, 0 to 15."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def bytes_of_words(words: torch.Tensor) -> torch.Tensor:
    """[N, W] words of four codes, the first in the lowest bits -> [N, 4 W] codes, 0 to 255: on a
    little-endian machine, as all that PyTorch compiles for are, the bytes as they lie."""
    return words.contiguous().view(torch.uint8)
