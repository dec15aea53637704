"""Sample weights of experts, in every format that they have."""

from __future__ import annotations

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.ops.formats import fp4, fp8_block, mxfp4, nvfp4
from tilewright.ops.formats.division import divided
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.runtime.dtypes import torch_types

# Columns that share a scale of integer codes.
INTEGER_GROUP = 32


def quantized_weight(name: str, dense: torch.Tensor) -> ExpertWeight:
    """A dense weight [E, N, K] in a format of ops.formats.expert_weight.

    Made on the CPU, so that codes are the same wherever they go.
    """
    if name == "dense":
        return ExpertWeight(dense)
    (data, scale, block), factor = _quantized(name, dense.cpu()), None
    if name == "nvfp4":
        factor = (1 + torch.arange(len(dense)) / len(dense)).float().to(dense.device)
    return ExpertWeight(
        data.to(dense.device), name, scale.to(dense.device), block, expert_scale=factor
    )


def _with_signs(data: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns the sign of every other block's scale and codes: the numbers stay what they are."""
    turned = torch.arange(scale.numel()).view(scale.shape).remainder(2).to(torch.uint8)
    signs = (turned * 0x88).repeat_interleave(nvfp4.BLOCK // 2, -1)
    return data ^ signs, (scale.view(torch.uint8) ^ turned << 7).view(scale.dtype)


def _quantized(name: str, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    if name == "fp8":
        codes, scale = fp8_block.quantize_blocks(dense)
        return codes, scale, [fp8_block.BLOCK, fp8_block.BLOCK]
    if name in ("nvfp4", "mxfp4"):
        data, scale = (nvfp4 if name == "nvfp4" else mxfp4).quantize(dense)
        return (*_with_signs(data, scale), []) if name == "nvfp4" else (data, scale, [])
    form, groups = WEIGHT_FORMATS[name], dense.float().unflatten(-1, (-1, INTEGER_GROUP))
    most = 2 ** (form.bits - 1)
    scale = divided(groups.abs().amax(-1), most - 1)
    codes = (groups / scale[..., None]).round().clamp(-most, most - 1).flatten(
        -2
    ) + form.expert_zero
    (dtype,) = torch_types(form.stored)
    stored = codes.to(dtype) if form.packed_axis is None else fp4.pack(codes.to(torch.uint8))
    return stored, scale.to(dense.dtype), [1, INTEGER_GROUP]
