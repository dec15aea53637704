"""Stand-ins for the hub's deep-gemm, with its names, schemas and arithmetic.

If a float64 result is requested, the operators sum the same codes in float64 and do not round
afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations import deepgemm as library

from tests.models import finegrained

LIBRARY = "_deep_gemm_abc1234"
_RECIPES = (
    "int recipe_0, int recipe_1, int recipe_2, bool has_recipe, int recipe_a_0, int recipe_a_1, "
    "bool has_recipe_a, int recipe_b_0, int recipe_b_1, bool has_recipe_b, str compiled_dims, "
    "bool disable_ue8m0_cast"
)
_CODES = "Tensor a_data, Tensor a_sf, Tensor b_data, Tensor b_sf, Tensor! d"
torch.library.define(f"{LIBRARY}::fp8_fp4_gemm_nt", f"({_CODES}, Tensor? c, {_RECIPES}) -> ()")
torch.library.define(
    f"{LIBRARY}::m_grouped_fp8_fp4_gemm_nt_contiguous",
    f"({_CODES}, Tensor grouped_layout, {_RECIPES}, bool use_psum_layout, "
    "int expected_m_for_psum_layout, bool has_expected_m_for_psum_layout) -> ()",
)
ALIGNMENT = 128


def scales(sf: torch.Tensor) -> torch.Tensor:
    """Returns scales in float64. They may be packed as bytes of UE8M0."""
    if sf.dtype == torch.int32:
        return _dense(sf).view(torch.uint8).view(torch.float8_e8m0fnu).double()
    return sf.double()


def _dense(sf: torch.Tensor) -> torch.Tensor:
    # A column of size one is contiguous with any stride.
    return sf.clone(memory_format=torch.contiguous_format)


def decoded(codes: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """Decodes numbers [.., M, K] to float64."""
    scale = scales(sf)
    for dim in (codes.dim() - 2, codes.dim() - 1):
        block = -(-codes.shape[dim] // scale.shape[dim])
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, codes.shape[dim])
    return codes.double() * scale


@torch.library.impl(f"{LIBRARY}::fp8_fp4_gemm_nt", "CPU")
def gemm_nt(a_data, a_sf, b_data, b_sf, d, c, *recipes):
    assert c is None
    d.copy_(finegrained.product(decoded(a_data, a_sf), decoded(b_data, b_sf), d.dtype))


@torch.library.impl(f"{LIBRARY}::m_grouped_fp8_fp4_gemm_nt_contiguous", "CPU")
def grouped_nt(a_data, a_sf, b_data, b_sf, d, grouped_layout, *options):
    """Computes the grouped product. The library does not write rows of no expert; here they become
    NaN."""
    rows, weight = decoded(a_data, a_sf), decoded(b_data, b_sf)
    d.fill_(torch.nan)
    use_psum_layout = options[-3]
    first = 0
    for expert in range(len(b_data)):
        if use_psum_layout:
            own = torch.arange(first, int(grouped_layout[expert]))
            first = int(grouped_layout[expert])
        else:
            own = (grouped_layout == expert).nonzero().view(-1)
        d[own] = finegrained.product(rows[own], weight[expert], d.dtype)


for _name in ("fp8_fp4_gemm_nt", "m_grouped_fp8_fp4_gemm_nt_contiguous"):
    torch.library.register_fake(f"{LIBRARY}::{_name}")(lambda *args: None)


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes [M, K] and scales [M, K / gran_k]. The calls are those of the hub's
    function."""
    rows, columns = x.shape
    whole = -(-columns // gran_k) * gran_k
    padded = torch.empty((rows, whole), dtype=x.dtype, device=x.device).fill_(0)
    padded[:, :columns] = x
    blocks = padded.view(rows, whole // gran_k, gran_k)
    scale = blocks.abs().float().amax(dim=2).view(rows, whole // gran_k).clamp(1e-4) / 448.0
    if use_ue8m0:
        bits = scale.abs().float().view(torch.int)
        exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
        scale = (exponent.clamp(1, 254) << 23).view(torch.float)
    codes = (blocks * (1.0 / scale.unsqueeze(2))).to(torch.float8_e4m3fn)
    codes = codes.view(rows, whole)[:, :columns].contiguous()
    if use_packed_ue8m0:
        return codes, (scale.view(torch.int) >> 23).to(torch.uint8).view(torch.int)
    return codes, scale


def _flat(recipe: tuple[int, int, int] | None) -> tuple[Any, ...]:
    own = (*(recipe or (0, 0, 0)), recipe is not None)
    return (*own, 0, 0, False, 0, 0, False, "nk", False)


def _matmul(a, b, d, recipe=None):
    getattr(torch.ops, LIBRARY).fp8_fp4_gemm_nt(*a, *b, d, None, *_flat(recipe))


def _grouped(a, b, d, grouped_layout, recipe=None, use_psum_layout=False):
    namespace = getattr(torch.ops, LIBRARY)
    namespace.m_grouped_fp8_fp4_gemm_nt_contiguous(
        *a, *b, d, grouped_layout, *_flat(recipe), use_psum_layout, 0, False
    )


KERNEL = library.DeepGEMM(
    fp8_fp4_matmul=_matmul,
    grouped_fp8_fp4_matmul_nt=_grouped,
    grouped_fp8_fp4_matmul_nn=None,
    grouped_bf16_matmul_nt=None,
    grouped_bf16_matmul_nn=None,
    per_token_cast_to_fp8=per_token_cast_to_fp8,
    transform_sf_into_required_layout=None,
    transform_weights_for_mega_moe=None,
    get_symm_buffer_for_mega_moe=None,
    fp8_fp4_mega_moe=None,
    m_alignment=ALIGNMENT,
)


def use(monkeypatch: Any, blackwell: bool = False) -> None:
    """Makes transformers find the stand-ins, and a Hopper or Blackwell GPU."""
    from transformers.integrations import finegrained_fp8

    monkeypatch.setattr(library, "_DEEPGEMM", KERNEL)
    for module in (library, finegrained_fp8):
        monkeypatch.setattr(module, "is_sm100", lambda: blackwell)
    monkeypatch.setattr(finegrained_fp8, "is_deepgemm_loadable", lambda: True)
