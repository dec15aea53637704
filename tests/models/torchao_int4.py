"""Weights of torchao's two int4 classes, and stand-ins on a CPU for the kernels that multiply them.

The words of `_weight_int4pack_mm` are packed as in PyTorch's `native/cuda/int4mm.cu`, and
`mslk::bf16i4bf16_rowwise` follows its formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

GROUP = 64
_PADDED = 1024


def _word_places(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the row of each word of tiles [N / 8, K / 128, 32, 4], and the four bytes of the
    word, [4, ..], each of two columns. The CUDA kernel computes both for its thread t."""
    n_tile, outer, t, inner = torch.meshgrid(
        torch.arange(rows // 8),
        torch.arange(columns // 128),
        torch.arange(32),
        torch.arange(0, 8, 2),
        indexing="ij",
    )
    first = (outer * 8 + inner) * 16 // 2
    second = first + 16 // 2
    byte = torch.stack((first + t % 4, first + t % 4 + 4, second + t % 4, second + t % 4 + 4))
    return n_tile * 8 + t // 4, byte


def pack_tiles(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes [N, K] of 0 to 15 into words [N / 8, K / 128, 32, 4]."""
    rows, byte = _word_places(*codes.shape)
    word = torch.zeros_like(rows)
    for i in range(4):
        even, odd = codes[rows, 2 * byte[i]].long(), codes[rows, 2 * byte[i] + 1].long()
        word |= even << 4 * i | odd << (16 + 4 * i)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def unpack_tiles(words: torch.Tensor) -> torch.Tensor:
    """Undoes `pack_tiles`."""
    codes = torch.zeros(words.shape[0] * 8, words.shape[1] * 128, dtype=torch.int64)
    rows, byte = _word_places(*codes.shape)
    for i in range(4):
        codes[rows, 2 * byte[i]] = words.long() >> 4 * i & 15
        codes[rows, 2 * byte[i] + 1] = words.long() >> (16 + 4 * i) & 15
    return codes


def _weight(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Decodes codes [N, K] from -8 to 7, with scale and zero [K / group, N], to [N, K] rounded to
    bfloat16."""
    blocks = codes.double().unflatten(-1, (scale.shape[0], -1))
    scale, zero = (part.t().double().unsqueeze(-1) for part in (scale, zero))
    return (blocks * scale + zero).flatten(-2).to(torch.bfloat16)


def _tiled_product(
    a: torch.Tensor, b: torch.Tensor, group: int, scale_and_zero: torch.Tensor
) -> torch.Tensor:
    weight = _weight(unpack_tiles(b) - 8, *scale_and_zero.unbind(-1))
    return (a.float() @ weight.float().t()).to(a.dtype)


def _plain_product(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> torch.Tensor:
    codes = torch.stack((w << 4 >> 4, w >> 4), dim=-1).flatten(-2)
    return (x.float() @ _weight(codes, scale, zero).float().t()).to(x.dtype)


def _install() -> tuple[Any, ...]:
    aten = torch.library.Library("aten", "IMPL")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_weight_int4pack_mm", "CPU"):
        aten.impl("_weight_int4pack_mm", _tiled_product, "CPU")
    mslk = torch.library.Library("mslk", "FRAGMENT")
    if not hasattr(torch.ops.mslk, "bf16i4bf16_rowwise"):
        mslk.define("bf16i4bf16_rowwise(Tensor x, Tensor w, Tensor scale, Tensor zero) -> Tensor")
        mslk.impl("bf16i4bf16_rowwise", _plain_product, "CPU")
        mslk.impl("bf16i4bf16_rowwise", lambda x, w, *_: x.new_empty(len(x), len(w)), "Meta")
    return aten, mslk


_KERNELS = _install()


def quantised(weight: torch.Tensor, tiled: bool) -> torch.Tensor:
    """Quantises a weight [N, K] of bfloat16 as torchao does. The tiled class pads the weight to
    whole tiles, and K to a multiple of 1024."""
    from torchao.quantization import Int4Tensor, Int4TilePackedTo4dTensor
    from torchao.quantization import quant_primitives as library
    from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

    rest = (-weight.shape[1] % _PADDED, -weight.shape[0] % 8) if tiled else (0, 0)
    padded = nn.functional.pad(weight, (0, rest[0], 0, rest[1]))
    block, kind, dtype = (1, GROUP), library.MappingType.ASYMMETRIC, torch.int32
    scale, zero = library._choose_qparams_affine_tinygemm(
        padded, kind, block, dtype, 0, 15, scale_dtype=weight.dtype, zero_point_dtype=weight.dtype
    )
    codes = library._quantize_affine_tinygemm(padded, block, scale, zero, dtype, 0, 15)
    scale, zero = (part.reshape(len(padded), -1) for part in (scale, zero))
    if tiled:
        both = pack_tinygemm_scales_and_zeros(scale, zero, weight.dtype)
        return Int4TilePackedTo4dTensor(pack_tiles(codes), both, list(block), weight.shape)
    signed = (codes - 8).to(torch.int8)
    packed = (signed[:, ::2] & 15) | (signed[:, 1::2] << 4)
    transposed = (part.t().contiguous() for part in (scale, zero))
    return Int4Tensor(packed, *transposed, list(block), weight.shape)


def quantise(model: nn.Module, tiled: bool) -> None:
    """Quantises all linears of a model, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(quantised(module.weight, tiled), requires_grad=False)
