"""Every e8m0 scale and every code of MXFP4, in the kernels of projections, on Triton's interpreter.
Adapters of projections use the same kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter, interpret
from tests.powers import BLOCK, EXPONENTS, POWERS, SIZE, assert_defined
from tilewright.codegen.qkv.plan import library_choice
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.contract import get_op
from tilewright.ops.qkv.choices import choice_steps
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime.program import drive

OP = get_op("fused_qkv_paged")
HEAD = 32
CASE = AttentionCase(
    "powers", weight_format="mxfp4", words=torch.uint8, scale_block=(1, BLOCK), hidden=SIZE,
    num_heads=SIZE // HEAD, num_kv_heads=1, head_dim=HEAD, num_pages=3,
)  # fmt: skip


def arguments(powers):
    """A call whose queries have the given scales, and whose tokens have the given codes."""
    case = replace(CASE, num_tokens=len(powers.codes), dtype=powers.dtype)
    weight, scale = powers.weight
    own = {"q_weight": weight.view(-1, HEAD, SIZE // 2), "q_scale": scale}
    return replace(OP.sample_inputs(case), x=powers.x, **own)


@pytest.mark.parametrize("name", [name for name in POWERS if name != "bfloat16 2^127"])
def test_tensor_cores(name):
    """`tests/ops/mlp/test_powers.py` says why the largest x is not here."""
    powers = POWERS[name]
    run = interpret(OP, arguments(powers), SM100)
    assert [spec.kernel for spec in run.specs] == ["qkv_projection_swapped"]
    assert_defined(run.outcome.result.flatten(1).abs(), powers)


@pytest.mark.parametrize("name", ["bfloat16 2^0", "bfloat16 2^127"])
def test_decoded_weights(name):
    """On a CPU, the library takes subnormal numbers as zeros."""
    powers = replace(POWERS[name], exponents=EXPONENTS.clamp(min=2))
    call = prepare(arguments(powers))
    choice = library_choice(call.problem, len(powers.codes), SM90, False, None)
    machine = Interpreter(replace(SM90, num_sms=3))
    run = drive(choice_steps(call, choice, machine.target), machine)
    assert machine.kernels.count("dequantize_weight") == 3
    assert_defined(run.outcome.result.flatten(1).abs(), powers)
