"""Linears of ModelOpt's formats: FP8 per tensor, per channel and token, or by blocks, and NVFP4.

The arithmetic is that of ModelOpt's `NVFP4QTensor.dequantize` and `FP8QTensor.dequantize`, and of
the quantizers of activations that ModelOpt exports. Dimension letters: N rows, K columns of a
weight; weights and their scales may have a first dimension of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import _grouped_linear

from tilewright.compiler.quantised.coded_experts import CodedExperts
from tilewright.compiler.quantised.coded_linear import CodedLinear, floats_of_bytes, nearest_e2m1
from tilewright.ops.formats import fp4
from tilewright.ops.formats.fp8_block import BLOCK, E4M3_MAX
from tilewright.ops.formats.nvfp4 import BLOCK as GROUP

Shape = tuple[int, ...]


class Float8(CodedLinear):
    """A linear with weight [N, K] e4m3 and weight_scale [1, 1]. It rounds activations in steps of
    input_scale [].

    stored: the dtype of codes.
    needed: the names of the tensors that a file must have.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    pre_quant_scale: torch.Tensor
    stored: torch.dtype = torch.float8_e4m3fn
    needed: tuple[str, ...] = ("weight", "weight_scale", "input_scale")

    @classmethod
    def shapes(cls, rows: int, columns: int) -> dict[str, Shape]:
        """Returns the shapes of codes and scales of a weight [N, K], as this class reads them."""
        return {"weight": (rows, columns), "weight_scale": (1, 1)}

    def settle(self) -> None:
        """Reshapes the tensors to :meth:`shapes`, because files may have other dimensions of size
        one."""
        for name, shape in self.shapes(self.out_features, self.in_features).items():
            tensor = self._parameters[name]
            assert tensor is not None
            tensor.data = tensor.data.reshape(shape)

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.weight.to(self.weight_scale.dtype) * self.weight_scale).to(dtype)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return self.rounded_by(x, self._parameters.get("input_scale"))

    def rounded_by(self, x: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor:
        """Returns activations as the format rounds them. `input_scale` is [], or [M, 1] with a
        scale for each row."""
        assert input_scale is not None
        return _in_steps(x, input_scale.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "pre_quant_scale" in self._parameters:
            x = x * self.pre_quant_scale.to(x.dtype)
        return super().forward(x)


class Float8PerToken(Float8):
    """A linear with weight_scale [N, 1]. The largest activation of a token decides the scale of the
    token's activations."""

    needed = ("weight", "weight_scale")

    @classmethod
    def shapes(cls, rows: int, columns: int) -> dict[str, Shape]:
        return {"weight": (rows, columns), "weight_scale": (rows, 1)}

    def rounded_by(self, x: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor:
        if x.numel() == 0:
            return x
        scale = x.float().abs().amax(-1, keepdim=True) / E4M3_MAX
        return _in_steps(x, torch.where(scale == 0, 1.0, scale))


class Float8Blocks(Float8):
    """A linear with weight_scale [N / 128, K / 128], where both divisions round up. It does not
    round activations."""

    needed = ("weight", "weight_scale")

    @classmethod
    def shapes(cls, rows: int, columns: int) -> dict[str, Shape]:
        grid = -(-rows // BLOCK), -(-columns // BLOCK)
        return {"weight": (rows, columns), "weight_scale": grid}

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        scale = self.weight_scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        scale = scale[..., : self.out_features, : self.in_features]
        return (self.weight.to(scale.dtype) * scale).to(dtype)

    def rounded_by(self, x: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor:
        return x


class Float4(Float8):
    """A linear in NVFP4.

    weight: [N, K / 2], bytes that hold the E2M1 codes of two columns each, with the even column in
        the low nibble.
    weight_scale: [N, K / 16] in e4m3.
    weight_scale_2: [1, 1].
    input_scale: []. Activations are rounded to the same format, with this scale in place of
        weight_scale_2.
    """

    weight_scale_2: torch.Tensor
    stored = torch.uint8
    needed: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_2", "input_scale")

    @classmethod
    def shapes(cls, rows: int, columns: int) -> dict[str, Shape]:
        codes, scales = (rows, columns // 2), (rows, columns // GROUP)
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": (1, 1)}

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        codes = floats_of_bytes(self.weight, torch.float32).unflatten(-1, (-1, GROUP))
        scale = self.weight_scale.float() * self.weight_scale_2
        return (codes * scale.unsqueeze(-1)).flatten(-2).to(dtype)

    def rounded_by(self, x: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor:
        assert input_scale is not None
        if x.numel() == 0:
            return x
        groups, factor = x.float().unflatten(-1, (-1, GROUP)), input_scale.float().unsqueeze(-1)
        scale = groups.abs().amax(-1, keepdim=True) / (fp4.MAX * factor)
        scale = scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * factor
        codes = nearest_e2m1(groups / torch.where(scale == 0, 1.0, scale))
        return (codes * scale).flatten(-2).to(x.dtype)


class Float4Weights(Float4):
    """A linear in NVFP4 that does not round its activations."""

    needed = ("weight", "weight_scale", "weight_scale_2")

    def rounded_by(self, x: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor:
        return x


class ModelOptExperts(CodedExperts):
    """Experts that are gated linears.

    gate_up, down: the linears with the stacked tensors of all experts. The rows of up follow the
        rows of gate.
    experts: the linears gate_proj, up_proj and down_proj of each expert, from which `gate_up` and
        `down` are built.
    """

    def __init__(self, experts: Sequence[nn.ModuleDict], activation: nn.Module) -> None:
        super().__init__()
        self.num_experts, self.activation = len(experts), activation
        pairs = [[one["gate_proj"], one["up_proj"]] for one in experts]
        self.gate_up = _stacked(pairs)
        self.down = _stacked([[one["down_proj"]] for one in experts])

    def of_rows(self, x: torch.Tensor, ends: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        gate, up = _product(self.gate_up, x, ends, expert).chunk(2, dim=-1)
        return _product(self.down, self.activation(gate) * up, ends, expert)


def _product(
    linears: Float8, x: torch.Tensor, ends: torch.Tensor, expert: torch.Tensor
) -> torch.Tensor:
    """Returns rows times the weight of their expert. The rows are sorted by expert, and rounded as
    the format rounds them."""
    scale = linears._parameters.get("input_scale")
    x = linears.rounded_by(x, None if scale is None else scale.view(-1, 1)[expert])
    return _grouped_linear(x, linears.weight_of_codes(x.dtype), ends)


def _stacked(parts: Sequence[Sequence[Any]]) -> Float8:
    """Returns a linear with the tensors of all experts, [E, ...].

    `parts` holds, for each expert, the linears whose rows follow each other. Raises ValueError if
    their activations have different scales, and for tensors that the format does not need.
    """
    first = parts[0][0]
    others = {name for own in parts for part in own for name in part.state_dict()} - {*first.needed}
    if others:
        raise ValueError(f"experts: expected {', '.join(first.needed)}, got {', '.join(others)}")
    rows = sum(part.out_features for part in parts[0])
    made = type(first)(first.in_features, rows, {"bias": None})
    for name in first.needed:
        tensors = [[part._parameters[name] for part in own] for own in parts]
        if tensors[0][0].numel() > 1:
            stacked = torch.stack([torch.cat(own) for own in tensors])
        elif all(torch.equal(one, own[0]) for own in tensors for one in own):
            stacked = torch.stack([own[0] for own in tensors])
        elif name == "input_scale":
            raise ValueError(f"{name} of gate_proj and up_proj: expected one number, got two")
        else:
            sizes = [part.out_features for part in parts[0]]
            stacked = torch.stack([torch.cat(own).flatten() for own in tensors])
            stacked = stacked.repeat_interleave(torch.tensor(sizes), 1).unsqueeze(-1)
        made.register_parameter(name, nn.Parameter(stacked, requires_grad=False))
    return made


def _in_steps(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = (x.float() * (1 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)
