"""Lists the audit cases of the linears of dense layers. The kernels are compiled with every
supported release of Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.mlp.mixed import MIXED
from tilewright.codegen.targets import Target
from tilewright.ops.contract import FusedOp
from tilewright.ops.mlp import linear_activation, linear_residual, round_rows, scaled_linear
from tilewright.ops.mlp.cases import LinearCase, RoundCase, ScaledCase
from tilewright.ops.mlp.mixed import decodes_many
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.tools.audit.cases import SCALED_SUMS_REASON, AuditCase, audited, distinct, meta
from tilewright.tools.audit.qkv import FORMATS

# For each named model: (hidden size, inner size, columns of the attention's output).
MODELS = {
    "Llama-3-8B": (4096, 14336, 4096),
    "Llama-3.2-1B": (2048, 8192, 2048),
    "Qwen3-32B": (5120, 25600, 8192),
}
LAYER_NORMED = {"StarCoder2-7B": (4608, 18432), "Bloom-176B": (14336, 57344)}
TOKEN_COUNTS = (1, 32, 64)
CODED_COUNTS = (1, 64, 128)
# The numbers of tokens for the kernel that decodes a weight while it multiplies. In some of these
# cases several programs compute one tile together. In the others, each program computes whole
# tiles.
DECODED_COUNTS = (256, 1024)
# The bytes of stack that a kernel may use for the scales and zeros of groups. On SM100 it needs
# them if K is contiguous in the rows of the weight.
CODES_STACK = 16
# The bytes of stack that a kernel with tiles of 128 tokens may use. These tiles are the fastest
# although they spill.
CODES_STACK_FOR_MOST = 40


@audited("mlp")
def mlp_cases(target: Target) -> list[AuditCase]:
    found = [*_model_cases(target), *_plain_cases(target), *_coded_cases(target)]
    return distinct([*found, *_rounding_cases(target), *_scale_cases(target)])


def _model_cases(target: Target) -> Iterator[AuditCase]:
    for name, (hidden, inner, attended) in MODELS.items():
        for tokens in TOKEN_COUNTS:
            gated = LinearCase("", tokens, hidden, inner, layout="separate", norm="rms")
            yield from _cases(f"{name} gate and up T={tokens}", linear_activation.OP, gated, target)
            for what, columns in (("down", inner), ("output", attended)):
                plain = LinearCase("", tokens, columns, hidden)
                yield from _cases(f"{name} {what} T={tokens}", linear_residual.OP, plain, target)


def _plain_cases(target: Target) -> Iterator[AuditCase]:
    """Yields linears that are not gated, with biases, in float16. Also yields linears whose weight
    is stored as [K, N], and linears with a norm before or after them."""
    half = LinearCase("", 1, 2048, 8192, dtype=torch.float16, activation="gelu_tanh")
    yield from _cases("not gated", linear_activation.OP, half, target, bias=meta(8192).float())
    # Each kernel computes the layer norm of whole rows. The longest rows need the most registers.
    for name, (hidden, inner) in LAYER_NORMED.items():
        normed = LinearCase("", 1, hidden, inner, bias=True, activation="gelu_tanh", norm="layer")
        yield from _cases(f"{name} up", linear_activation.OP, normed, target)
    turned = LinearCase("", 16, 6400, 1600, layout="plain_n_major", bias=True)
    yield from _cases("GPT-2 XL down", linear_residual.OP, turned, target)
    for tokens in (1, 16):
        after = LinearCase("", tokens, 14336, 3584, norm="rms", norm_offset=1.0)
        yield from _cases(f"Gemma-2-9B down T={tokens}", linear_residual.OP, after, target)


def _coded_cases(target: Target) -> Iterator[AuditCase]:
    """Yields linears of the first model with quantised weights, in the formats in which checkpoints
    store them."""
    hidden, inner, _ = next(iter(MODELS.values()))
    for name, options in FORMATS.items():
        if options.get("codes") or ("fp8" in name and not target.has("fp8")):
            continue
        up, down = (_coded(options, *sizes) for sizes in ((hidden, inner), (inner, hidden)))
        up = replace(up, layout=up.layout.replace("plain", "separate"), norm="rms")
        linears = (("gate and up", up, linear_activation.OP), ("down", down, linear_residual.OP))
        for tokens, (what, case, op) in product((*CODED_COUNTS, *DECODED_COUNTS), linears):
            some = replace(case, num_tokens=tokens)
            if tokens in CODED_COUNTS or decodes_many(op.sample_inputs(some, "meta"), target):
                yield from _cases(f"Llama-3-8B {name} {what} T={tokens}", op, some, target)


def _rounding_cases(target: Target) -> Iterator[AuditCase]:
    """Yields the roundings of activations to float8 before each linear of a layer."""
    if not target.has("fp8"):
        return
    by_token: dict[str, Any] = {"rounded": True, "zero_scale": 2.0**-7}
    kinds = {"token": by_token, "block": by_token | {"group": 128}}
    kinds["fp32 block"] = {"group": 128, "least_divisor": 1e-12}
    wanted = [*product(list(MODELS)[:1], kinds), *product(list(MODELS)[1:], ["token"])]
    for (name, kind), tokens in product(wanted, CODED_COUNTS):
        hidden, inner, attended = MODELS[name]
        some = {"num_tokens": tokens, **kinds[kind]}
        for what, case in (
            ("normed", RoundCase("", n=hidden, norm="rms", **some)),
            ("output", RoundCase("", n=attended, decoded=True, **some)),
            ("down", RoundCase("", n=inner, decoded=True, **some)),
            ("gated", RoundCase("", n=inner, up=True, activation="silu", **some)),
        ):
            a = round_rows.OP.sample_inputs(case, "meta")
            (spec,) = round_rows.OP.plan_for(a, target.name).specs
            yield AuditCase(f"mlp {name} {what} by {kind} T={tokens}", spec, Expectations())


def _scale_cases(target: Target) -> Iterator[AuditCase]:
    """Yields the kernels that write the scales of a weight for a library's product of codes."""
    kinds = {"rows": ((1, 4096), 1), "blocks": ((128, 128), "blocks")}
    for kind, (block, along) in kinds.items():
        case = ScaledCase("", ("tokens", along), 128, 4096, 14336, weight_format="fp8")
        a = scaled_linear.OP.sample_inputs(replace(case, scale_block=block), "meta")
        a = replace(a, weight_scale=a.weight_scale.bfloat16())
        for spec in scaled_linear.OP.plan_for(a, target.name).specs:
            yield AuditCase(f"mlp Llama-3-8B scales by {kind}", spec, Expectations())


