"""Every e8m0 scale and every code of MXFP4, in the kernels of linears, on Triton's interpreter.

`mixed_linear` has no interpreter: `test_mixed.py` executes the machine code of its decoders, and
`tests/codegen/test_code_points.py` has its scales.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import interpret
from tests.powers import BLOCK, POWERS, SIZE, UNIT_EXPONENT, Powers, assert_defined
from tilewright.codegen.targets import SM100
from tilewright.ops.mlp import linear_residual
from tilewright.ops.mlp.linear_residual import LinearResidualArguments

LARGEST = "bfloat16 2^127"


def product(powers: Powers, x: torch.Tensor, kernel: str) -> torch.Tensor:
    weight, scale = powers.weight
    residual = torch.zeros(len(x), SIZE, dtype=x.dtype)
    coded = {"weight_format": "mxfp4", "weight_scale": scale, "scale_block": [1, BLOCK]}
    run = interpret(
        linear_residual.OP, LinearResidualArguments(x, weight, residual, **coded), SM100
    )
    assert [spec.kernel for spec in run.specs] == [kernel]
    return run.outcome.result


@pytest.mark.parametrize("name", [name for name in POWERS if name != LARGEST])
def test_tensor_cores(name):
    powers = POWERS[name]
    assert_defined(product(powers, powers.x, "streamed_linear").abs(), powers)


def test_sums_of_codes_may_be_infinite():
    """The tensor core multiplies x by codes before these are scaled. If a sum is beyond fp32, the
    result is infinite, even if a small scale makes the product finite. Finite results are right."""
    powers = POWERS[LARGEST]
    made = product(powers, powers.x, "streamed_linear").abs()
    wanted = powers.exact.to(made.dtype)
    same = (made == wanted) | (made.isnan() & wanted.isnan())
    assert (same | ~made.isfinite()).all()
    assert same[powers.codes % 8 <= 3].all()


@pytest.mark.parametrize("code", [1, 7, 13])
@pytest.mark.parametrize("name", POWERS)
def test_dot_products(name, code):
    """`tests/ops/moe/test_powers.py` has all codes with the same sums."""
    powers = replace(POWERS[name], codes=POWERS[name].codes[code : code + 1])
    assert_defined(product(powers, powers.x, "dotted_linear").abs(), powers)


# In dot products, an integer stands for a multiple of this number, unless numbers of its run are
# large.
STEP = 2.0**-126


@pytest.mark.parametrize("exponent", [-119, -122, -126])
def test_dot_products_round_tiny_numbers_to_multiples_of_a_step(exponent):
    """Numbers of bfloat16 from 2 ** -119 on are such multiples. Smaller ones are rounded, by at
    most half a step."""
    powers = Powers(torch.bfloat16, 0, POWERS[LARGEST].codes[7:8])
    x = powers.x * ((1 + 127 / 128) * 2.0**exponent)
    exact = x[x != 0].double().abs() * 6
    made = product(powers, x, "dotted_linear").double().abs()[0, 200]
    scale = 2.0 ** (200 - UNIT_EXPONENT)
    most = 0.0 if exponent == -119 else 6 * STEP / 2 * scale
    rounding = 2.0**-9 * (exact * scale)
    assert (made - exact * scale).abs() <= most + rounding
