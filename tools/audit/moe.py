"""Mixture-of-experts kernels that every compiler release is tried on: published dims, each weight
format, each regime of rows per expert, and the NVFP4 x NVFP4 grouped GEMM in both tile orders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.audit import Expectations
from tilewright.codegen.grouped.codes_specs import CodesConfig
from tilewright.codegen.grouped.scaled_specs import CODE_TYPE
from tilewright.codegen.moe import specs as kernels
from tilewright.codegen.moe.decode import decode_specs, decoded_problem
from tilewright.codegen.moe.plan import plan_moe
from tilewright.codegen.moe.specs import ExpertLayout, GemmConfig, MoeProblem
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.formats.scale_layout import layout_shape
from tilewright.ops.grouped import nvfp4_matmul, quantize_nvfp4
from tilewright.ops.grouped.lowering import chosen
from tilewright.ops.grouped.nvfp4_matmul import Nvfp4MatmulArguments
from tilewright.ops.grouped.quantize_nvfp4 import QuantizeNvfp4Arguments
from tilewright.ops.moe.lowering import specs
from tilewright.tools.audit.cases import SPECIALISED_STACK_BYTES, AuditCase

# One token, decode batches, a chunk of a prefill, a whole one.
TOKEN_COUNTS = (1, 64, 1024, 8192)
ROWS_PER_GROUP = (1, 64, 1024)
# Up to so many rows per expert the time is that of streaming the weights.
MEMORY_BOUND_ROWS = 16
# format -> (rows, columns) that share a scale, its dtype.
SCALES = {
    "dense": ((1, 1), "fp32"),
    "fp8": ((128, 128), "fp32"),
    "int4": ((1, 64), "bf16"),
    "nvfp4": ((1, 16), "fp8e4nv"),
    "mxfp4": ((1, 32), "u8"),
}


@dataclass(frozen=True)
class Mixture:
    """The sparse layers of a published model, or a GPU's share of them.

    formats: what its checkpoints come in. gpt-oss: gate and up in turn, biases, a clamped
    activation, dense weights stored [E, K, N].
    """

    name: str
    hidden: int
    inner: int
    num_experts: int
    num_slots: int
    formats: tuple[str, ...]
    gpt_oss: bool = False

    def problem(self, weight_format: str, dtype: str = "bf16") -> MoeProblem:
        hidden, inner = self.hidden, self.inner
        per_byte = kernels.STORED[weight_format][1]
        n_major = self.gpt_oss and weight_format == "dense"
        both = 2 * inner * hidden // per_byte
        rows = (2 * inner, hidden) if n_major else (hidden // per_byte, inner // per_byte)
        block, scale_dtype = SCALES[weight_format]
        return MoeProblem(
            dtype=dtype,
            id_dtype="i64",
            weight_dtype=dtype,
            num_experts=self.num_experts,
            num_slots=self.num_slots,
            hidden=hidden,
            inner=inner,
            x_stride=hidden,
            weight_strides=(self.num_slots, 1),
            gate_up=ExpertLayout(both, rows[0], n_major),
            down=ExpertLayout(both // 2, rows[1], n_major),
            gated=True,
            interleaved=self.gpt_oss,
            distance=0 if self.gpt_oss else both // 2,
            up_first=False,
            activation="clamped_swiglu" if self.gpt_oss else "silu",
            alpha=1.702,
            limit=7.0 if self.gpt_oss else 0.0,
            format=weight_format,
            scale_block=block,
            scale_dtype=scale_dtype,
            scale_strides=self._scale_strides(weight_format, block),
            factors=(weight_format == "nvfp4",) * 3,
            biases=((2 * inner, 2), (2 * inner, 2), (hidden, 1)) if self.gpt_oss else (None,) * 3,
            bias_dtype=dtype,
        )

    def _scale_strides(
        self, weight_format: str, block: tuple[int, int]
    ) -> tuple[tuple[int, int, int], ...]:
        if weight_format == "dense":
            return ((0, 0, 0),) * 3
        up = (cdiv(self.inner, block[0]), cdiv(self.hidden, block[1]))
        down = (cdiv(self.hidden, block[0]), cdiv(self.inner, block[1]))
        # Gate's and up's rows of one tensor: all of gate's first, or one by one.
        step = 2 * up[1] if self.gpt_oss else up[1]
        gate_up = (2 * up[0] * up[1], step, 1)
        return gate_up, gate_up, (down[0] * down[1], down[1], 1)


MODELS = (
    Mixture("qwen3-30b-a3b", 2048, 768, 128, 8, ("dense", "int4", "nvfp4")),
    Mixture("mixtral-8x7b", 4096, 14336, 8, 2, ("dense",)),
    Mixture("deepseek-v3 of 8", 7168, 2048, 32, 8, ("fp8",)),
    Mixture("gpt-oss-20b", 2880, 2880, 32, 4, ("dense", "mxfp4"), gpt_oss=True),
)
# Rows (N) and columns (K) of the op's own benchmarks, and those that 128 does not divide.
NVFP4_SHAPES = ((4096, 7168), (7168, 2048), (1536, 2048), (2880, 2880))
NVFP4_EXPERTS = 32
ROW_SCALES_REASON = "rows of a group in a tile of fewer than 128 are no blocks of the layout"


def moe_cases(target: Target) -> list[AuditCase]:
    """For every model, format and token count the kernels that the planner picks."""
    cases = [
        case
        for model in MODELS
        for weight_format in model.formats
        for case in _fused_cases(model.name, model.problem(weight_format), target)
    ]
    cases += _fused_cases(f"{MODELS[0].name} fp16", MODELS[0].problem("dense", "fp16"), target)
    coded = replace(MODELS[2].problem("fp8"), coded_rows=True)
    cases += _scaled_cases(MODELS[2].name, coded, target)
    for weight_format, dtype in (("dense", "bf16"), ("dense", "fp16"), ("fp8", "bf16")):
        cases += _grouped_cases(MODELS[2].problem(weight_format, dtype), target)
    cases += [case for rows, inner in NVFP4_SHAPES for case in _nvfp4_cases(rows, inner, target)]
    distinct = {case.spec: case for case in reversed(cases)}
    return [case for case in cases if distinct[case.spec] is case]


def _scaled_cases(model: str, problem: MoeProblem, target: Target) -> Iterator[AuditCase]:
    """Where activations are quantised too: every kernel of a call."""
    for tokens in TOKEN_COUNTS:
        plan = plan_moe(problem, tokens, target)
        few = tokens * problem.num_slots <= MEMORY_BOUND_ROWS * problem.num_experts
        name = f"moe {model} {problem.format} by codes T={tokens}"
        configs = {"up": plan.up, "down": plan.down}
        for step, spec in specs(problem, plan, target.name).items():
            if step in configs:
                claims = gemm_claims(CODE_TYPE, configs[step], memory_bound=few)
                yield AuditCase(f"{name} {step}: {configs[step]}", spec, claims)
            else:
                yield AuditCase(f"{name} {step}", spec, Expectations())


def _fused_cases(model: str, problem: MoeProblem, target: Target) -> Iterator[AuditCase]:
    coded = problem
    for tokens in TOKEN_COUNTS:
        plan = plan_moe(coded, tokens, target)
        routes = tokens * problem.num_slots
        name = f"moe {model} {coded.format} T={tokens}"
        problem = decoded_problem(coded) if plan.decode else coded
        for step, spec in decode_specs(coded, target.name).items() if plan.decode else ():
            yield AuditCase(f"{name} {step}", spec, Expectations())
        for step, spec in kernels.sort_specs(problem, plan.order, target.name).items():
            yield AuditCase(f"{name} {step}", spec, Expectations())
        few = cdiv(routes, problem.num_experts) <= MEMORY_BOUND_ROWS
        claims = _fused_claims(problem, plan.up, few)
        spec = kernels.up_spec(problem, plan.up, target.name)
        yield AuditCase(f"{name} up: {plan.up}", spec, claims)
        claims = _fused_claims(problem, plan.down, few)
        spec = kernels.down_spec(problem, plan.down, target.name)
        yield AuditCase(f"{name} down: {plan.down}", spec, claims)
        spec = kernels.combine_spec(problem, plan.combine, target.name)
        yield AuditCase(f"{name} combine", spec, Expectations())


def _grouped_cases(problem: MoeProblem, target: Target) -> Iterator[AuditCase]:
    """The second GEMM of a mixture as `grouped_matmul`, whose rows stay where they are."""
    alone = replace(kernels.down_problem(problem), ordered=False, ids_dtype="i32")
    for rows in ROWS_PER_GROUP:
        made = chosen(alone, rows * alone.num_groups, target)
        name = f"grouped {problem.dtype} {problem.format} rows={rows}"
        multiplied = replace(problem, format="dense") if made.decode else problem
        claims = _fused_claims(multiplied, made.plan.gemm, rows <= MEMORY_BOUND_ROWS)
        yield AuditCase(f"{name}: {made.plan.gemm}", made.gemm, claims)
        if made.decode is not None:
            yield AuditCase(f"{name} decoded", made.decode, Expectations())


def _fused_claims(problem: MoeProblem, config: GemmConfig, few: bool) -> Expectations:
    claims = gemm_claims(problem.dtype, config, memory_bound=few)
    # What unpacks codes may keep as little on the stack as specialised warps do.
    small = problem.format != "dense"
    return replace(claims, stack_bytes=SPECIALISED_STACK_BYTES) if small else claims


def gemm_claims(mma: str, config: GemmConfig, *, memory_bound: bool = False) -> Expectations:
    """What a grouped GEMM with these tiles has to show."""
    return Expectations(
        mma=mma,
        tma_loads=not isinstance(config, CodesConfig),
        warp_specialized=config.warp_specialize,
        stack_bytes=SPECIALISED_STACK_BYTES if config.warp_specialize else 0,
        memory_bound=memory_bound,
    )


def nvfp4_mma(target: Target) -> str:
    """What NVFP4 x NVFP4 multiplies on a target: itself, where the tensor core knows the format; a
    kernel of bf16 is no other way to do it there."""
    return "nvfp4" if target.has("block_scaled_mma") else "bf16"


def nvfp4_arguments(num_rows: int, rows: int, inner: int) -> Nvfp4MatmulArguments:
    """A call with NVFP4_EXPERTS groups, without memory."""
    index = torch.empty(NVFP4_EXPERTS + 1, dtype=torch.int32, device="meta")
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
    x = torch.empty((NVFP4_EXPERTS, inner), dtype=torch.bfloat16, device="meta")
    scales = x.new_empty(NVFP4_EXPERTS, dtype=torch.float32)
    rounding = QuantizeNvfp4Arguments(x, a.group_offsets, scales)
    (spec,) = quantize_nvfp4.OP.plan_for(rounding, target.name).specs
    yield AuditCase(f"nvfp4 {inner} quantise", spec, Expectations())


def nvfp4_case(name: str, spec: KernelSpec, target: Target) -> AuditCase:
    """The case of one NVFP4 x NVFP4 kernel; on a chip that multiplies the format itself it may not
    do anything else."""
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
