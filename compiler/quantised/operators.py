"""What operators of quantisation libraries compute, in plain PyTorch: they are declared by default.

    y = finegrained_fp8::w8a8_block_dynamic_fp8_matmul(x, codes, scales, [128, 128], bfloat16)
    ⇒   y = _scaled_mm(e4m3(x / s), codes.t(), s, scales.t(), out_dtype=bfloat16)

Each meaning rounds activations by its library's formula. It stands in for the call while patterns
look and does not run itself, so that a product may be spelled in a narrower dtype than the library
sums in: the fused op that takes it has the format's own arithmetic. Parameters have the names of
the operators' schemas. Dimension letters: M rows, K and N of a weight [N, K], E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.formats.fp8_block import BLOCK, E4M3_MAX

_E4M3 = torch.float8_e4m3fn
# The smallest number that finegrained-fp8 divides by.
_LEAST_DIVISOR = 1e-12
#: What the 4-bit codes of bitsandbytes stand for, in units of their block's scale.
CODES_4BIT: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0
    ),
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
        0.1666666716337204, 0.25, 0.0, -0.0052083334885537624, -0.6666666865348816, -1.0,
        -0.3333333432674408, -0.5, -0.1666666716337204, -0.25
    ),
}  # fmt: skip


def _product(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """[M, N] of codes [M, K] and [N, K]; scales by blocks, [M, K / block] and [N / block, ...]."""
    groups, columns = scale.shape[1], codes.shape[1]
    if groups not in (1, -(-columns // BLOCK)):
        raise NotImplementedError(f"{groups} scales along {columns} columns")
    b = weight_scale.float().t()
    return torch._scaled_mm(codes, weight.t(), scale_a=scale, scale_b=b, out_dtype=dtype)


# --- finegrained-fp8 (kernels-community/finegrained-fp8: matmul.py, grouped.py, batched.py) -------


def _rounded(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes [M, K / block, block] of rows [M, K] and their scales, amax / 448 of each block."""
    blocks = x.float().unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / E4M3_MAX
    return (blocks / scale.clamp(min=_LEAST_DIVISOR)).to(_E4M3), scale


def _dynamic(a: Tensor, b: Tensor, scale: Tensor, block: int, dtype: torch.dtype | None) -> Tensor:
    codes, own = _rounded(a.reshape(-1, a.shape[-1]), block)
    y = _product(codes.flatten(-2), own.squeeze(-1), b, scale, dtype or a.dtype)
    return y.view(*a.shape[:-1], len(b))


