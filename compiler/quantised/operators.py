"""States in plain PyTorch what operators of quantisation libraries compute. These operators are
declared by default.

    y = finegrained_fp8::w8a8_block_dynamic_fp8_matmul(x, codes, scales, [128, 128], bfloat16)
    ⇒   y = _scaled_mm(e4m3(x / s), codes.t(), s, scales.t(), out_dtype=bfloat16)

Each meaning rounds activations by the formula of its library. A meaning stands for the call while
patterns look at the graph, and never runs itself. Therefore it may write a product in a narrower
dtype than the dtype in which the library sums. The fused op that replaces the product has the
format's own arithmetic. The parameters have the names of the arguments in the operators' schemas.
Dimension letters: M rows, K and N of a weight [N, K], E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.codegen.formats import TABLES
from tilewright.compiler.quantised import bitsandbytes, nvfp4
from tilewright.ops.formats.fp8_block import BLOCK, E4M3_MAX

_E4M3 = torch.float8_e4m3fn
# The smallest number by which finegrained-fp8 divides.
_LEAST_DIVISOR = 1e-12


class UnfitError(Exception):
    """Raised for a call that a declared meaning cannot replace. Its message says why. If the usual
    hint does not apply, the message also says what to do."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


def _product(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns the product [M, N] of codes [M, K] and codes [N, K]. Their scales are by blocks, [M,
    K / block] and [N / block, ...]."""
    groups, columns = scale.shape[1], codes.shape[1]
    if groups not in (1, -(-columns // BLOCK)):
        raise UnfitError(f"which has no form for {groups} scales along {columns} columns")
    b = weight_scale.float().t()
    if 1 < len(weight_scale) < len(weight) and len(weight) % BLOCK:  # the last block is incomplete
        b = b.repeat_interleave(BLOCK, 1)[:, : len(weight)]
    return torch._scaled_mm(codes, weight.t(), scale_a=scale, scale_b=b, out_dtype=dtype)


# --- finegrained-fp8 (kernels-community/finegrained-fp8: matmul.py, grouped.py, batched.py) -------


def _rounded(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns codes [M, K / block, block] of rows [M, K], and their scales. The scale of a block is
    amax / 448."""
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
    """Returns rows [M, K], rounded to the numbers that their codes stand for."""
    codes, scale = _rounded(x, block)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def _experts(codes: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the weights [E, N, K] for codes and for scales [E, N / block, K / block] or [E]. The
    divisions round up."""
    by_block = scale.float().reshape(len(codes), *(scale.shape[1:] or (1, 1)))
    for dim in (1, 2):
        by_block = by_block.repeat_interleave(block[dim - 1], dim).narrow(dim, 0, codes.shape[dim])
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
    weight = _experts(B, Bs, block_size, A.dtype).transpose(-2, -1)
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
    """Returns each row times the weight of its expert.

    Rows may have an expert number of E or more. The operator does not write such rows; here they
    are multiplied by the last expert.
    """
    own = _experts(B, Bs, block_size, A.dtype)[expert_ids.clamp(0, len(B) - 1)]
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


def mx(**_: Any) -> None:
    raise UnfitError(
        "for scales of 128 columns; here 32 columns share one, for activations too (MX)",
        "load the model decoded where memory allows: FineGrainedFP8Config(dequantize=True)",
    )


# --- fbgemm and mslk ------------------------------------------------------------------------------


def by_rows(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None = None, **_: Any
) -> Tensor:
    """Returns the product of e4m3 codes with e4m3 codes. Both have a scale for each row."""
    codes = XQ.reshape(-1, XQ.shape[-1])
    y = _product(codes, x_scale.reshape(-1, 1), WQ, w_scale.reshape(-1, 1), torch.bfloat16)
    y = y if bias is None else (y + bias).to(torch.bfloat16)
    return y.view(*XQ.shape[:-1], len(WQ))


# --- DeepGEMM -------------------------------------------------------------------------------------


def deep_gemm(
    a_data: Tensor,
    a_sf: Tensor,
    b_data: Tensor,
    b_sf: Tensor,
    d: Tensor,
    c: Tensor | None,
    **_: Any,
) -> None:
    if c is not None:
        raise UnfitError("for a product to which nothing is added; here the argument c is given")
    if b_data.dtype != _E4M3:
        raise UnfitError(f"for weights in float8_e4m3fn; here they are in {b_data.dtype}")
    d.copy_(_product(a_data, _factors(a_sf), b_data, _factors(b_sf), d.dtype))


def deep_gemm_of_groups(**_: Any) -> None:
    raise UnfitError(
        "for adjacent rows of experts; here the rows of each expert begin at a multiple of 128",
        'use experts that are fused: model.set_experts_implementation("grouped_mm")',
    )


def _factors(sf: Tensor) -> Tensor:
    """Returns scales in float32. They may be stored as UE8M0, with four bytes to a word."""
    if sf.dtype != torch.int32:
        return sf
    # A column of size one counts as contiguous, whatever its stride is.
    words = sf.clone(memory_format=torch.contiguous_format)
    return words.view(torch.float8_e8m0fnu).float()


# --- bitsandbytes ---------------------------------------------------------------------------------


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
    """Returns the product of `A` with a quantised weight. Each byte of the weight has two codes,
    with the first in the high nibble, and each block of the flattened weight has a scale.

    Refuses scales that are themselves stored as codes. Another kernel would have to decode such
    scales in each call. It would write scales that are an eighth as large as the weight's codes,
    and the op would read these scales again.
    """
    if absmax_8bit is not None:
        raise UnfitError(
            "for scales in float32; here they are codes too (double quantisation), which each call "
            "would decode",
            "have the scales decoded once, between from_pretrained and torch.compile: "
            "tilewright.compiler.prepare(model)",
        )
    table = torch.tensor(TABLES[quant_type]).to(B.device)
    codes = B.reshape(-1).view(torch.uint8)
    return F.linear(A, bitsandbytes.decoded(codes, table, absmax, shapeB, A.dtype), bias)


def int8_codes(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, None]:
    """Returns codes [.., K], the largest magnitude of each row [M], and None in place of the
    columns of outliers. Rows of zeros have codes 0."""
    if threshold:
        raise UnfitError(
            "for all columns; with a threshold, some columns are multiplied separately"
        )
    largest = A.abs().amax(-1).float()
    by = torch.where(largest == 0, 0.0, 127.0 / largest)
    return torch.round(A * by.unsqueeze(-1)).to(torch.int8), largest.flatten(), None


def int8_product(
    A: Tensor,
    B: Tensor,
    row_stats: Tensor,
    col_stats: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = dtype or torch.float16
    largest = row_stats.view(*A.shape[:-1], 1)
    x, weight = (
        (codes.float() * (scale / 127.0)).to(dtype)
        for codes, scale in ((A, largest), (B, col_stats.view(-1, 1)))
    )
    return F.linear(x, weight, bias if bias is None else bias.to(dtype))


# --- nvfp4-gemm -----------------------------------------------------------------------------------


def nvfp4_gemv(a: Tensor, b: Tensor, b_sf: Tensor, alpha: Tensor) -> Tensor:
    if alpha.numel() != 1:
        raise UnfitError(f"for one factor for all rows; here there are {alpha.numel()}")
    return F.linear(a, nvfp4.decoded(b, b_sf, alpha.reshape(1)).to(a.dtype))


def nvfp4_matmul(**_: Any) -> None:
    raise UnfitError(
        "for activations that PyTorch rounds; here an operator has rounded them to codes",
        "let PyTorch round them as the library does: tilewright.compiler.prepare(model), "
        "between from_pretrained and torch.compile",
    )


#: The meanings by `kernel::name` of the hub, which stands for all builds, or by a library's
#: `namespace::name`.
OPERATORS: dict[str, Callable[..., Any]] = {
    "finegrained_fp8::w8a8_block_dynamic_fp8_matmul": block_dynamic,
    "finegrained_fp8::w8a8_block_dynamic_fp8_matmul_grouped": block_grouped,
    "finegrained_fp8::w8a8_block_dynamic_fp8_matmul_batched": block_batched,
    "finegrained_fp8::w8a8_block_static_fp8_matmul": block_static,
    "finegrained_fp8::w8a8_tensor_dynamic_fp8_matmul": tensor_dynamic,
    "finegrained_fp8::w8a8_tensor_dynamic_fp8_matmul_grouped": tensor_grouped,
    "finegrained_fp8::w8a8_tensor_dynamic_fp8_matmul_batched": tensor_batched,
    "_finegrained_fp8_*::*mx*_matmul*": mx,
    "bitsandbytes::gemm_4bit": gemm_4bit,
    "bitsandbytes::int8_vectorwise_quant": int8_codes,
    "bitsandbytes::int8_scaled_mm": int8_product,
    "deep_gemm::fp8_fp4_gemm_nt": deep_gemm,
    "_deep_gemm_*::m_grouped_*": deep_gemm_of_groups,
    "nvfp4_gemm::nvfp4_gemv": nvfp4_gemv,
    "nvfp4_gemm::cutlass_scaled_fp4_mm": nvfp4_matmul,
    "fbgemm::f8f8bf16_rowwise": by_rows,
    "mslk::f8f8bf16_rowwise": by_rows,
}
