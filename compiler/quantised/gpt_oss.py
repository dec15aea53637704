"""Reads mixtures of gpt-oss in MXFP4, as transformers gives them to the hub's Triton kernels.

The weights are objects of the hub's code, not tensors, and the hub's routing breaks the graph for
every backend. The arithmetic is that of transformers `integrations/mxfp4.py`, and `matmul_ogs` of
the hub's `gpt-oss-triton-kernels`, which adds biases and applies the activation in fp32.

Dimension letters: E experts, N rows, K columns of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilewright.compiler.quantised.coded_experts import CodedExperts
from tilewright.compiler.quantised.coded_linear import floats_of_bytes

#: Layouts of the hub's code that have a method to undo the layout.
_LAYOUTS = ("StridedLayout", "HopperMXValueLayout", "HopperMXScaleLayout")
_PROJECTIONS = ("gate_up_proj", "down_proj")
#: The number of codes that share a scale.
BLOCK = 32


class Mxfp4Experts(CodedExperts):
    """Experts that hold, for each projection, the tensors of the file.

    These are *_blocks [E, N, K / 32, 16] with the low nibble first, *_scales [E, N, K / 32] and
    *_bias [E, N]. Blocks and scales are uint8.
    """

    def __init__(self, experts: Any, weights: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.alpha, self.limit = experts.alpha, experts.limit
        self.num_experts = len(weights["down_proj"][0])
        for name, (blocks, scales) in weights.items():
            self.register_buffer(f"{name}_blocks", blocks)
            self.register_buffer(f"{name}_scales", scales)
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias"))

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, limit={self.limit}"

    def weight_of_codes(self, name: str) -> torch.Tensor:
        """Returns the weight [E, K, N] of a projection, in fp32."""
        codes = self.get_buffer(f"{name}_blocks")
        exponents = self.get_buffer(f"{name}_scales").to(torch.int32) - 127
        numbers = floats_of_bytes(codes, torch.float32)
        return torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2).transpose(1, 2)

    def _product(
        self, name: str, x: torch.Tensor, ends: torch.Tensor, expert: torch.Tensor
    ) -> torch.Tensor:
        """Returns rows times the weight of their expert plus its bias, in fp32. The rows are sorted
        by expert."""
        product = torch.ops.transformers.grouped_mm_fallback(
            x.float(), self.weight_of_codes(name), offs=ends
        )
        return product + self.get_parameter(f"{name}_bias")[expert].float()

    def _hidden(self, both: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the activation of gate and up. Their columns alternate in `both`."""
        gate = both[..., ::2].clamp(max=self.limit)
        up = both[..., 1::2].clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(self.alpha * gate) * (up + 1)).to(dtype)

    def of_rows(self, x: torch.Tensor, ends: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        both = self._product("gate_up_proj", x, ends, expert)
        return self._product("down_proj", self._hidden(both, x.dtype), ends, expert)


class RoutedExperts(nn.Module):
    """A mixture that takes x [B, L, H], and returns the experts' results [B, L, H] and the router's
    logits [B * L, E]."""

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, weights, index = self.router(rows)
        routed = self.experts(rows, index, weights)
        return routed.reshape(len(hidden_states), -1, hidden_states.shape[-1]), logits


def replacement(module: nn.Module) -> nn.Module | str | None:
    """Returns a module that decodes in PyTorch, or the reason why there is none. Returns None for
    other libraries' modules."""
    if not type(module).__module__.startswith("transformers.integrations.mxfp4"):
        return None
    found: Any = module
    if type(module).__name__ == "Mxfp4GptOssExperts":
        return _experts(found)
    if type(module).__name__ != "Mxfp4GptOssMLP":
        return None
    if type(found.router).__name__ != "GptOssTopKRouter":
        return f"its router is a {type(found.router).__name__}, which `prepare` does not read"
    experts = _experts(found.experts)
    return experts if isinstance(experts, str) else RoutedExperts(found.router, experts)


def _experts(experts: Any) -> nn.Module | str:
    if getattr(experts, "_is_hooked", False):
        return "its experts are spread over ranks"
    if experts.limit is None:
        return "its activation is not clamped as that of gpt-oss"
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        return "this transformers has no grouped_mm_fallback; transformers 5 has it"
    weights = {}
    for name in _PROJECTIONS:
        found = _stored(experts, name)
        if isinstance(found, str):
            return found
        weights[name] = found
    return Mxfp4Experts(experts, weights)


def _stored(experts: Any, name: str) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Returns (blocks [E, N, K / 32, 16], scales [E, N, K / 32]) of a projection in the layout of
    files, or the reason why that is not possible."""
    if hasattr(experts, f"{name}_blocks"):
        blocks, scales = (getattr(experts, f"{name}_{part}") for part in ("blocks", "scales"))
        return blocks.detach(), scales.detach()
    weight, precision = getattr(experts, name), getattr(experts, f"{name}_precision_config")
    if precision is None or not hasattr(weight, "storage"):
        return f"{name} holds no weight yet: the file is not loaded"
    columns = _as_in_files(weight), _as_in_files(precision.weight_scale)
    for part in columns:
        if isinstance(part, str):
            return f"{name}: {part}"
    codes, scales = columns
    rows = getattr(experts, f"{name}_bias").shape
    if codes.shape[:2] != rows or scales.shape != (*rows, codes.shape[2] * 2 // BLOCK):
        return f"{name} has codes {list(codes.shape)} and scales {list(scales.shape)}"
    return codes.unflatten(-1, (scales.shape[-1], -1)), scales


def _as_in_files(tensor: Any) -> Any:
    """Returns the bytes [E, N, bytes] of a tensor of the hub, or the reason why that is not
    possible. The hub's layouts are [E, bytes, N]."""
    data, layout = tensor.storage.data, tensor.storage.layout
    if data.dtype != torch.uint8:
        return f"it is stored as {data.dtype}"
    if type(layout).__name__ not in _LAYOUTS:
        return f"`prepare` does not read the layout {type(layout).__name__}"
    if type(layout).__name__ != "StridedLayout" and data.is_meta:
        return "its bytes are in another order, and on the meta device they cannot be put in order"
    found = layout.unswizzle_data(data)
    if found is not data and not torch.equal(layout.swizzle_data(found), data):
        return f"{type(layout).__name__} cannot undo its own order"
    return found.transpose(-2, -1)
