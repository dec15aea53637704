"""A linear that decodes its weight in the forward pass, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.ops.formats import fp4


class CodedLinear(nn.Module):
    """A linear x [..., K] -> [..., N] that decodes its weight [N, K] from codes in each forward
    pass.

    It takes the place of a library's module and holds that module's own tensors under their own
    names: parameters as parameters, and other tensors as buffers. There is a subclass for each way
    of storing codes. A subclass implements `weight_of_codes`. It also implements `rounded` if
    activations are quantised, too, and `lend_to` and `return_to` if it stores the codes in another
    order.
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
        """Returns the weight [N, K] in the dtype of the activations."""
        raise NotImplementedError

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the activations as the format rounds them."""
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.rounded(x), self.weight_of_codes(x.dtype), self.bias)

    def lend_to(self, original: nn.Module) -> None:
        """Frees the codes of the original module, or replaces them by the codes of this module, so
        that memory holds the codes only once. Does nothing if both modules hold the same tensors.
        `return_to` undoes this."""

    def return_to(self, original: nn.Module) -> None:
        """Gives the original module its codes back in the layout of its library. They are computed
        from the codes of this module."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class DividedLinear(CodedLinear):
    """A linear whose scales are divided by a number, `weight_global_scale` [1].

    `weight_factors` holds the reciprocal of this number at the index `place`, so that no forward
    pass computes it. `weight_factors` is None if there is no such number, or if the forward pass
    must divide by it. The reciprocal is not in `state_dict`, and `load_state_dict` computes it
    again. If the divisor is changed in place by other means, the reciprocal does not change.
    """

    weight_global_scale: torch.Tensor
    weight_factors: torch.Tensor | None
    place = 0

    def __init__(
        self, in_features: int, out_features: int, tensors: Mapping[str, torch.Tensor | None]
    ) -> None:
        super().__init__(in_features, out_features, tensors)
        self.register_buffer("weight_factors", None, persistent=False)
        self.hold_factor()
        self.register_load_state_dict_post_hook(_hold_factor_again)

    @property
    def weight_factor(self) -> torch.Tensor:
        """The reciprocal as a tensor [1]."""
        assert self.weight_factors is not None
        return self.weight_factors[self.place : self.place + 1]

    def reciprocal(self) -> torch.Tensor | None:
        """Returns the reciprocal [1]; None if there is no divisor. A subclass may also return None
        if the forward pass must divide."""
        divisor: torch.Tensor | None = getattr(self, "weight_global_scale", None)
        return None if divisor is None else 1.0 / divisor.detach().reshape(1)

    def hold_factor(self) -> None:
        """Computes the reciprocal. If other linears hold their reciprocals in the same tensor, the
        reciprocal is written to its place in that tensor."""
        factor, held = self.reciprocal(), self.weight_factors
        if factor is None or held is None or held.device != factor.device:
            self.weight_factors, self.place = factor, 0
        else:
            held[self.place] = factor[0]


def _hold_factor_again(linear: nn.Module, _: Any) -> None:
    assert isinstance(linear, DividedLinear)
    linear.hold_factor()


def put_factors_together(linears: Mapping[str, nn.Module]) -> None:
    """Makes the linears of one parent hold their factors in one tensor, in order. The linears are
    given by name. An op that reads several linears then takes that tensor, or a part of it."""
    of_parents: dict[tuple[str, torch.device], list[DividedLinear]] = {}
    for path, linear in linears.items():
        if isinstance(linear, DividedLinear) and linear.weight_factors is not None:
            where = path.rpartition(".")[0], linear.weight_factors.device
            of_parents.setdefault(where, []).append(linear)
    for group in of_parents.values():
        together = torch.cat([linear.weight_factor for linear in group])
        for place, linear in enumerate(group):
            linear.weight_factors, linear.place = together, place


def put_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replaces a parameter or a buffer of a module by a tensor."""
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[name] = tensor


# The number of rows of words that are transposed at once. With 14336 columns, this number of rows
# takes 7 MB.
_TURNED_ROWS = 1024


def turned_words(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Transposes words [A, B / 8], which hold eight codes each along B, and returns words [B, A /
    8] that hold codes along A.

    `words` is int32, and A and B are multiples of 8. `order` gives, for each code of a word, the
    nibble that holds the code, in the given words and in the result. A second call undoes the
    first. The result is contiguous, and the function needs little other memory.
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
            # No two codes share a bit, so their sum joins them. This includes the sign bit.
            joined = (codes << shifts.view(1, 8, 1)).sum(1, dtype=torch.int32)
            by_place[:, place, of_blocks] = joined.t()
    return turned


def nibbles_of_words(words: torch.Tensor) -> torch.Tensor:
    """Returns the codes, from 0 to 15, of words [N, W] as [N, 8 W]. Each word holds eight codes,
    with the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def bytes_of_words(words: torch.Tensor) -> torch.Tensor:
    """Returns the codes, from 0 to 255, of words [N, W] as [N, 4 W]. Each word holds four codes,
    with the first in the lowest bits. The codes are the bytes in memory order, because PyTorch
    compiles for little-endian machines only."""
    return words.contiguous().view(torch.uint8)


def floats_of_bytes(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the exact numbers that bytes [.., W] stand for, as [.., 2 W]. Each byte holds two
    E2M1 codes, with the first in the lower bits."""
    return fp4.decode(torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2), dtype)


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Returns x rounded to the nearest E2M1 number. A number halfway between two E2M1 numbers
    becomes the one with the even code. NaN stays NaN."""
    size, rounded = x.abs(), torch.zeros_like(x)
    for number, (below, above) in enumerate(pairwise(fp4.MAGNITUDES)):
        middle = (below + above) / 2
        larger = size >= middle if number % 2 else size > middle
        rounded = torch.where(larger, above, rounded)
    return rounded * torch.sign(x)


#: The names of scales that may be equal in linears that read one activation.
SHARED = ("input_scale", "input_global_scale", "pre_quant_scale")


def share_equal_scales(linears: Mapping[str, nn.Module]) -> None:
    """Makes the linears of one parent share one tensor for equal scales of activations. The linears
    are given by name. Patterns then see that the linears read one rounded activation."""
    known: dict[tuple[str, str, bytes], nn.Parameter] = {}
    for (path, linear), name in product(linears.items(), SHARED):
        scale = linear._parameters.get(name)
        if scale is not None and not scale.is_meta:
            parent = path.rpartition(".")[0]
            key = (parent, name, scale.detach().float().cpu().numpy().tobytes())
            linear._parameters[name] = known.setdefault(key, scale)
