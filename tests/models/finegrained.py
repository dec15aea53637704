"""Stand-ins for the hub's finegrained-fp8, with its names, schemas and arithmetic, and models of
transformers whose weights are e4m3 codes by blocks.

If the result is float64, the operators sum the same codes in float64, and do not round afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations import finegrained_fp8 as library

from tilewright.ops.formats.fp8_block import quantize_blocks

LIBRARY = "_finegrained_fp8_cuda_abc1234"
BLOCK = [128, 128]


def rounded(x: torch.Tensor, block: int) -> torch.Tensor:
    """Rounds rows to codes, and returns the decoded numbers in float64."""
    blocks = x.float().reshape(*x.shape[:-1], -1, block)
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    codes = (blocks / scale.clamp(min=1e-12)).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).reshape(x.shape)


def decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Decodes a weight to [..., N, K] in float64. The last block may be cut off."""
    scale = scale.float()
    for dim in (codes.dim() - 2, codes.dim() - 1):
        scale = scale.repeat_interleave(128, dim).narrow(dim, 0, codes.shape[dim])
    return codes.double() * scale.double()


def product(x, weight, dtype):
    """Computes a product. It is summed in float32, as in the library, or in float64 for a float64
    result."""
    within = torch.float64 if dtype == torch.float64 else torch.float32
    return (x.to(within) @ weight.to(within).transpose(-2, -1)).to(dtype)