def block_dynamic(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    return _dynamic(A, B, Bs, block_size[1], output_dtype)


def tensor_dynamic(
    A: Tensor, B: Tensor, Bs: Tensor, output_dtype: torch.dtype | None = None
) -> Tensor:
    rows = Bs.reshape(1, 1).expand(len(B), 1).contiguous()
    return _dynamic(A, B, rows, A.shape[-1], output_dtype)


def block_static(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    As: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    rows = A.reshape(-1, A.shape[-1])
    scale = As.float().reshape(1, 1)
    codes = (rows.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(_E4M3)
    by_block = scale.expand(len(rows), A.shape[-1] // block_size[1])
    y = _product(codes, by_block, B, Bs, output_dtype or A.dtype)
    return y.view(*A.shape[:-1], len(B))


def _rows(x: Tensor, block: int) -> Tensor:
    """Rows [M, K] as the numbers that their codes stand for."""
    codes, scale = _rounded(x, block)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def _experts(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [E, N, K] of codes, scales [E, N / block, K / block] or [E]."""
    by_block = scale.float().reshape(len(codes), *(scale.shape[1:] or (1, 1)))
    for dim in (-2, -1):
        by_block = by_block.repeat_interleave(codes.shape[dim] // by_block.shape[dim], dim)
    return (codes.float() * by_block).to(dtype)


def block_grouped(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    weight = _experts(B, Bs, A.dtype).transpose(-2, -1)
    y = torch._grouped_mm(_rows(A, block_size[1]), weight, offs=offsets)
    return y.to(output_dtype or A.dtype)


def tensor_grouped(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    whole = B.shape[-2:]
    return block_grouped(A, B, Bs, offsets, tokens_per_expert, whole, output_dtype)


def block_batched(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    expert_ids: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """The operator leaves rows of experts from E on as they are; here they are the last one's."""
    own = _experts(B, Bs, A.dtype)[expert_ids.clamp(0, len(B) - 1)]
    y = torch.bmm(own, _rows(A, block_size[1]).unsqueeze(-1)).squeeze(-1)
    return y.to(output_dtype or A.dtype)


def tensor_batched(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    expert_ids: Tensor,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    return block_batched(A, B, Bs, expert_ids, B.shape[-2:], output_dtype)


# --- DeepGEMM (kernels-community/deep-gemm: gemm.hpp), which gets activations as codes ------------


def deep_gemm(
    a_data: Tensor, a_sf: Tensor, b_data: Tensor, b_sf: Tensor, d: Tensor, c: Any, **recipes: Any
) -> None:
    """Scales in fp32 alone: packed ones (Blackwell) are in an order of the kernel's own."""
    if c is not None or a_sf.dtype != torch.float32 or b_sf.dtype != torch.float32:
        raise NotImplementedError("scales that are not fp32, or a sum with another matrix")
    d.copy_(_product(a_data, a_sf, b_data, b_sf, d.dtype))


# --- bitsandbytes (backends/default/ops.py), fbgemm and mslk --------------------------------------


def gemm_4bit(
    A: Tensor,
    B: Tensor,
    shapeB: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Two codes in a byte, the first in its high half; absmax may be in codes itself."""
    if absmax_8bit is not None:
        assert absmax_code is not None
        assert absmax_offset is not None
        outer = absmax.repeat_interleave(256)[: absmax_8bit.numel()]
        absmax = absmax_code[absmax_8bit.int()] * outer + absmax_offset
    packed = B.view(torch.uint8).reshape(-1)
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).reshape(-1, blocksize)
    numbers = [torch.full((), number, device=A.device) for number in CODES_4BIT[quant_type]]
    weight = (
        (torch.stack(numbers)[codes.int()] * absmax.reshape(-1, 1))
        .to(A.dtype)
        .reshape(tuple(shapeB))
    )
    return F.linear(A, weight, bias)


def int8_vectorwise_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, None]:
    if threshold != 0.0:
        raise NotImplementedError("outliers in a dtype of their own")
    largest = A.abs().amax(-1).float()
    codes = torch.round(A * (127.0 / largest.unsqueeze(-1))).to(torch.int8)
    return codes, largest.reshape(-1), None


def int8_scaled_mm(
    A: Tensor,
    B: Tensor,
    row_stats: Tensor,
    col_stats: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    sums = A.reshape(-1, A.shape[-1]).float() @ B.float().t()
    y = sums * (row_stats.reshape(-1, 1) * col_stats.reshape(1, -1)) * 6.200124e-05  # 1 / 127^2
    y = y if bias is None else y + bias
    return y.to(dtype or torch.float16).reshape(*A.shape[:-1], len(B))


def by_rows(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None = None, **_: Any
) -> Tensor:
    """e4m3 by e4m3, a scale for each row of both."""
    codes = XQ.reshape(-1, XQ.shape[-1])
    y = _product(codes, x_scale.reshape(-1, 1), WQ, w_scale.reshape(-1, 1), torch.bfloat16)
    y = y if bias is None else (y + bias).to(torch.bfloat16)
    return y.view(*XQ.shape[:-1], len(WQ))


#: By `kernel::name` of the hub, which stands for all builds, or `namespace::name` of a library.
OPERATORS: dict[str, Callable[..., Any]] = {
    "finegrained_fp8::w8a8_block_dynamic_fp8_matmul": block_dynamic,
    "finegrained_fp8::w8a8_block_dynamic_fp8_matmul_grouped": block_grouped,
    "finegrained_fp8::w8a8_block_dynamic_fp8_matmul_batched": block_batched,
    "finegrained_fp8::w8a8_block_static_fp8_matmul": block_static,
    "finegrained_fp8::w8a8_tensor_dynamic_fp8_matmul": tensor_dynamic,
    "finegrained_fp8::w8a8_tensor_dynamic_fp8_matmul_grouped": tensor_grouped,
    "finegrained_fp8::w8a8_tensor_dynamic_fp8_matmul_batched": tensor_batched,
    "deep_gemm::fp8_fp4_gemm_nt": deep_gemm,
    "bitsandbytes::gemm_4bit": gemm_4bit,
    "bitsandbytes::int8_vectorwise_quant": int8_vectorwise_quant,
    "bitsandbytes::int8_scaled_mm": int8_scaled_mm,
    "fbgemm::f8f8bf16_rowwise": by_rows,
    "mslk::f8f8bf16_rowwise": by_rows,
}
