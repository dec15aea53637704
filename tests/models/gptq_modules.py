"""Stand-ins for gptqmodel's linears: its attributes, its tensors, and its arithmetic in PyTorch.

    module = AwqTorchLinear(bits=4, group_size=64, in_features=256, out_features=64, ...)
    pack(model)  # every linear of a model but its head

They copy gptqmodel 7.7.0's `nn_modules/qlinear/torch.py` and `torch_awq.py`, for tests on machines
where gptqmodel is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

GROUP = 64
AWQ_REVERSE_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def _codes(words: torch.Tensor) -> torch.Tensor:
    """Unpacks words [R, W] to codes [R, 8 W]. The lowest bits come first."""
    shifts = torch.arange(0, 32, 4, device=words.device)
    return (words.unsqueeze(-1) >> shifts).flatten(-2) & 15


class _PackedLinear(nn.Module):
    def __init__(
        self,
        bits: int,
        group_size: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        pack_dtype: torch.dtype = torch.int32,
        adapter: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.bits, self.pack_dtype, self.adapter = bits, pack_dtype, adapter
        self.group_size = group_size if group_size > 0 else in_features
        self.in_features, self.out_features = in_features, out_features
        groups = -(-in_features // self.group_size)
        self.register_buffer("qweight", torch.zeros(self._words(), dtype=pack_dtype))
        zeros = torch.zeros(groups, out_features * bits // 32, dtype=pack_dtype)
        self.register_buffer("qzeros", zeros)
        self.register_buffer("scales", torch.zeros(groups, out_features, dtype=torch.float16))
        self.register_buffer("bias", torch.zeros(out_features).half() if bias else None)

    def _words(self) -> tuple[int, int]:
        raise NotImplementedError

    def _weight(self) -> torch.Tensor:
        """Returns the weight [K, N] in the dtype of the scales."""
        raise NotImplementedError

    def post_init(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.matmul(x.flatten(0, -2), self._weight().to(x.dtype))
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], self.out_features)


class TorchLinear(_PackedLinear):
    __module__ = "gptqmodel.nn_modules.qlinear.torch"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._format = 1
        order = torch.arange(self.in_features, dtype=torch.int32) // self.group_size
        self.register_buffer("g_idx", order)

    def _words(self) -> tuple[int, int]:
        return self.in_features * self.bits // 32, self.out_features

    def qzero_format(self, format: int | None = None) -> int:
        self._format = format or self._format
        return self._format

    def _weight(self) -> torch.Tensor:
        codes, groups = _codes(self.qweight.t()).t(), self.g_idx.long()
        return self.scales[groups] * (codes - _codes(self.qzeros)[groups])


class AwqTorchLinear(_PackedLinear):
    __module__ = "gptqmodel.nn_modules.qlinear.torch_awq"

    def _words(self) -> tuple[int, int]:
        return self.in_features, self.out_features * self.bits // 32

    def _weight(self) -> torch.Tensor:
        order = torch.arange(self.out_features, dtype=torch.int32, device=self.qweight.device)
        order = order.view(-1, 8)[:, AWQ_REVERSE_ORDER].view(-1)
        codes, zeros = (_codes(words)[:, order] & 15 for words in (self.qweight, self.qzeros))
        scales = self.scales.repeat_interleave(self.group_size, dim=0)
        return (codes - zeros.repeat_interleave(self.group_size, dim=0)) * scales


class AwqGEMMLinear(AwqTorchLinear):
    """Stands for a class of the library whose kernel has its own order of codes."""

    __module__ = "gptqmodel.nn_modules.qlinear.gemm_awq"


def fill(module: Any, seed: int = 3, dtype: torch.dtype = torch.float16) -> Any:
    """Fills the library's own module, or a stand-in, with random codes, zeros, scales and bias."""
    make = torch.Generator().manual_seed(seed)
    for words in (module.qweight, module.qzeros):
        words.copy_(torch.randint(-(2**31), 2**31, words.shape, generator=make))
    module.scales = (torch.rand(module.scales.shape, generator=make) * 0.01).to(dtype)
    if module.bias is not None:
        module.bias = torch.randn(module.out_features, generator=make).to(dtype)
    if hasattr(module, "qzero_format"):
        module.qzero_format(format=2)
    module.post_init()
    return module.eval()


def pack(model: nn.Module, made: type[_PackedLinear]) -> nn.Module:
    """Replaces all linears of a model except its head by modules with random words, in float16."""
    for seed, (name, module) in enumerate(list(model.named_modules())):
        if type(module) is nn.Linear and name != "lm_head":
            sizes = {"in_features": module.in_features, "out_features": module.out_features}
            packed = fill(made(bits=4, group_size=GROUP, **sizes), seed)
            packed.scales *= 0.1
            model.set_submodule(name, packed)
    return model.half().requires_grad_(False)
