"""Lists the audit cases of mixture-of-experts kernels, which are compiled with every supported
release of Triton.

The cases cover the sizes of published models, each weight format, each regime of rows per expert,
and, in both tile orders, the grouped GEMM of two NVFP4 operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.formats.sample_experts import quantized_weight
from tilewright.ops.formats.scale_layout import layout_shape
from tilewright.ops.grouped import matmul, nvfp4_matmul, quantize_nvfp4
from tilewright.ops.grouped.arguments import GroupedMatmulArguments
from tilewright.ops.grouped.nvfp4_matmul import Nvfp4MatmulArguments
from tilewright.ops.grouped.quantize_nvfp4 import QuantizeNvfp4Arguments
from tilewright.ops.moe import moe, router
from tilewright.ops.moe.arguments import FusedMoeArguments
from tilewright.ops.moe.router import MoeRouterArguments
from tilewright.tools.audit.cases import (
    MMA_ROWS,
    SHORT_TILE_REASON,
    SPECIALISED_STACK_BYTES,
    AuditCase,
    audited,
    distinct,
    meta,
    planned,
)

# The numbers of tokens: one token, decode batches, a chunk of a prefill, and a whole prefill.
TOKEN_COUNTS = (1, 64, 1024, 8192)
ROWS_PER_GROUP = (1, 64, 1024)
# Up to this number of rows per expert, a call takes as long as reading the weights.
MEMORY_BOUND_ROWS = 16
# The number of columns that share an int4 scale.
GROUP = 64


@dataclass(frozen=True)
class Mixture:
    """The MoE layers of a published model, or one GPU's share of them.

    formats: the weight formats of the model's checkpoints.
    gpt_oss: whether the layers are those of gpt-oss: the rows of gate and up alternate, the linears
        have biases, the activation is clamped, and dense weights are stored [E, K, N].
    """

    name: str
    hidden: int
    inner: int
    num_experts: int
    num_slots: int
    formats: tuple[str, ...]
    gpt_oss: bool = False

    def arguments(
        self, tokens: int, weight_format: str, dtype: torch.dtype = torch.bfloat16, **more: Any
    ) -> FusedMoeArguments:
        """Returns a call on meta tensors. gate and up are the halves of one tensor, or its
        alternating rows. They share one scale tensor and one bias tensor."""
        both = self.weight(weight_format, 2 * self.inner, self.hidden, dtype)
        down = self.weight(weight_format, self.hidden, self.inner, dtype)
        if self.gpt_oss:
            more |= {"activation": "clamped_swiglu", "limit": 7.0}
            both = replace(both, bias=meta(self.num_experts, 2 * self.inner, dtype=dtype))
            down = replace(down, bias=meta(self.num_experts, self.hidden, dtype=dtype))
        data, upper = self._gate_and_up(both.data)
        scale, bias = (
            None if t is None else self._gate_and_up(t)[0] for t in (both.scale, both.bias)
        )
        gate = replace(both, data=data, scale=scale, bias=bias)
        for name, weight in (("gate", gate), ("up", replace(gate, data=upper)), ("down", down)):
            more |= getattr(FusedMoeArguments, name).arguments(weight)
        x = meta(tokens, self.hidden, dtype=dtype)
        ids = meta(tokens, self.num_slots, dtype=torch.int64)
        return FusedMoeArguments(x, ids, ids.to(dtype), **more)

    def weight(
        self, weight_format: str, rows: int, columns: int, dtype: torch.dtype
    ) -> ExpertWeight:
        """Returns a weight [E, rows, columns]."""
        if weight_format == "dense" and self.gpt_oss:
            return ExpertWeight(meta(self.num_experts, columns, rows, dtype=dtype).mT)
        dense = meta(self.num_experts, rows, columns, dtype=dtype)
        return quantized_weight(weight_format, dense, GROUP)

    def _gate_and_up(self, both: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (both[:, 0::2], both[:, 1::2]) if self.gpt_oss else both.chunk(2, 1)


MODELS = (
    Mixture("qwen3-30b-a3b", 2048, 768, 128, 8, ("dense", "int4", "nvfp4")),
    Mixture("mixtral-8x7b", 4096, 14336, 8, 2, ("dense",)),
    Mixture("deepseek-v3 of 8", 7168, 2048, 32, 8, ("fp8",)),
    Mixture("gpt-oss-20b", 2880, 2880, 32, 4, ("dense", "mxfp4"), gpt_oss=True),
    Mixture("deepseek-v2-lite", 2048, 1408, 64, 6, ("dense",)),
)
# For each router: (hidden size, experts, experts per token, other options). The weight of the last
# router is float32.
ROUTER_TOKENS = (1, 64, 1024)
OF_TWO = {"num_groups": 8, "top_groups": 4, "group_top": 2, "norm_eps": 1e-20, "scaling": 2.5}
ROUTERS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "qwen3-30b-a3b": (2048, 128, 8, {"normalise": True}),
    "mixtral-8x7b": (4096, 8, 2, {"normalise": True, "weights_dtype": torch.float32}),
    "deepseek-v3": (7168, 256, 8, {"scores": "sigmoid", "normalise": True, **OF_TWO}),
    "gpt-oss-20b": (2880, 32, 4, {"scores": "softmax_of_chosen"}),
    "ernie-4.5-21b": (2560, 64, 6, {"normalise": True, "norm_min": 1e-12}),
}
# The rows (N) and columns (K) of weights: those of the benchmark of `nvfp4_grouped_matmul`, and
# some sizes that are not multiples of 128.
NVFP4_SHAPES = ((4096, 7168), (7168, 2048), (1536, 2048), (2880, 2880))
NVFP4_EXPERTS = 32
ROW_SCALES_REASON = "a tile with fewer than 128 rows is not a whole block of the scale layout"


@audited("moe")
def moe_cases(target: Target) -> list[AuditCase]:
    """Returns the kernels that the planner picks for each model, format and token count."""
    cases: list[AuditCase] = []
    for model in MODELS:
        for weight_format in model.formats:
            cases += _fused_cases(model, target, weight_format)
    cases += _fused_cases(MODELS[0], target, "dense", "fp16 ", dtype=torch.float16)
    for model in (MODELS[0], MODELS[2], MODELS[4]):
        cases += _fused_cases(model, target, "fp8", "by codes ", activation_format="fp8")
    for weight_format, dtype in (
        ("dense", torch.bfloat16), ("dense", torch.float16), ("fp8", torch.bfloat16),
    ):  # fmt: skip
        cases += _grouped_cases(MODELS[2], target, weight_format, dtype)
    cases += [case for name in ROUTERS for case in _router_cases(name, target)]
    cases += [case for rows, inner in NVFP4_SHAPES for case in _nvfp4_cases(rows, inner, target)]
    return distinct(cases)


def _fused_cases(
    model: Mixture, target: Target, weight_format: str, words: str = "", **options: Any
) -> Iterator[AuditCase]:
    for tokens in TOKEN_COUNTS:
        a = model.arguments(tokens, weight_format, **options)
        few = a.expert_ids.numel() <= MEMORY_BOUND_ROWS * model.num_experts
        name = f"moe {model.name} {weight_format} {words}T={tokens} {{kernel}}"
        yield from planned(name, moe.OP, a, target, partial(gemm_claims, memory_bound=few))


def _grouped_cases(
    model: Mixture, target: Target, weight_format: str, dtype: torch.dtype
) -> Iterator[AuditCase]:
    """Yields the cases of the second GEMM of a mixture, as a call of `grouped_matmul`. That op does
    not gather or scatter rows."""
    weight = model.weight(weight_format, model.hidden, model.inner, dtype)
    given = GroupedMatmulArguments.experts.arguments(weight)
    ends = meta(model.num_experts + 1, dtype=torch.int32)
    for rows in ROWS_PER_GROUP:
        x = meta(rows * model.num_experts, model.inner, dtype=dtype)
        a = GroupedMatmulArguments(x, group_offsets=ends, expert_ids=ends[1:], **given)
        name = f"grouped {str(dtype).removeprefix('torch.')} {weight_format} rows={rows} {{kernel}}"
        claims = partial(gemm_claims, memory_bound=rows <= MEMORY_BOUND_ROWS)
        yield from planned(name, matmul.OP, a, target, claims)


def _router_cases(name: str, target: Target) -> Iterator[AuditCase]:
    hidden, experts, slots, options = ROUTERS[name]
    vector = meta(experts, dtype=torch.float32)
    if name == "gpt-oss-20b":
        options = options | {"bias": meta(experts)}
    if options.get("scores") == "sigmoid" or name == "ernie-4.5-21b":
        options = options | {"correction": vector}
    dtype = torch.float32 if name == "ernie-4.5-21b" else torch.bfloat16
    weight = meta(experts, hidden, dtype=dtype)
    for tokens in ROUTER_TOKENS:
        a = MoeRouterArguments(meta(tokens, hidden), weight, slots, **options)
        yield from planned(f"router {name} T={tokens} {{kernel}}", router.OP, a, target, _router)


def _router(spec: KernelSpec) -> Expectations:
    if spec.kernel != "moe_router" or spec.constant("WIDENED"):
        return Expectations()
    few = int(str(spec.constant("BLOCK_T"))) < MMA_ROWS
    return Expectations(mma="bf16", legacy_mma_reason=few * SHORT_TILE_REASON)


def gemm_claims(spec: KernelSpec, memory_bound: bool) -> Expectations:
    """Returns the rules for a grouped GEMM, or for a kernel that is launched with it.

    `memory_bound` says whether the GEMM takes as long as reading the weights.
    """
    constants, types = dict(spec.constants), dict(spec.signature)
    if "SWAPPED" not in constants:
        return Expectations()
    specialised = bool(constants.get("WARP_SPECIALIZE"))
    # Kernels that unpack codes may use as much stack as warp-specialised kernels.
    small = specialised or constants.get("FORMAT", "dense") != "dense"
    return Expectations(
        mma=types["x_ptr"].removeprefix("*"),
        tma_loads="PART_K" not in constants,  # a kernel for codes loads them in words, without TMA
        warp_specialized=specialised,
        stack_bytes=SPECIALISED_STACK_BYTES if small else 0,
        memory_bound=memory_bound,
    )


def nvfp4_mma(target: Target) -> str:
    """Returns the format in which a target must multiply two NVFP4 operands. The format is "nvfp4"
    if the target's tensor cores support that format, otherwise "bf16"."""
    return "nvfp4" if target.has("block_scaled_mma") else "bf16"


