"""Every e8m0 scale and every code of MXFP4, in each kernel of `grouped_matmul`, on Triton's
interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import interpret
from tests.powers import CODES, POWERS, Powers, assert_defined
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.grouped import matmul
from tilewright.ops.grouped.arguments import GroupedMatmulArguments

BFLOAT16 = [name for name in POWERS if name.startswith("bfloat16")]
FLOAT16 = [name for name in POWERS if name.startswith("float16")]
MANY_ROWS = 240


def arguments(powers: Powers) -> GroupedMatmulArguments:
    """One group."""
    weight, scale = powers.weight
    return GroupedMatmulArguments(
        powers.x,
        weight[None],
        torch.tensor([0, len(powers.codes)]),
        weight_format="mxfp4",
        weight_scale=scale[None],
    )


def check(powers: Powers, kernels, target=SM90) -> None:
    run = interpret(matmul.OP, arguments(powers), target)
    assert [spec.kernel for spec in run.specs] == kernels
    assert_defined(run.outcome.result.abs(), powers)


@pytest.mark.parametrize("name", BFLOAT16)
def test_words(name):
    check(POWERS[name], ["moe_down_codes"])


@pytest.mark.parametrize(
    ("name", "target"), [*((name, SM100) for name in BFLOAT16), *((n, SM90) for n in FLOAT16)]
)
def test_tiles(name, target):
    """Weights may be beyond the range of x's dtype, if it is fp16."""
    check(POWERS[name], ["grouped_gemm"], target)


@pytest.mark.parametrize("name", POWERS)
def test_decoded_weights(name):
    """Many rows have their weights decoded first, unless x's dtype lacks their range."""
    powers = replace(POWERS[name], codes=CODES.repeat(MANY_ROWS // 16))
    decoded = ["dequantize_experts", "grouped_gemm"]
    check(powers, ["grouped_gemm"] if name in FLOAT16 else decoded)
