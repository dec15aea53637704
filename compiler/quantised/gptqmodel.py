"""Reads 4-bit linears of gptqmodel that compute in PyTorch (backends "torch" and "torch_awq").

Dynamo cannot trace the GPTQ linear, because the linear calls `Tensor.is_inference()` on its cached
tensors. This linear also shifts codes by the numbers in a buffer, which no graph shows. Dynamo can
trace the AWQ linear, but each of its words holds codes of eight rows of the weight. Kernels are
fastest if all K codes in a row of the weight are contiguous. Therefore this module lays out the
codes of both linears in this way, once. The arithmetic is that of the library's `dequantize_weight`
and `dequantize_gemm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tilewright.codegen.formats import AWQ_ORDER
from tilewright.compiler.quantised.coded_linear import CodedLinear, put_tensor, turned_words

_TENSORS = ("qweight", "qzeros", "scales", "g_idx", "bias")


class _GroupedLinear(CodedLinear):
    """A linear with a scale and a zero for each group of columns."""

    qzeros: torch.Tensor
    scales: torch.Tensor

    def __init__(self, module: Any, tensors: Mapping[str, torch.Tensor | None]) -> None:
        super().__init__(module.in_features, module.out_features, tensors)
        self.group_size = _group_of(module)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}"


class GptqLinear(_GroupedLinear):
    """A linear with qweight [K / 8, N], qzeros [K / group, N / 8] and scales [K / group, N], where
    `weight[n, k] = scale * (code - zero)`.

    A word of qweight has the codes of eight columns. The codes in a row of the weight are
    contiguous.
    """

    qweight: torch.Tensor

    def __init__(self, module: Any) -> None:
        super().__init__(module, {name: getattr(module, name, None) for name in _TENSORS})
        put_tensor(self, "qweight", module.qweight.detach().t().contiguous().t())

    def lend_to(self, original: nn.Module) -> None:
        put_tensor(original, "qweight", self.qweight)

    def return_to(self, original: nn.Module) -> None:
        # The library's own kernels accept only contiguous words.
        put_tensor(original, "qweight", self.qweight.detach().contiguous())

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=self.qweight.device)
        codes = (self.qweight.unsqueeze(1) >> shifts.view(1, -1, 1)) & 15
        zeros = (self.qzeros.unsqueeze(2) >> shifts) & 15
        groups = codes.reshape(-1, self.group_size, self.out_features)
        zeros = zeros.reshape(-1, 1, self.out_features)
        weight = self.scales.unsqueeze(1) * (groups - zeros).to(self.scales.dtype)
        return weight.reshape(self.in_features, self.out_features).to(dtype).t()


class AwqLinear(_GroupedLinear):
    """A linear with words [N, K / 8] int32, qzeros [K / group, N / 8] and scales [K / group, N],
    where `weight[n, k] = (code - zero) * scale`.

    A word of `words` has the codes of eight columns, in AWQ's order. qzeros and scales have the
    library's layout: a word of qzeros has the zeros of eight rows.

    `load_state_dict` also accepts the library's `qweight` [K, N / 8] in place of `words`.
    """

    words: torch.Tensor

    def __init__(self, module: Any) -> None:
        words = turned_words(module.qweight.detach(), AWQ_ORDER)
        tensors = {name: getattr(module, name, None) for name in ("qzeros", "scales", "bias")}
        super().__init__(module, {"words": words} | tensors)
        self.register_load_state_dict_pre_hook(_turn_stored)

    def lend_to(self, original: nn.Module) -> None:
        put_tensor(original, "qweight", self.words.new_empty(0))

    def return_to(self, original: nn.Module) -> None:
        put_tensor(original, "qweight", turned_words(self.words, AWQ_ORDER))

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        shifts = 4 * torch.tensor(AWQ_ORDER, dtype=torch.int32, device=self.words.device)
        codes = (self.words.unsqueeze(-1) >> shifts) & 15
        zeros = ((self.qzeros.unsqueeze(-1) >> shifts) & 15).flatten(-2).t()
        groups = codes.view(self.out_features, -1, self.group_size)
        scales = self.scales.to(dtype).t().unsqueeze(-1)
        return ((groups - zeros.unsqueeze(-1)).to(dtype) * scales).flatten(-2)


def _turn_stored(_: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Converts the library's words in a state dictionary to the order of an `AwqLinear`."""
    stored = state.pop(f"{prefix}qweight", None)
    if stored is not None:
        state[f"{prefix}words"] = turned_words(stored, AWQ_ORDER)


def _group_of(module: Any) -> int:
    return int(module.group_size) if module.group_size > 0 else int(module.in_features)


def replacement(module: nn.Module) -> nn.Module | str | None:
    """Returns a module that decodes in PyTorch, or the reason why there is none. Returns None for
    other libraries' modules."""
    if not type(module).__module__.startswith("gptqmodel.nn_modules.qlinear"):
        return None
    name = type(module).__name__
    if name not in _READ:
        backend = "torch_awq" if "awq" in name.lower() else "torch"
        return (
            f'{name} stores its codes in a special order; load the model with backend="{backend}"'
        )
    made, obstacle = _READ[name]
    return _common_obstacle(module) or obstacle(module) or made(module)


def _common_obstacle(found: Any) -> str | None:
    if found.bits != 4 or found.pack_dtype != torch.int32 or getattr(found, "planar", False):
        return (
            f"{found.bits}-bit codes in {found.pack_dtype} cannot be read; 4-bit codes in int32 can"
        )
    if found.adapter is not None:
        return "it has an adapter"
    if found.in_features % _group_of(found) or found.in_features % 8 or found.out_features % 8:
        return "its last group or word is padded"
    return None


def _gptq_obstacle(found: Any) -> str | None:
    if found.qzero_format() != 2:
        return (
            "its zeros are stored minus one (GPTQ v1); gptqmodel converts them to v2 in post_init"
        )
    if any(getattr(found, name, False) for name in ("online_full_had", "online_partial_had")):
        return "its activations are rotated (Hadamard) before the product"
    if found.g_idx.is_meta:
        return "its tensors are on the meta device, where the order of columns is not known"
    expected = torch.arange(found.in_features, device=found.g_idx.device) // _group_of(found)
    if not torch.equal(found.g_idx.to(expected.dtype), expected):
        return "its groups follow another order of columns (desc_act=True)"
    return None


def _awq_obstacle(found: Any) -> str | None:
    stored = (found.qweight.dtype, tuple(found.qweight.shape))
    if stored != (torch.int32, (found.in_features, found.out_features // 8)):
        return f"its codes are {stored[0]} {list(stored[1])}, not int32 [K, N / 8]"
    return None


#: For the name of each class of linears in the library: the class that replaces it, and the
#: function that says why a linear cannot be replaced.
_READ: dict[str, tuple[Callable[[Any], nn.Module], Callable[[Any], str | None]]] = {
    "TorchLinear": (GptqLinear, _gptq_obstacle),
    "AwqTorchLinear": (AwqLinear, _awq_obstacle),
}
