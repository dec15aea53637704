"""Lists the audit cases of `fused_qkv_paged`, whose kernels are compiled with every supported
release of Triton.

The cases cover the sizes of published models and each lowering, with few tokens and with many. They
also cover each option of the op, and each weight format, by itself. Calls use meta tensors, and
their steps are planned in the same way as the steps of a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.qkv.plan import fused_choice, library_choice, ranked
from tilewright.codegen.spec import Constant, KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.qkv import cache_store, qkv_cache
from tilewright.ops.qkv.arguments import FusedQkvArguments
from tilewright.ops.qkv.choices import specs_of
from tilewright.ops.qkv.operands import FusedCall, prepare
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.tools.audit.cases import (
    MMA_ROWS,
    SCALED_SUMS_REASON,
    SHORT_TILE_REASON,
    SPECIALISED_STACK_BYTES,
    AuditCase,
    audited,
    distinct,
    meta,
    planned,
)

# The numbers of tokens in a step: single-sequence decode, decode batches, and prefill.
TOKEN_COUNTS = (1, 64, 512, 4096)
QUANTIZED_COUNTS = (1, 64, 1024)
# Up to this number of tokens, a step takes as long as reading the weights.
MEMORY_BOUND_TOKENS = 16

_PLAIN = AttentionCase(
    "plain",
    num_tokens=TOKEN_COUNTS[-1],
    head_dim=128,
    num_pages=256,
    page_size=64,
    rope_style="half",
    rotary_dim=128,
    table_dtype=torch.bfloat16,
)
_DIMS = replace(_PLAIN, num_kv_heads=8, num_heads=32)
MODELS = (
    replace(_DIMS, name="llama3-8b", hidden=4096),
    replace(_DIMS, name="llama3-70b", hidden=8192, num_heads=64),
    replace(_DIMS, name="qwen3-30b-a3b", hidden=2048, num_kv_heads=4, qk_norm=True),
    replace(
        _DIMS, name="gpt-oss-20b", hidden=2880, num_heads=64, head_dim=64, rotary_dim=64, bias=True
    ),
    replace(
        _DIMS,
        name="glm-4-9b",
        hidden=4096,
        num_kv_heads=2,
        rope_style="interleaved",
        rotary_dim=64,
        bias=True,
    ),
)


def _sequences(number: int) -> dict[str, Any]:
    """Returns the case options for a number of sequences. The first sequence has all the new
    tokens."""
    rest = (0,) * (number - 1)
    return {"new_tokens": (_PLAIN.num_tokens, *rest), "cached_tokens": (0, *rest)}


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_RAGGED = {"slots": "ragged", "slot_dtype": torch.uint32}
# Each name maps to options that change the first model. The audit tries each entry by itself.
OPTIONS: dict[str, dict[str, Any]] = {
    "fp8 cache": {"cache_dtype": _E4M3, "cache_scale": "head"},
    "fp8 cache, multiplied": {
        "cache_dtype": _E5M2,
        "cache_scale": "scalar",
        "cache_scale_multiplies": True,
    },
    "ragged": {**_RAGGED, **_sequences(100)},
    "ragged, many sequences": {**_RAGGED, **_sequences(1000)},
    "block table": {
        "slots": "block_table",
        "slot_dtype": torch.int32,
        "indexing": "torch",
        **_sequences(1),
    },
    "layer norm": {"qk_norm": True, "norm_kind": "layer"},
    "norm after rope": {"qk_norm": True, "norm_after_rope": True, "norm_offset": 1.0},
    "norm of rows": {"qk_norm": True, "norm_width": "row"},
    "delta": {"delta": True},
    "kv heads repeated": {"kv_repeat": 4, "clip": 8.0},
    "input norm": {"input_norm": "rms"},
    "input norm, offset": {"input_norm": "rms", "input_norm_offset": 1.0, "qk_norm": True},
    "input layer norm": {"input_norm": "layer", "bias": True},
    "gates": {"gate_run": 1, "qk_norm": True, "rotary_dim": 32},
    "interleaved to half": {"rope_style": "interleaved_to_half", "rotary_dim": 64},
    "n-major": {"projection": "n_major"},
    "grouped q": {"projection": "grouped"},
}

_FP8 = {"weight_format": "fp8"}
_GPTQ = {"weight_format": "int4_k", "transposed": True, "zeros": "packed"}
_CODES = {**_FP8, "codes": True}
_BYTES = {"words": torch.uint8}
# Each name maps to a way in which checkpoints quantise a weight. A 0 in scale_block stands for K.
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"weight_format": "int4_k", "zero_point": 8, "scale_block": (1, 128)},
    "gptq": {**_GPTQ, "scale_block": (1, 128)},
    "awq": {
        **_GPTQ,
        "weight_format": "int4_n",
        "nibble_order": AWQ_ORDER,
        "scale_block": (1, 128),
    },
    "int8": {"weight_format": "int8", "scale_block": (1, 0)},
    "fp8": {**_FP8, "scale_block": (1, 0)},
    "fp8 block": {**_FP8, "scale_block": (128, 128)},
    "nvfp4": {**_BYTES, "weight_format": "nvfp4", "scale_block": (1, 16), "factor": True},
    "nvfp4 floats": {
        **_BYTES,
        "weight_format": "nvfp4",
        "scale_block": (1, 16),
        "scale_dtype": torch.float32,  # with a scale for each row
    },
    "nf4": {
        **_BYTES,
        "weight_format": "nf4",
        "nibble_order": (1, 0),
        "scale_block": (1, 64),
        "scale_dtype": torch.float32,
    },
    "mxfp4": {**_BYTES, "weight_format": "mxfp4", "scale_block": (1, 32)},
    "fp8 x fp8": {**_CODES, "scale_block": (1, 0), "x_scale": "token"},
    "fp8 x fp8 block": {**_CODES, "scale_block": (128, 128), "x_scale": "block"},
}
# The first model gets every format. The others get the two formats whose tiles differ most.
MODEL_FORMATS = {MODELS[0].name: tuple(FORMATS)}
OTHERS = ("int4", "fp8 x fp8")


def arguments(case: AttentionCase) -> FusedQkvArguments:
    """Returns a call of `fused_qkv_paged` on meta tensors."""
    a = qkv_cache.OP.sample_inputs(case, device="meta")
    changed: dict[str, torch.Tensor] = {}
    if a.delta is not None:
        changed["delta"] = a.delta.contiguous()
    if a.positions is not None:
        changed["positions"] = a.positions.long()
    if case.rotary_dim < case.head_dim and case.rope_style == "interleaved_to_half":
        # The cos and sin tables are slices of tables that cover whole heads.
        for name in ("cos", "sin"):
            wide = meta(a.x.shape[0], case.head_dim, dtype=case.table_dtype)
            changed[name] = wide[:, : case.rotary_dim]
    if case.weight_format == "int8":
        scales = {name: getattr(a, name) for name in ("q_scale", "k_scale", "v_scale")}
        changed |= {name: scale.float() for name, scale in scales.items()}
    return replace(a, **changed)


def quantized(model: AttentionCase, fmt: str) -> AttentionCase:
    """Returns a model whose weights have the format `fmt`, a key of FORMATS."""
    options = FORMATS[fmt]
    rows, columns = options["scale_block"]
    group = columns if model.hidden % max(columns, 1) == 0 else 64
    return replace(model, **{**options, "scale_block": (rows, group or model.hidden)})


@audited("qkv")
def qkv_cases(target: Target) -> list[AuditCase]:
    """Returns, for each model and token count, the fused kernel that the cost model ranks first,
    and the epilogue. For the first model, it also returns both kernels with each option of the
    op."""
    cases = [case for model in MODELS for case in _model_cases(model, target)]
    for option, changes in OPTIONS.items():
        call = prepare(arguments(replace(MODELS[0], **changes)))
        name = f"{MODELS[0].name}, {option}"
        for tokens in (TOKEN_COUNTS[0], TOKEN_COUNTS[-1]):
            cases += _best_fused(f"{name} T={tokens}", call, tokens, target)
        cases.append(_epilogue(name, _apart(call), TOKEN_COUNTS[-1], target))
    return distinct(cases)


def _model_cases(model: AttentionCase, target: Target) -> Iterator[AuditCase]:
    call = prepare(arguments(model))
    for tokens in TOKEN_COUNTS:
        yield from _best_fused(f"{model.name} T={tokens}", call, tokens, target)
        yield _epilogue(f"{model.name} T={tokens}", call, tokens, target)
    packed = prepare(arguments(replace(model, projection="packed")))
    yield _epilogue(f"{model.name} packed", packed, TOKEN_COUNTS[-1], target)
    store = cache_store.OP.sample_inputs(model, device="meta")
    yield from planned(f"{model.name} store", cache_store.OP, store, target)


@audited("qkv")
def quantized_cases(target: Target) -> list[AuditCase]:
    """Returns the kernels of quantised weights.

    For each model, format and token count, it returns the fused kernel that the cost model ranks
    first. For each model and format, it returns the kernel that dequantises the largest weight.
    """
    cases: list[AuditCase] = []
    for model in MODELS[:4]:
        for fmt in MODEL_FORMATS.get(model.name, OTHERS):
            if "fp8" in fmt and not target.has("fp8"):
                continue
            call, name = prepare(arguments(quantized(model, fmt))), f"{model.name} {fmt}"
            for tokens in QUANTIZED_COUNTS:
                cases += _best_fused(f"{name} T={tokens}", call, tokens, target)
            choice = library_choice(call.problem, QUANTIZED_COUNTS[-1], target, True, None)
            numbers = specs_of(call, choice, target)[0]
            cases.append(AuditCase(f"{name}: numbers", numbers, Expectations()))
    return distinct(cases)


def _best_fused(name: str, call: FusedCall, tokens: int, target: Target) -> Iterator[AuditCase]:
    """Yields the kernels of the fused lowering that the cost model ranks first. Yields nothing on a
    chip without TMA."""
    if not target.has("tma"):
        return
    for seconds, config in ranked(call.problem, tokens, target)[:1]:
        choice = fused_choice(call.problem, config, seconds)
        for spec in specs_of(call, choice, target):
            yield AuditCase(f"{name}: {spec.kernel}", spec, fused_claims(spec, tokens))


def fused_claims(spec: KernelSpec, tokens: int) -> Expectations:
    """Returns the rules for a kernel of a fused lowering. A kernel that only rearranges x must keep
    within the limits of the chip, and has no other rules."""
    constants = dict(spec.constants)
    operand = dict(spec.signature)["x_ptr"].removeprefix("*")
    if spec.kernel == "qkv_projection":
        specialised = bool(constants["WARP_SPECIALIZE"])
        stack = SPECIALISED_STACK_BYTES if specialised else 0
        return Expectations(
            mma=operand, tma_loads=True, warp_specialized=specialised, stack_bytes=stack
        )
    if "RUN" in constants:
        return Expectations()  # without tensor cores, and with loads straight to registers
    if spec.kernel == "qkv_projection_swapped" and "q_scale_ptr" in constants:
        short = 2 * int(str(constants["BLOCK_P"])) < MMA_ROWS
        reason = SHORT_TILE_REASON if short else ""
        return Expectations(mma=operand, legacy_mma_reason=reason, memory_bound=True)
    if spec.kernel == "qkv_projection_swapped":
        return Expectations(
            mma=operand,
            memory_bound=tokens <= MEMORY_BOUND_TOKENS,
            stack_bytes=SPECIALISED_STACK_BYTES,
            fresh_sums_reason=fresh_sums_reason(constants),
        )
    return Expectations()


def fresh_sums_reason(constants: Mapping[str, Constant]) -> str:
    """Returns the reason why a kernel with these constants reads its accumulator at every step.
    Returns "" if the kernel does not."""
    widths = [constants.get(name) for name in ("SCALE_COLUMNS", "X_SCALE_BLOCK")]
    hidden = constants.get("HIDDEN")
    grouped = any(
        isinstance(width, int) and isinstance(hidden, int) and width < hidden for width in widths
    )
    return SCALED_SUMS_REASON if grouped and "SCALED" not in constants else ""


def _epilogue(name: str, call: FusedCall, tokens: int, target: Target) -> AuditCase:
    """Returns the case of the kernel after the library's GEMMs, with the tiles for this many
    tokens."""
    choice = library_choice(call.problem, tokens, target, call.rows is not None, None)
    return AuditCase(f"{name}: epilogue", specs_of(call, choice, target)[-1], Expectations())


def _apart(call: FusedCall) -> FusedCall:
    """Returns the call with q, k and v weights that are separate tensors."""
    weights = {name: getattr(call.a, name) for name in ("q_weight", "k_weight", "v_weight")}
    return prepare(replace(call.a, **{name: w.contiguous() for name, w in weights.items()}))
