"""Every e8m0 scale and every code of MXFP4, in each kernel of experts, on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import interpret
from tests.powers import (
    CODES,
    POWERS,
    SIZE,
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
EXPERTS = 16


def experts(weight):
    """Returns EXPERTS equal weights and their scales."""
    return (part[None].repeat(EXPERTS, 1, 1) for part in weight)


def arguments(powers: Powers, *, down: bool) -> FusedMoeArguments:
    """A mixture whose one projection has the given scales, while the other changes nothing. A token
    chooses one expert."""
    (gate, gate_scale), (last, last_scale) = experts(powers.weight), experts(unit_weight())
    x = powers.x
    if down:
        (gate, gate_scale), (last, last_scale) = (last, last_scale), (gate, gate_scale)
        # Hidden numbers are not negative.
        x = x.abs()
    tokens = len(x)
    return FusedMoeArguments(
        x,
        torch.arange(tokens)[:, None] % EXPERTS,
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
    run = interpret(moe.OP, arguments(powers, down=down), target)
    assert [spec.kernel for spec in run.specs] == kernels
    assert_defined(run.outcome.result.abs(), powers)


@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.parametrize("name", POWERS)
def test_dot_products(name, first):
    """Scales above 2 ** 102 are not infinite where x is small."""
    powers = POWERS[name]
    check(replace(powers, codes=powers.codes[first : first + 8]), DOTTED, down=True)


@pytest.mark.parametrize("exponent", [0, 1, 100, 127, 228, 229, 252])
def test_dot_products_of_gate(exponent):
    """All hidden numbers have the same scale, since dot products round numbers that are much
    smaller than others beside them."""
    step = max(UNIT_EXPONENT - exponent, STEPS[torch.bfloat16][0])
    powers = Powers(torch.bfloat16, step, CODES[:8], torch.full((SIZE,), exponent))
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
