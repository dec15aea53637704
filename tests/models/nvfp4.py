"""Stand-ins for the hub's nvfp4-gemm, with its names, schemas and arithmetic, and linears of
transformers that call them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers.integrations import nvfp4 as library

from tilewright.ops.formats import fp4, scale_layout

LIBRARY = "_nvfp4_gemm_abc1234"
E4M3 = torch.float8_e4m3fn


def decoded(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Decodes packed codes with e4m3 scales [M, K / 16] to [M, K] in float64, without the factor
    for all."""
    codes = fp4.decode(fp4.unpack(packed), torch.float64).unflatten(-1, (-1, 16))
    return (codes * scale.double().unsqueeze(-1)).flatten(-2)


@torch.library.custom_op(f"{LIBRARY}::scaled_fp4_quant", mutates_args=())
def scaled_fp4_quant(
    input: torch.Tensor, input_global_scale: torch.Tensor, is_sf_swizzled_layout: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = input.float().unflatten(-1, (-1, 16))
    scale = (input_global_scale * (blocks.abs().amax(-1) * (1 / 6))).to(E4M3)
    by = torch.where(scale.float() == 0, 0.0, 1 / (scale.float() * (1 / input_global_scale)))
    codes = fp4.pack(fp4.encode(blocks * by.unsqueeze(-1)).flatten(-2))
    if not is_sf_swizzled_layout:
        return codes, scale.view(torch.uint8)
    laid = scale_layout.swizzle(scale.view(torch.uint8))
    return codes, laid.view(torch.int32).reshape(swizzled_sf_shape(*input.shape))


@torch.library.custom_op(f"{LIBRARY}::cutlass_scaled_fp4_mm", mutates_args=())
def cutlass_scaled_fp4_mm(
    a: torch.Tensor, b: torch.Tensor, a_sf: torch.Tensor, b_sf: torch.Tensor, alpha: torch.Tensor
) -> torch.Tensor:
    operands = []
    for codes, laid in ((a, a_sf), (b, b_sf)):
        shape = (len(codes), codes.shape[1] * 2 // 16)
        blocks = scale_layout.layout_shape(*shape)
        scale = scale_layout.unswizzle(laid.view(torch.uint8).reshape(blocks), *shape)
        operands.append(decoded(codes, scale.contiguous().view(E4M3)))
    return (operands[0] @ operands[1].T * alpha.double()).bfloat16()


@torch.library.custom_op(f"{LIBRARY}::nvfp4_gemv", mutates_args=())
def nvfp4_gemv(
    a: torch.Tensor, b: torch.Tensor, b_sf: torch.Tensor, alpha: torch.Tensor
) -> torch.Tensor:
    return (a.double() @ decoded(b, b_sf.view(E4M3)).T * alpha.double()).bfloat16()


def _made(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.size(0), b.size(0)), dtype=torch.bfloat16)


def _quantised(input, input_global_scale, is_sf_swizzled_layout):
    rows, columns = input.shape
    swizzled = input.new_empty(swizzled_sf_shape(rows, columns), dtype=torch.int32)
    plain = input.new_empty((rows, columns // 16), dtype=torch.uint8)
    codes = input.new_empty((rows, columns // 2), dtype=torch.uint8)
    return codes, swizzled if is_sf_swizzled_layout else plain


scaled_fp4_quant.register_fake(_quantised)
cutlass_scaled_fp4_mm.register_fake(lambda a, b, a_sf, b_sf, alpha: _made(a, b))
nvfp4_gemv.register_fake(lambda a, b, b_sf, alpha: _made(a, b))


@dataclass(frozen=True)
class PackedWeight:
    qweight: torch.Tensor
    sf: torch.Tensor
    global_scale: torch.Tensor
    n: int
    k: int
    sf_rowmajor: torch.Tensor


def swizzled_sf_shape(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 128) * 128, -(-(columns // 16) // 4)


def factor_of(x: torch.Tensor) -> torch.Tensor:
    return (448.0 * 6.0 / x.abs().amax().float().clamp(min=1e-12)).reshape(1)


def pack(w: torch.Tensor, device: str = "cpu") -> PackedWeight:
    factor = factor_of(w)
    codes, laid = scaled_fp4_quant(w, factor, True)
    return PackedWeight(codes, laid, factor, *w.shape, scaled_fp4_quant(w, factor, False)[1])


def gemm(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    rows, op = x.reshape(-1, weight.k), getattr(torch.ops, LIBRARY)
    if len(rows) <= 2:
        alpha = (1.0 / weight.global_scale).to(torch.float32).reshape(1)
        y = op.nvfp4_gemv(rows.to(torch.bfloat16), weight.qweight, weight.sf_rowmajor, alpha)
    else:
        factor = factor_of(rows)
        codes, laid = op.scaled_fp4_quant(rows.to(torch.bfloat16), factor, True)
        alpha = 1.0 / (factor * weight.global_scale)
        scales = (sf.view(E4M3) for sf in (laid, weight.sf))
        y = op.cutlass_scaled_fp4_mm(codes, weight.qweight, *scales, alpha)
    return y.reshape(*x.shape[:-1], weight.n)


KERNEL = library.NVFP4Kernel(PackedWeight, gemm, pack, swizzled_sf_shape)


def linear(rows: int, columns: int, seed: int) -> library.NVFP4Linear:
    """Returns an `NVFP4Linear` with a random weight. The caller must make `load_nvfp4_kernel`
    return KERNEL."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    packed, made = pack(weight.bfloat16()), library.NVFP4Linear(columns, rows)
    made.weight, made.weight_sf = packed.qweight, packed.sf
    made.weight_sf_rowmajor, made.weight_global_scale = packed.sf_rowmajor, packed.global_scale
    return made


def exactly(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Computes the linear's result for x [M, K] in float64, without rounding after the codes."""
    scale = module.weight_sf_rowmajor.view(E4M3)
    weight = decoded(module.weight, scale) / module.weight_global_scale.double()
    if len(x) > 2:
        factor = factor_of(x)
        codes, own = scaled_fp4_quant(x, factor, False)
        x = decoded(codes, own.view(E4M3)) / factor.double()
    return x.double() @ weight.T
