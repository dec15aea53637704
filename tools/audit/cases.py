"""Kernels that every compiler release is tried on: published dims, each lowering, each regime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewright.codegen.audit import Expectations
from tilewright.codegen.qkv import plan as qkv_plan
from tilewright.codegen.qkv import time as qkv_time
from tilewright.codegen.qkv.specs import (
    CacheStrides,
    EpilogueProblem,
    HeadFinish,
    InputStrides,
    QkvProblem,
    Rope,
    TiledConfig,
    WeightStrides,
    epilogue_spec,
    swapped_spec,
    tiled_spec,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.tools.audit.options import option_problems

PAGE_SIZE = 64
# Tokens per step: single-sequence decode, decode batches, prefill.
TOKEN_COUNTS = (1, 64, 512, 4096)
# Warp specialisation keeps up to this many bytes of its own on the stack.
SPECIALISED_STACK_BYTES = 8
# tcgen05 wants this many rows; a shorter tile goes to the older tensor core.
MMA_ROWS = 64
SHORT_TILE_REASON = "a few tokens: each weight is read once and hardly computed with"


@dataclass(frozen=True)
class AuditCase:
    """A kernel, what to call it, and what its machine code has to show."""

    name: str
    spec: KernelSpec
    expectations: Expectations


@dataclass(frozen=True)
class Attention:
    """The attention dims of a published model. rope: "half", "interleaved" or "none"."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: str = "half"
    rotary_dim: int = 0
    bias: bool = False
    norm: bool = False

    def finish(self) -> HeadFinish:
        heads, dim = self.num_kv_heads, self.head_dim
        cache = CacheStrides(PAGE_SIZE, PAGE_SIZE * heads * dim, heads * dim, dim, 1)
        rotary = self.rotary_dim or dim
        rope = Rope(self.rope, rotary, True, "bf16", rotary, rotary)
        return HeadFinish(
            dtype="bf16",
            num_heads=self.num_heads,
            num_kv_heads=heads,
            head_dim=dim,
            k_cache=cache,
            v_cache=cache,
            cache_dtype="bf16",
            rope=None if self.rope == "none" else rope,
            biases=((dim, "bf16"),) * 3 if self.bias else (None,) * 3,
            norms=("bf16",) * 2 if self.norm else (None,) * 2,
        )

    def problem(self) -> QkvProblem:
        strides = WeightStrides(self.head_dim * self.hidden, self.hidden)
        return QkvProblem(self.hidden, self.hidden, (strides,) * 3, self.finish())


MODELS = (
    Attention("llama3-8b", 4096, 32, 8, 128),
    Attention("llama3-70b", 8192, 64, 8, 128),
    Attention("qwen3-30b-a3b", 2048, 32, 4, 128, norm=True),
    Attention("gpt-oss-20b", 2880, 64, 8, 64, bias=True),
    Attention("glm-4-9b", 4096, 32, 2, 128, rope="interleaved", rotary_dim=64, bias=True),
)


def audit_cases(target: Target) -> list[AuditCase]:
    """For every model and token count the best fused kernel by the model, and the epilogue; then
    the first model with each option of the op."""
    cases = [case for model in MODELS for case in _model_cases(model, target)]
    cases += _option_cases(MODELS[0], target)
    distinct = {case.spec: case for case in reversed(cases)}
    return [case for case in cases if distinct[case.spec] is case]


def _model_cases(model: Attention, target: Target) -> Iterator[AuditCase]:
    problem = model.problem()
    for tokens in TOKEN_COUNTS:
        name = f"{model.name} T={tokens}"
        yield from _best_fused(name, problem, tokens, target)
        yield epilogue_case(name, qkv_plan.library_epilogue_problem(problem, False), tokens, target)
    packed = qkv_plan.library_epilogue_problem(problem, True)
    yield epilogue_case(f"{model.name} packed", packed, TOKEN_COUNTS[-1], target)
    yield epilogue_case(f"{model.name} store", _store_problem(problem), TOKEN_COUNTS[-1], target)


def _option_cases(model: Attention, target: Target) -> Iterator[AuditCase]:
    for option, problem in option_problems(model.problem()).items():
        for tokens in (TOKEN_COUNTS[0], TOKEN_COUNTS[-1]):
            yield from _best_fused(f"{model.name}, {option} T={tokens}", problem, tokens, target)
        epilogue = qkv_plan.library_epilogue_problem(problem, False)
        yield epilogue_case(f"{model.name}, {option}", epilogue, TOKEN_COUNTS[-1], target)


def _best_fused(name: str, problem: QkvProblem, tokens: int, target: Target) -> Iterator[AuditCase]:
    """The best fused kernel by the model, where there is one."""
    ranked = sorted(
        (qkv_time.estimate(problem, config, tokens, target), str(config), config)
        for config in qkv_plan.candidates(problem, tokens, target)
    )
    if ranked:
        yield fused_case(name, problem, ranked[0][2], target)


def _store_problem(problem: QkvProblem) -> EpilogueProblem:
    """A cache write alone: keys and values of any strides, no q."""
    finish = replace(problem.finish, num_heads=0, biases=(None,) * 3, norms=(None, None))
    rows = InputStrides(finish.num_kv_heads * finish.head_dim, finish.head_dim, 1)
    return EpilogueProblem(None, rows, rows, finish, finish.dtype)


def fused_case(
    name: str, problem: QkvProblem, config: qkv_plan.Config, target: Target
) -> AuditCase:
    """The case of one fused kernel; its claims follow from its config."""
    if isinstance(config, TiledConfig):
        claims = Expectations(
            mma=problem.finish.dtype,
            tma_loads=True,
            warp_specialized=config.warp_specialize,
            stack_bytes=SPECIALISED_STACK_BYTES if config.warp_specialize else 0,
        )
        spec = tiled_spec(problem, config, target.name)
    else:
        claims = Expectations(
            mma=problem.finish.dtype,
            legacy_mma_reason="" if 2 * config.block_p >= MMA_ROWS else SHORT_TILE_REASON,
            memory_bound=True,
        )
        spec = swapped_spec(problem, config, target.name)
    return AuditCase(f"{name}: {config}", spec, claims)


def epilogue_case(name: str, problem: EpilogueProblem, tokens: int, target: Target) -> AuditCase:
    """The case of an epilogue kernel: no GEMM, so only the limits of the chip."""
    config = qkv_plan.epilogue_config(problem.finish, tokens, target)
    return AuditCase(
        f"{name}: {config}", epilogue_spec(problem, config, target.name), Expectations()
    )