def _coded(options: dict[str, Any], k: int, n: int) -> LinearCase:
    """Returns a linear whose weight has the format that an entry of FORMATS describes."""
    rows, columns = options["scale_block"]
    given = {name: value for name, value in options.items() if name != "transposed"}
    layout = "plain_n_major" if options.get("transposed") else "plain"
    return LinearCase(
        "", **given | {"k": k, "n": n, "layout": layout, "scale_block": (rows, columns or k)}
    )


def _cases(
    name: str, op: FusedOp, case: LinearCase, target: Target, **changes: torch.Tensor
) -> Iterator[AuditCase]:
    """Yields the kernels of one call: the product, and the kernel that finishes its result.

    `changes` has arguments by name. They replace the sample arguments of the case.
    """
    a = replace(op.sample_inputs(case, "meta"), **changes)
    for number, spec in enumerate(op.plan_for(a, target.name).specs):
        constants = dict(spec.constants)
        grouped = constants.get("SCALE_COLUMNS", a.x.shape[1]) < a.x.shape[1]
        grouped &= "SCALED" not in constants
        stack = CODES_STACK_FOR_MOST if constants.get("BLOCK_T") == 128 else CODES_STACK
        stack = stack if "PER" in constants else 0
        # For many tokens, the products are computed by a library, or by a kernel that decodes the
        # weight.
        streamed, decodes = spec.kernel.startswith("streamed"), spec.kernel == MIXED.name
        claims = Expectations(
            mma=TRITON_TYPES[case.dtype] if streamed or decodes else None,
            memory_bound=streamed,
            tma_loads=decodes,
            tma_stores=decodes,
            warp_specialized=decodes,
            stack_bytes=0 if decodes else stack,
            fresh_sums_reason=SCALED_SUMS_REASON if grouped else "",
        )
        yield AuditCase(f"mlp {name}{f', {spec.kernel}' if number else ''}", spec, claims)