def nvfp4_arguments(num_rows: int, rows: int, inner: int) -> Nvfp4MatmulArguments:
    """Returns a call with NVFP4_EXPERTS groups on meta tensors."""
    index = meta(NVFP4_EXPERTS + 1, dtype=torch.int32)
    packed = index.new_empty((num_rows, inner // 2), dtype=torch.uint8)
    scales = index.new_empty(layout_shape(num_rows, inner // 16), dtype=torch.float8_e4m3fn)
    b_shape = layout_shape(rows, inner // 16, (NVFP4_EXPERTS,))
    return Nvfp4MatmulArguments(
        a=packed,
        b=packed.new_empty((NVFP4_EXPERTS, rows, inner // 2)),
        a_scales=scales,
        b_scales=scales.new_empty(b_shape),
        group_offsets=index,
        group_scale_offsets=index[1:],
        expert_ids=index[1:],
        expert_scales=index[1:].float(),
    )


def _nvfp4_cases(rows: int, inner: int, target: Target) -> Iterator[AuditCase]:
    for per_group in ROWS_PER_GROUP:
        a = nvfp4_arguments(per_group * NVFP4_EXPERTS, rows, inner)
        (spec,) = nvfp4_matmul.OP.plan_for(a, target.name).specs
        yield nvfp4_case(f"nvfp4 {rows}x{inner} rows={per_group}", spec, target)
    x = meta(NVFP4_EXPERTS, inner)
    scales = x.new_empty(NVFP4_EXPERTS, dtype=torch.float32)
    rounding = QuantizeNvfp4Arguments(x, a.group_offsets, scales)
    yield from planned(f"nvfp4 {inner} quantise", quantize_nvfp4.OP, rounding, target)


def nvfp4_case(name: str, spec: KernelSpec, target: Target) -> AuditCase:
    """Returns the case of one NVFP4 x NVFP4 kernel. On a chip whose tensor cores support NVFP4, the
    kernel must multiply in that format."""
    swapped, specialised = spec.constant("SWAPPED"), bool(spec.constant("WARP_SPECIALIZE"))
    claims = Expectations(
        mma=nvfp4_mma(target),
        tma_loads=True,
        warp_specialized=specialised,
        stack_bytes=SPECIALISED_STACK_BYTES if specialised else 0,
        memory_bound=bool(swapped),
        row_scales_reason=ROW_SCALES_REASON if swapped else "",
    )
    return AuditCase(name, spec, claims)
