"""Sample weights of codes: of linears, in every format that they have, and of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS, WeightFormat
from tilewright.ops.formats import fp4, fp8_block, mxfp4, nvfp4
from tilewright.ops.formats.division import divided
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.formats.quantized_weight import pack_nibbles
from tilewright.ops.runtime.dtypes import torch_types
from tilewright.ops.sampling import Sampler

# Columns that share a scale of integer codes.
INTEGER_GROUP = 32


@dataclass(frozen=True, kw_only=True)
class CodedCase:
    """The part of a case that says how its weights are stored.

    dtype: of the values. words: the dtype that nibbles are packed in. zeros: "none", "float", "int"
    (a tensor of its own) or "packed" in words of eight rows. scale_dtype: where a format has
    scales of its own, None for the first of those.
    """

    dtype: torch.dtype = torch.bfloat16
    weight_format: str = "dense"
    scale_block: tuple[int, ...] = ()
    nibble_order: tuple[int, ...] = ()
    words: torch.dtype = torch.int32
    zeros: str = "none"
    scale_dtype: torch.dtype | None = None
    zero_point: int = 0

    @property
    def format_options(self) -> dict[str, Any]:
        """The arguments that say how all weights are stored, by name."""
        return {
            "weight_format": self.weight_format,
            "scale_block": list(self.scale_block),
            "nibble_order": list(self.nibble_order),
            "zero_point": self.zero_point,
        }


def sample_codes(
    case: CodedCase, sampler: Sampler, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored rows, scales and zeros (codes where the case has none) of one weight."""
    shape, form = (rows, columns), WEIGHT_FORMATS[case.weight_format]
    grid = tuple(-(-n // size) for n, size in zip(shape, case.scale_block, strict=True))
    (dtype, *_) = torch_types(form.stored)
    if form.packed_axis is not None:
        codes, size = sampler.integers(0, 16, *shape), 4.0
        stored = pack_nibbles(codes, case.words, form.packed_axis, case.nibble_order)
    elif dtype.is_floating_point:
        stored, size = sampler.normal(*shape, dtype=dtype, scale=8.0), 8.0
    else:
        bits = torch.iinfo(dtype)
        stored, size = sampler.integers(bits.min, bits.max + 1, *shape).to(dtype), 64.0
    scale_dtype = torch.float32 if dtype.is_floating_point else case.dtype
    scales = sampler.scales(*grid, size=columns**-0.5 / size, dtype=scale_dtype)
    if form.scales:
        scales = _stored_scales(form, scales, case.scale_dtype)
    zeros = sampler.integers(0, 16, *grid)
    if case.zeros == "packed":
        zeros = pack_nibbles(zeros, torch.int32, 0, case.nibble_order)
    elif case.zeros == "float":
        zeros = zeros.to(scale_dtype)
    return stored, scales, zeros


def _stored_scales(
    form: WeightFormat, scales: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """Scales as a format stores them; of e8m0 the powers of two below."""
    dtype = dtype or torch_types(form.scales)[0]
    if dtype != torch.uint8:
        return scales.to(dtype)
    return (torch.frexp(scales.float()).exponent - 1 + mxfp4.BIAS).to(torch.uint8)


def quantized_weight(name: str, dense: torch.Tensor, group: int = INTEGER_GROUP) -> ExpertWeight:
    """A dense weight [E, N, K] in a format of ops.formats.expert_weight. group: columns that share
    a scale of integer codes.

    Made on the CPU, so that codes are the same wherever they go; on the meta device nothing is.
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
    """Turns the sign of every other block's scale and codes: the numbers stay what they are."""
    turned = torch.arange(scale.numel(), device=scale.device) % 2
    turned = turned.view(scale.shape).to(torch.uint8)
    signs = (turned * 0x88).repeat_interleave(nvfp4.BLOCK // 2, -1)
    return data ^ signs, (scale.view(torch.uint8) ^ turned << 7).view(scale.dtype)


def _integers(
    form: WeightFormat, dense: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored integer codes, and the scale of each group of columns."""
    groups, most = dense.float().unflatten(-1, (-1, group)), 2 ** (form.bits - 1)
    scale = divided(groups.abs().amax(-1), most - 1)
    codes = (groups / scale[..., None]).round().clamp(-most, most - 1).flatten(-2)
    codes += form.expert_zero
    (dtype,) = torch_types(form.stored)
    stored = codes.to(dtype) if form.packed_axis is None else fp4.pack(codes.to(torch.uint8))
    return stored, scale.to(dense.dtype)
