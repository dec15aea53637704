"""Kernels of quantised weights that every compiler release is tried on: each format, few tokens and
many, by fused kernel; and what makes numbers of the codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tilewright.codegen.audit import Expectations
from tilewright.codegen.formats import AWQ_ORDER, Quantization, XScale
from tilewright.codegen.qkv import plan as qkv_plan
from tilewright.codegen.qkv import time as qkv_time
from tilewright.codegen.qkv.quantized_specs import (
    dequantize_problems,
    dequantize_spec,
    order_spec,
    quantized_spec,
)
from tilewright.codegen.qkv.specs import QkvProblem, SwappedConfig, WeightStrides
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target
from tilewright.tools.audit.cases import (
    MODELS,
    SPECIALISED_STACK_BYTES,
    Attention,
    AuditCase,
    audit_cases,
)
from tilewright.tools.audit.lora import lora_cases
from tilewright.tools.audit.mla import mla_cases
from tilewright.tools.audit.mla_attention import mla_attention_cases
from tilewright.tools.audit.moe import moe_cases

TOKEN_COUNTS = (1, 64, 1024)
# Up to so many tokens the time is that of streaming the weights.
MEMORY_BOUND_TOKENS = 16
SCALED_SUMS_REASON = "the sums of each group are scaled before they are added"


def _strides(model: Attention, fmt: str) -> tuple[WeightStrides, WeightStrides, WeightStrides]:
    """As checkpoints have them: rows of words, or columns of them for GPTQ and AWQ."""
    hidden, dim = model.hidden, model.head_dim
    q, kv = model.num_heads * dim, model.num_kv_heads * dim
    made = []
    for rows in (q, kv, kv):
        if fmt == "gptq":
            made.append(WeightStrides(dim, 1, rows))
        elif fmt == "awq":
            made.append(WeightStrides(dim // 8, 1, rows // 8))
        else:
            words = hidden // 8 if fmt == "int4" else hidden
            made.append(WeightStrides(dim * words, words))
    return made[0], made[1], made[2]


def _quantization(model: Attention, fmt: str) -> Quantization:
    hidden = model.hidden
    group = 128 if hidden % 128 == 0 else 64
    q, kv = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    by_row = ((-(-hidden // group), 1),) * 3
    by_column = tuple((1, rows) for rows in (q, kv, kv))
    packed = tuple((1, rows // 8) for rows in (q, kv, kv))
    if fmt == "int4":
        return Quantization("int4_k", "i32", (1, group), "bf16", by_row, zero_point=8)
    if fmt in ("gptq", "awq"):
        order = AWQ_ORDER if fmt == "awq" else ()
        weight_format = "int4_n" if fmt == "awq" else "int4_k"
        base = Quantization(weight_format, "i32", (1, group), "bf16", by_column)
        return replace(base, zero_dtype="i32", zero_strides=packed, packed_zeros=True, order=order)
    one, blocks = ((1, 0),) * 3, ((-(-hidden // 128), 1),) * 3
    rowwise = Quantization("fp8", "fp8e4nv", (1, hidden), "fp32", one)
    blockwise = Quantization("fp8", "fp8e4nv", (128, 128), "fp32", blocks)
    token = XScale("fp32", (1, 0), hidden)
    block = XScale("fp32", (-(-hidden // 128), 1), 128)
    return {
        "int8": replace(rowwise, weight_format="int8", word_dtype="i8"),
        "fp8": rowwise,
        "fp8 block": blockwise,
        "fp8 x fp8": replace(rowwise, x_dtype="fp8e4nv", x_scale=token),
        "fp8 x fp8 block": replace(blockwise, x_dtype="fp8e4nv", x_scale=block),
    }[fmt]


FORMATS = ("int4", "gptq", "awq", "int8", "fp8", "fp8 block", "fp8 x fp8", "fp8 x fp8 block")
# All formats with the first of them, the two that differ most in tiles with the others.
MODEL_FORMATS = {MODELS[0].name: FORMATS}
OTHERS = ("int4", "fp8 x fp8")


def quantized_problem(model: Attention, fmt: str) -> QkvProblem:
    return replace(
        model.problem(),
        weight_strides=_strides(model, fmt),
        quantization=_quantization(model, fmt),
    )


def fresh_sums_reason(constants: Mapping[str, Constant]) -> str:
    """Why a kernel with these constants reads its sums at every step; "" where it does not."""
    widths = [constants.get(name) for name in ("SCALE_COLUMNS", "X_SCALE_BLOCK")]
    hidden = constants.get("HIDDEN")
    grouped = any(
        isinstance(width, int) and isinstance(hidden, int) and width < hidden for width in widths
    )
    return SCALED_SUMS_REASON if grouped else ""


def all_cases(target: Target) -> list[AuditCase]:
    """The kernels of every family."""
    families = (
        *(audit_cases, quantized_cases, lora_cases, moe_cases),
        *(mla_cases, mla_attention_cases),
    )
    return [case for cases in families for case in cases(target)]


def quantized_cases(target: Target) -> list[AuditCase]:
    """For every model, format and token count the best fused kernel by the model, and what makes
    numbers of the largest weight."""
    cases = [
        case
        for model in MODELS[:4]
        for fmt in MODEL_FORMATS.get(model.name, OTHERS)
        for case in _cases(model, fmt, target)
    ]
    distinct = {case.spec: case for case in reversed(cases)}
    return [case for case in cases if distinct[case.spec] is case]


def _cases(model: Attention, fmt: str, target: Target) -> Iterator[AuditCase]:
    problem = quantized_problem(model, fmt)
    name = f"{model.name} {fmt}"
    for tokens in TOKEN_COUNTS:
        ranked = sorted(
            (qkv_time.estimate(problem, config, tokens, target), str(config), config)
            for config in qkv_plan.candidates(problem, tokens, target)
        )
        config = ranked[0][2]
        assert isinstance(config, SwappedConfig)
        spec = quantized_spec(problem, config, target.name)
        assert problem.quantization is not None
        claims = Expectations(
            mma=problem.quantization.x_dtype,
            memory_bound=tokens <= MEMORY_BOUND_TOKENS,
            stack_bytes=SPECIALISED_STACK_BYTES,
            fresh_sums_reason=fresh_sums_reason(dict(spec.constants)),
        )
        yield AuditCase(f"{name} T={tokens}: {config}", spec, claims)
        if config.ordered_x:
            spec = order_spec(problem, config, target.name)
            yield AuditCase(f"{name} T={tokens}: order of x", spec, Expectations())
    numbers = dequantize_spec(dequantize_problems(problem)[0], target.name)
    yield AuditCase(f"{name}: numbers", numbers, Expectations())
