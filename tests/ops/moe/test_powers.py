"""Every e8m0 scale and every code of MXFP4, in each kernel of experts, on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.interpreted import interpret
from tests.powers import (
    BLOCK,
    CODES,
    EXPONENTS,
    POWERS,
    STEPS,
    UNIT_EXPONENT,
    Powers,
    assert_defined,
    unit_weight,
)
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.moe import moe
from tilewright.ops.moe.arguments import FusedMoeArguments

DOTTED = ["moe_up_dotted", "moe_down_dotted"]
WORDS = ["moe_order", "moe_up_codes", "moe_down_codes", "moe_combine"]
TILES = ["moe_order", "moe_up", "grouped_gemm", "moe_combine"]
# Dot products are chosen if few tokens have the same expert. The other kernels are interpreted for
# each expert that a token has.
MANY_EXPERTS, FEW_EXPERTS = 16, 4


def arguments(powers: Powers, experts: int, *, down: bool) -> FusedMoeArguments:
    """A mixture whose one projection has the given scales, while the other changes nothing. A token
    chooses one expert."""
    rows, columns = len(powers.exponents), powers.columns
    (gate, gate_scale), (last, last_scale) = (
        (part[None].repeat(experts, 1, 1) for part in weight)
        for weight in (powers.weight, unit_weight(columns, rows))
    )
    x = powers.x
    if down:
        (gate, gate_scale), (last, last_scale) = (last, last_scale), (gate, gate_scale)
        # Hidden numbers are not negative.
        x = F.pad(x.abs(), (0, rows - columns))
    tokens = len(x)
    return FusedMoeArguments(
        x,
        torch.arange(tokens)[:, None] % experts,
        torch.ones(tokens, 1),
        gate,
        None,
        last,
        activation="relu",
        weight_format="mxfp4",
        gate_scale=gate_scale,
        down_scale=last_scale,
    )


def check(powers: Powers, kernels, target=SM90, *, down: bool) -> None:
    experts = MANY_EXPERTS if kernels == DOTTED else FEW_EXPERTS
    run = interpret(moe.OP, arguments(powers, experts, down=down), target)
    assert [spec.kernel for spec in run.specs] == kernels
    assert_defined(run.outcome.result.abs()[:, : len(powers.exponents)], powers)


# Every 16th exponent, and the largest, whose scales may be infinite or NaN.
SOME_EXPONENTS = torch.cat([EXPONENTS[::16], EXPONENTS[240:]])


@pytest.mark.parametrize(
    ("codes", "exponents", "columns"),
    [
        # The second code lies in another block of columns.
        pytest.param(CODES[[1, 15]], EXPONENTS, 2 * BLOCK, id="every scale"),
        pytest.param(CODES[:8], SOME_EXPONENTS, BLOCK, id="codes"),
        pytest.param(CODES[8:], SOME_EXPONENTS, BLOCK, id="negative codes"),
    ],
)
@pytest.mark.parametrize("name", POWERS)
def test_dot_products(name, codes, exponents, columns):
    """Scales above 2 ** 102 are not infinite where x is small. The smallest and the largest code
    are multiplied by every scale, and every code by some scales."""
    powers = replace(POWERS[name], codes=codes, exponents=exponents, columns=columns)
    check(powers, DOTTED, down=True)


@pytest.mark.parametrize("exponent", [0, 1, 100, 127, 228, 229, 252])
def test_dot_products_of_gate(exponent):
    """All hidden numbers have the same scale, since dot products round numbers that are much
    smaller than others beside them."""
    step = max(UNIT_EXPONENT - exponent, STEPS[torch.bfloat16][0])
    powers = Powers(torch.bfloat16, step, CODES[:8], torch.full((BLOCK,), exponent), 2 * BLOCK)
    check(powers, DOTTED, down=False)


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("name", [name for name in POWERS if name.startswith("bfloat16")])
def test_words(name, down):
    check(POWERS[name] if down else POWERS[name].finite, WORDS, down=down)


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, SM100) for name in POWERS),
        *((name, SM90) for name in POWERS if name.startswith("float16")),
    ],
)
def test_tiles(name, target, down):
    """Weights may be beyond the range of x's dtype, if it is fp16."""
    # A row of `down` multiplies all hidden numbers, so that none may be infinite or NaN.
    check(POWERS[name] if down else POWERS[name].finite, TILES, target, down=down)
