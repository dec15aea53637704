"""A linear whose weight is made of codes in its forward pass, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.ops.formats import fp4


class CodedLinear(nn.Module):
    """x [..., K] -> [..., N]: a linear whose weight [N, K] the codes of this module stand for.

    It takes the place of a library's module and holds that module's own tensors, under its names:
    parameters as parameters, other tensors as buffers. A class for each way of storing codes
    implements `weight_of_codes`, and `rounded` where activations are quantised too; where it holds
    codes in another order of memory, `lend_to` and `return_to` as well.
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

    def lend_to(self, original: nn.Module) -> None:
        """Frees what the original holds of codes that this module has laid out anew, so that
        memory has them once while the original waits for `undo`."""

    def return_to(self, original: nn.Module) -> None:
        """Gives the original back its codes, as its library lays them out, from those of this
        module."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def put_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts a tensor in the place of a parameter or a buffer of a module."""
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[name] = tensor


# Rows whose words are turned at once: of 14336 columns 7 MB.
_TURNED_ROWS = 1024


def turned_words(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Words [A, B / 8] of eight codes along B -> words [B, A / 8] of the same codes along A.

    words: int32; A and B are multiples of 8. order: which nibble of a word each of its codes is, in
    both. A second call undoes the first. The result is contiguous, and little memory is taken
    besides.
    """
    rows, columns = words.shape
    turned = words.new_empty(8 * columns, rows // 8)
    by_place = turned.view(columns, 8, rows // 8)
    shifts = 4 * torch.tensor(list(order), dtype=torch.int32, device=words.device)
    for first in range(0, rows, _TURNED_ROWS):
        blocks = words[first : first + _TURNED_ROWS].reshape(-1, 8, columns)
        of_blocks = slice(first // 8, first // 8 + len(blocks))
        for place, nibble in enumerate(order):
            codes = (blocks >> (4 * nibble)) & 15
            # No two codes share a bit, so that their sum joins them, the sign bit included.
            joined = (codes << shifts.view(1, 8, 1)).sum(1, dtype=torch.int32)
            by_place[:, place, of_blocks] = joined.t()
    return turned


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
