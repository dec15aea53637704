"""Linears of dense layers for few tokens that every compiler release is tried on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.targets import Target
from tilewright.ops.mlp import linear_activation, linear_residual
from tilewright.ops.mlp.cases import LinearCase
from tilewright.ops.mlp.linear_activation import LinearActivationArguments
from tilewright.ops.mlp.linear_residual import LinearResidualArguments
from tilewright.tools.audit.cases import SCALED_SUMS_REASON, AuditCase, audited, distinct, meta
from tilewright.tools.audit.qkv import FORMATS

# name -> (hidden size, inner size, columns of the attention's result).
MODELS = {
    "Llama-3-8B": (4096, 14336, 4096),
    "Llama-3.2-1B": (2048, 8192, 2048),
    "Qwen3-32B": (5120, 25600, 8192),
}
LAYER_NORMED = {"StarCoder2-7B": (4608, 18432), "Bloom-176B": (14336, 57344)}
TOKEN_COUNTS = (1, 32, 64)
CODED_COUNTS = (1, 64)
# Scales and zeros of groups with K contiguous along the rows, on SM100.
CODES_STACK = 16


@audited("mlp")
def mlp_cases(target: Target) -> list[AuditCase]:
    return distinct([*_model_cases(target), *_plain_cases(target), *_coded_cases(target)])


def _model_cases(target: Target) -> Iterator[AuditCase]:
    for name, (hidden, inner, attended) in MODELS.items():
        for tokens in TOKEN_COUNTS:
            x, norm_weight = meta(tokens, hidden), meta(hidden)
            gate, up = meta(inner, hidden), meta(inner, hidden)
            first = LinearActivationArguments(x, gate, up, rms_norm=True, norm_weight=norm_weight)
            yield from _cases(f"{name} gate and up T={tokens}", linear_activation.OP, first, target)
            for what, columns in (("down", inner), ("output", attended)):
                second = LinearResidualArguments(
                    meta(tokens, columns), meta(hidden, columns), meta(tokens, hidden)
                )
                yield from _cases(f"{name} {what} T={tokens}", linear_residual.OP, second, target)


def _plain_cases(target: Target) -> Iterator[AuditCase]:
    """Not gated, with biases, in float16; and weights whose rows are contiguous."""
    half = torch.float16
    x, weight, bias = meta(1, 2048, dtype=half), meta(8192, 2048, dtype=half), meta(8192)
    first = LinearActivationArguments(x, weight, bias=bias.float(), activation="gelu_tanh")
    yield from _cases("not gated", linear_activation.OP, first, target, "fp16")
    # A layer norm of a row, of the most registers that one takes.
    for name, (hidden, inner) in LAYER_NORMED.items():
        case = LinearCase(
            "", 1, hidden, inner, bias=True, activation="gelu_tanh", norm="layer", layout="plain"
        )
        fourth = linear_activation.sample_inputs(case, "meta")
        yield from _cases(f"{name} up", linear_activation.OP, fourth, target)
    wide = meta(1600, 6400).t().contiguous().t()
    second = LinearResidualArguments(meta(16, 6400), wide, meta(16, 1600), bias=meta(1600))
    yield from _cases("GPT-2 XL down", linear_residual.OP, second, target)
    for tokens in (1, 16):
        case = LinearCase("", tokens, 14336, 3584, norm="rms", norm_offset=1.0)
        third = linear_residual.sample_inputs(case, "meta")
        yield from _cases(f"Gemma-2-9B down T={tokens}", linear_residual.OP, third, target)


def _coded_cases(target: Target) -> Iterator[AuditCase]:
    """Weights of codes, as checkpoints have them, of the first model."""
    hidden, inner, _ = next(iter(MODELS.values()))
    for name, options in FORMATS.items():
        if options.get("codes") or ("fp8" in name and not target.has("fp8")):
            continue
        up, down = (_coded(options, *sizes) for sizes in ((hidden, inner), (inner, hidden)))
        up = replace(up, layout=up.layout.replace("plain", "separate"), norm="rms")
        for tokens in CODED_COUNTS:
            for what, case, op in (
                ("gate and up", up, linear_activation.OP),
                ("down", down, linear_residual.OP),
            ):
                a = op.sample_inputs(replace(case, num_tokens=tokens), "meta")
                yield from _cases(f"Llama-3-8B {name} {what} T={tokens}", op, a, target)


def _coded(options: dict[str, Any], k: int, n: int) -> LinearCase:
    """A linear of an entry of FORMATS."""
    rows, columns = options["scale_block"]
    given = {name: value for name, value in options.items() if name != "transposed"}
    layout = "plain_n_major" if options.get("transposed") else "plain"
    return LinearCase(
        "", **given | {"k": k, "n": n, "layout": layout, "scale_block": (rows, columns or k)}
    )


def _cases(name: str, op: Any, a: Any, target: Target, dtype: str = "bf16") -> Iterator[AuditCase]:
    """The kernels of one call: the product's, and what finishes its result."""
    for number, spec in enumerate(op.plan_for(a, target.name).specs):
        constants = dict(spec.constants)
        grouped = constants.get("SCALE_COLUMNS", a.x.shape[1]) < a.x.shape[1]
        # Of many tokens the products are a library's.
        streamed = spec.kernel.startswith("streamed")
        claims = Expectations(
            mma=dtype if streamed else None,
            memory_bound=streamed,
            stack_bytes=CODES_STACK if "PER" in constants else 0,
            fresh_sums_reason=SCALED_SUMS_REASON if grouped else "",
        )
        yield AuditCase(f"mlp {name}{f', {spec.kernel}' if number else ''}", spec, claims)