@torch.library.custom_op(f"{LIBRARY}::w8a8_block_dynamic_fp8_matmul", mutates_args=())
def block_dynamic(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return product(rounded(A, block_size[1]), decoded(B, Bs), output_dtype or A.dtype)


@torch.library.custom_op(f"{LIBRARY}::w8a8_tensor_dynamic_fp8_matmul", mutates_args=())
def tensor_dynamic(
    A: torch.Tensor, B: torch.Tensor, Bs: torch.Tensor, output_dtype: torch.dtype | None = None
) -> torch.Tensor:
    weight = B.double() * Bs.double()
    return product(rounded(A, A.shape[-1]), weight, output_dtype or A.dtype)


@torch.library.custom_op(f"{LIBRARY}::w8a8_block_static_fp8_matmul", mutates_args=())
def block_static(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    As: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    codes = (A.float() / As).clamp(-448, 448).to(torch.float8_e4m3fn)
    return product(codes.double() * As.double(), decoded(B, Bs), output_dtype or A.dtype)


@torch.library.custom_op(f"{LIBRARY}::w8a8_block_dynamic_fp8_matmul_grouped", mutates_args=())
def block_grouped(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    offsets: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    x, weight = rounded(A, block_size[1]), decoded(B, Bs)
    out = A.new_zeros(len(A), B.shape[1], dtype=output_dtype or A.dtype)
    first = 0
    for expert, end in enumerate(offsets.tolist()):
        out[first:end] = product(x[first:end], weight[expert], out.dtype)
        first = end
    return out


@torch.library.custom_op(f"{LIBRARY}::w8a8_block_dynamic_fp8_matmul_batched", mutates_args=())
def block_batched(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    expert_ids: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    x, weight = rounded(A, block_size[1]), decoded(B, Bs)
    known = expert_ids < len(B)
    out = A.new_zeros(len(A), B.shape[1], dtype=output_dtype or A.dtype)
    rows = product(x[known].unsqueeze(1), weight[expert_ids[known]], out.dtype)
    out[known] = rows.squeeze(1)
    return out


def _fake(A, B, *_, output_dtype=None):
    return A.new_empty(*A.shape[:-1], B.shape[-2], dtype=output_dtype or A.dtype)


block_dynamic.register_fake(lambda A, B, Bs, block, dtype=None: _fake(A, B, output_dtype=dtype))
tensor_dynamic.register_fake(lambda A, B, Bs, dtype=None: _fake(A, B, output_dtype=dtype))
block_static.register_fake(lambda A, B, Bs, As, block, dtype=None: _fake(A, B, output_dtype=dtype))
block_grouped.register_fake(
    lambda A, B, Bs, offsets, counts, block, dtype=None: _fake(A, B, output_dtype=dtype)
)
block_batched.register_fake(
    lambda A, B, Bs, ids, block, dtype=None: _fake(A, B, output_dtype=dtype)
)


def _matmul(A, B, Bs, block_size, output_dtype=None, activation_scale=None):
    """Stands for the library's `matmul_2d`."""
    namespace = getattr(torch.ops, LIBRARY)
    if block_size is None:
        return namespace.w8a8_tensor_dynamic_fp8_matmul(A, B, Bs, output_dtype)
    if activation_scale is not None:
        return namespace.w8a8_block_static_fp8_matmul(
            A, B, Bs, activation_scale, block_size, output_dtype
        )
    return namespace.w8a8_block_dynamic_fp8_matmul(A, B, Bs, block_size, output_dtype)


def _grouped(A, B, Bs, offsets, tokens_per_expert, block_size, output_dtype=None):
    namespace = getattr(torch.ops, LIBRARY)
    return namespace.w8a8_block_dynamic_fp8_matmul_grouped(
        A, B, Bs, offsets, tokens_per_expert, block_size, output_dtype
    )


def _batched(A, B, Bs, expert_ids, block_size, output_dtype=None):
    namespace = getattr(torch.ops, LIBRARY)
    return namespace.w8a8_block_dynamic_fp8_matmul_batched(
        A, B, Bs, expert_ids, block_size, output_dtype
    )


KERNEL = library.FineGrainedFP8(_matmul, _batched, _grouped)


def quantised(model: Any, experts: str = "grouped_mm", scale_fmt: str = "float") -> nn.Module:
    """Returns a dense model whose linears and experts are replaced by the library's modules."""
    dense = {name: tensor.detach() for name, tensor in model.named_parameters()}
    config = transformers.FineGrainedFP8Config(weight_block_size=BLOCK, scale_fmt=scale_fmt)
    library.replace_with_fp8_linear(model, ["lm_head", "gate"], config)
    quantiser = type("Quantiser", (), {"quantization_config": config})()
    convert = library.Fp8Quantize(quantiser)
    for name, module in model.named_modules():
        if isinstance(module, (library.FP8Linear, library.FP8Experts)):
            for own in [o for o in module._parameters if f"{name}.{o}" in dense]:
                whole = f"{name}.{own}"
                codes = convert._quantize_one(whole, dense[whole])
                if len(codes) == 1 and own == "weight" and dense[whole].shape[1] % 128 == 0:
                    codes = with_cut_blocks(whole, dense[whole], scale_fmt)
                for made, tensor in codes.items():
                    parameter = nn.Parameter(tensor, requires_grad=False)
                    module._parameters[made[len(name) + 1 :]] = parameter
    if any(isinstance(module, library.FP8Experts) for module in model.modules()):
        model.set_experts_implementation(experts)
    return model.eval().requires_grad_(False)


def with_cut_blocks(name: str, weight: torch.Tensor, scale_fmt: str) -> dict[str, torch.Tensor]:
    """Returns the codes and scales of a weight whose last rows fill no block, by name.

    DeepSeek-V3's checkpoint has such weights. transformers loads them, but cannot make them.
    """
    scale = quantize_blocks(weight)[1]
    if scale_fmt == "ue8m0":
        scale = scale.log2().ceil().exp2()
    rows, columns = weight.shape
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    stored = torch.float8_e8m0fnu if scale_fmt == "ue8m0" else torch.float32
    return {name: codes, f"{name}_scale_inv": scale.to(stored)}


def linear(
    rows: int, columns: int, seed: int, bias: bool = False, **options: Any
) -> library.FP8Linear:
    """Returns an `FP8Linear` with random codes."""
    generator = torch.Generator().manual_seed(seed)
    options = {"block_size": BLOCK, "has_bias": bias} | options
    made = library.FP8Linear(columns, rows, **options)
    made.weight.data = (
        torch.randn(rows, columns, generator=generator).mul(60).to(torch.float8_e4m3fn)
    )
    scale = torch.rand(made.weight_scale_inv.shape, generator=generator) * 1e-3 + 1e-4
    if options.get("scale_fmt") == "ue8m0":
        scale = scale.log2().ceil().exp2().to(torch.float8_e8m0fnu)
    made.weight_scale_inv.data = scale
    if bias:
        made.bias.data = torch.randn(rows, generator=generator).bfloat16()
    return made.requires_grad_(False)
