"""Linears of dense layers for few tokens that every compiler release is tried on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.targets import Target
from tilewright.ops.mlp import linear_activation, linear_residual
from tilewright.ops.mlp.linear_activation import LinearActivationArguments
from tilewright.ops.mlp.linear_residual import LinearResidualArguments
from tilewright.tools.audit.cases import AuditCase, distinct, meta

# name -> (hidden size, inner size, columns of the attention's result).
MODELS = {
    "Llama-3-8B": (4096, 14336, 4096),
    "Llama-3.2-1B": (2048, 8192, 2048),
    "Qwen3-32B": (5120, 25600, 8192),
}
TOKEN_COUNTS = (1, 32, 64)


def mlp_cases(target: Target) -> list[AuditCase]:
    return distinct([*_model_cases(target), *_plain_cases(target)])


def _model_cases(target: Target) -> Iterator[AuditCase]:
    for name, (hidden, inner, attended) in MODELS.items():
        for tokens in TOKEN_COUNTS:
            x, norm_weight = meta(tokens, hidden), meta(hidden)
            gate, up = meta(inner, hidden), meta(inner, hidden)
            first = LinearActivationArguments(x, gate, up, rms_norm=True, norm_weight=norm_weight)
            yield _case(f"{name} gate and up T={tokens}", linear_activation.OP, first, target)
            for what, columns in (("down", inner), ("output", attended)):
                second = LinearResidualArguments(
                    meta(tokens, columns), meta(hidden, columns), meta(tokens, hidden)
                )
                yield _case(f"{name} {what} T={tokens}", linear_residual.OP, second, target)


def _plain_cases(target: Target) -> Iterator[AuditCase]:
    """Not gated, with biases, in float16; and weights whose rows are contiguous."""
    half = torch.float16
    x, weight, bias = meta(1, 2048, dtype=half), meta(8192, 2048, dtype=half), meta(8192)
    first = LinearActivationArguments(x, weight, bias=bias.float(), activation="gelu_tanh")
    yield _case("not gated", linear_activation.OP, first, target, "fp16")
    wide = meta(1600, 6400).t().contiguous().t()
    second = LinearResidualArguments(meta(16, 6400), wide, meta(16, 1600), bias=meta(1600))
    yield _case("GPT-2 XL down", linear_residual.OP, second, target)


def _case(name: str, op: Any, a: Any, target: Target, dtype: str = "bf16") -> AuditCase:
    (spec,) = op.plan_for(a, target.name).specs
    return AuditCase(f"mlp {name}", spec, Expectations(mma=dtype, memory_bound=True))
