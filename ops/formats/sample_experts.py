"""Sample weights of experts, in all formats."""

from __future__ import annotations

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS, WeightFormat
from tilewright.ops.formats import fp4, fp8_block, mxfp4, nvfp4
from tilewright.ops.formats.division import divided
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.runtime.dtypes import torch_types

# The number of columns that share a scale of integer codes.
INTEGER_GROUP = 32


def quantized_weight(name: str, dense: torch.Tensor, group: int = INTEGER_GROUP) -> ExpertWeight:
    """Quantises a dense weight [E, N, K] to a format of ops.formats.expert_weight.

    group: the number of columns that share a scale of integer codes. The codes are computed on the
    CPU, so that they are the same for every device. On the meta device, nothing is computed.
    """
    if name == "dense":
        return ExpertWeight(dense)
    device, dense = dense.device, dense if dense.is_meta else dense.cpu()
    if name == "fp8":
        data, scale = fp8_block.quantize_blocks(dense)
        block = [fp8_block.BLOCK, fp8_block.BLOCK]
    elif name in ("nvfp4", "mxfp4"):
        data, scale = (nvfp4 if name == "nvfp4" else mxfp4).quantize(dense)
        block = []
    else:
        data, scale = _integers(WEIGHT_FORMATS[name], dense, group)
        block = [1, group]
    factor = None
    if name == "nvfp4":
        data, scale = _with_signs(data, scale)
        factor = (1 + torch.arange(len(dense)) / len(dense)).float().to(device)
    return ExpertWeight(data.to(device), name, scale.to(device), block, expert_scale=factor)


def _with_signs(data: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flips the signs of the scale and of the codes in every other block. This does not change the
    numbers that the codes stand for."""
    turned = torch.arange(scale.numel(), device=scale.device) % 2
    turned = turned.view(scale.shape).to(torch.uint8)
    signs = (turned * 0x88).repeat_interleave(nvfp4.BLOCK // 2, -1)
    return data ^ signs, (scale.view(torch.uint8) ^ turned << 7).view(scale.dtype)


def _integers(
    form: WeightFormat, dense: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns stored integer codes, and the scale of each group of columns."""
    groups, most = dense.float().unflatten(-1, (-1, group)), 2 ** (form.bits - 1)
    scale = divided(groups.abs().amax(-1), most - 1)
    codes = (groups / scale[..., None]).round().clamp(-most, most - 1).flatten(-2)
    codes += form.expert_zero
    (dtype,) = torch_types(form.stored)
    stored = codes.to(dtype) if form.packed_axis is None else fp4.pack(codes.to(torch.uint8))
    return stored, scale.to(dense.dtype)
