"""A linear whose weight is made of codes in its forward pass, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.ops.formats import fp4


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


def nibbles_of_words(words: torch.Tensor) -> torch.Tensor:
    """[N, W] words of eight codes, the first in the lowest bits -> [N, 8 W] codes, 0 to 15."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def bytes_of_words(words: torch.Tensor) -> torch.Tensor:
    """[N, W] words of four codes, the first in the lowest bits -> [N, 4 W] codes, 0 to 255: on a
    little-endian machine, as all that PyTorch compiles for are, the bytes as they lie."""
    return words.contiguous().view(torch.uint8)


def floats_of_bytes(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[.., W] bytes of two E2M1 codes, the first in the lower bits -> [.., 2 W] numbers, exact."""
    return fp4.decode(torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2), dtype)


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 number, of a middle the one with the even code; of NaN, NaN."""
    size, rounded = x.abs(), torch.zeros_like(x)
    for number, (below, above) in enumerate(pairwise(fp4.MAGNITUDES)):
        middle = (below + above) / 2
        larger = size >= middle if number % 2 else size > middle
        rounded = torch.where(larger, above, rounded)
    return rounded * torch.sign(x)


#: What linears of one activation may have alike.
SHARED = ("input_scale", "input_global_scale", "pre_quant_scale")


def share_equal_scales(linears: Mapping[str, nn.Module]) -> None:
    """Gives linears of one parent, by their names, whose activations have equal scales one tensor
    of them: so the activation that they read is seen to be one."""
    known: dict[tuple[str, str, bytes], nn.Parameter] = {}
    for (path, linear), name in product(linears.items(), SHARED):
        scale = linear._parameters.get(name)
        if scale is not None and not scale.is_meta:
            parent = path.rpartition(".")[0]
            key = (parent, name, scale.detach().float().cpu().numpy().tobytes())
            linear._parameters[name] = known.setdefault(key, scale)
