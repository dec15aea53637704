"""Compares the CUDA lowerings of quantised weights at real sizes with the reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.agreement import in_float64, with_fresh_caches
from tests.ops.qkv import plain
from tests.ops.qkv.test_lowerings_gpu import LLAMA as VALUES
from tests.ops.qkv.test_lowerings_gpu import results
from tilewright.codegen.qkv.candidates import candidates
from tilewright.codegen.qkv.plan import LoweringChoice, fused_choice, library_choice
from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.arguments import FusedQkvArguments
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.runtime.device import device_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

LLAMA = replace(VALUES, hidden=1024, weight_format="int4_k", scale_block=(1, 128))
GPTQ = replace(LLAMA, transposed=True, zeros="packed", zero_point=1, dtype=torch.float16)
AWQ = replace(
    LLAMA, weight_format="int4_n", transposed=True, zeros="packed", nibble_order=AWQ_ORDER
)
FP8 = replace(LLAMA, weight_format="fp8")
CODES = replace(FP8, scale_block=(1, 1024), codes=True, x_scale="token")
BYTES = replace(LLAMA, words=torch.uint8)
SIXTEENS = replace(BYTES, scale_block=(1, 16), zero_point=8)
NVFP4 = replace(BYTES, weight_format="nvfp4", scale_block=(1, 16))
NF4 = replace(
    BYTES,
    weight_format="nf4",
    nibble_order=(1, 0),
    scale_block=(1, 64),
    scale_dtype=torch.float32,
)
# Sizes for which tiles have fewer rows than the tiles of wgmma.
SHORT = {"head_dim": 32, "rotary_dim": 32}
CASES = {
    "nibbles": replace(LLAMA, zero_point=8),
    "nibbles, 300 tokens": replace(LLAMA, num_tokens=300, zeros="float"),
    "nibbles, groups of 32": replace(LLAMA, scale_block=(1, 32), zero_point=8, bias=True),
    "nibbles, K 960": replace(LLAMA, scale_block=(1, 64), hidden=960, zeros="int"),
    "bytes of nibbles": replace(LLAMA, words=torch.uint8, zeros="int", qk_norm=True),
    "bytes of nibbles, high first": replace(LLAMA, words=torch.uint8, nibble_order=(1, 0)),
    "gptq": GPTQ,
    "gptq, packed, 300 tokens": replace(GPTQ, num_tokens=300, projection="packed"),
    "awq": AWQ,
    "awq, interleaved": replace(AWQ, rope_style="interleaved", rotary_dim=64),
    "awq, packed, head_dim 64": replace(AWQ, projection="packed", head_dim=64, rotary_dim=64),
    "int8": replace(LLAMA, weight_format="int8", scale_block=(1, 1024)),
    "int8 with zeros": replace(LLAMA, weight_format="int8", zeros="int", zero_point=3),
    "fp8": replace(FP8, scale_block=(1, 1024)),
    "fp8 blocks": replace(FP8, scale_block=(128, 128), num_tokens=300),
    "fp8 tensor": replace(FP8, scale_block=(1024, 1024), qk_norm=True),
    "fp8 x": CODES,
    "fp8 x, a scale for all": replace(CODES, x_scale="tensor", scale_block=(1024, 1024)),
    "fp8 x, blocks": replace(CODES, x_scale="block", scale_block=(128, 128)),
    "fp8 x, blocks, 700 tokens": replace(
        CODES, x_scale="block", scale_block=(128, 128), num_tokens=700
    ),
    "k alone": replace(AWQ, writes_v=False),
    "groups of 16, without a kernel": replace(LLAMA, scale_block=(1, 16)),
    "bytes, groups of 16": SIXTEENS,
    "bytes, groups of 16, short tiles": replace(SIXTEENS, zeros="int", **SHORT),
    "bytes of rows, groups of 16, short tiles": replace(SIXTEENS, weight_format="int4_n", **SHORT),
    "bytes, groups of 48, without a kernel": replace(SIXTEENS, scale_block=(1, 48), hidden=960),
    "nf4": NF4,
    "nf4, K major": replace(NF4, transposed=True),
    "fp4, 300 tokens": replace(NF4, weight_format="fp4", num_tokens=300, dtype=torch.float16),
    "nvfp4": NVFP4,
    "nvfp4, one token": replace(NVFP4, num_tokens=1, qk_norm=True),
    "nvfp4, 300 tokens": replace(NVFP4, num_tokens=300, projection="packed"),
    "nvfp4, short tiles": replace(NVFP4, **SHORT),
    "nvfp4, one token, short tiles": replace(NVFP4, num_tokens=1, **SHORT),
    "nvfp4, floats as scales": replace(NVFP4, scale_dtype=torch.float32, dtype=torch.float16),
    "mxfp4": replace(BYTES, weight_format="mxfp4", scale_block=(1, 32)),
    "mxfp4, short tiles": replace(BYTES, weight_format="mxfp4", scale_block=(1, 32), **SHORT),
    "row norm": replace(CODES, qk_norm=True, norm_width="row"),
}
# One of this many configs is tested.
SHARE = 13


def choices(a: FusedQkvArguments) -> list[LoweringChoice]:
    call, target = prepare(a), device_target(a.x.device)
    assert target is not None
    tokens = a.x.shape[0]
    tried = candidates(call.problem, tokens, target)[::SHARE]
    fused = [fused_choice(call.problem, config, 0.0) for config in tried]
    return [*fused, library_choice(call.problem, tokens, target, True, None)]


@pytest.mark.parametrize("name", CASES)
def test_lowerings_are_right_and_repeat_themselves(name: str) -> None:
    case = CASES[name]
    a = qkv_cache.OP.sample_inputs(case, device="cuda")
    exact = in_float64(a)
    want: list[Any] = [qkv_cache.reference(exact), exact.k_cache]
    want += [] if exact.v_cache is None else [exact.v_cache]
    tolerance = qkv_cache.OP.tolerances[a.value_dtype]
    if case.codes:
        # The tensor core adds up to 128 products of 8-bit floats in about 14 bits.
        tolerance = replace(tolerance, of_rms=2.0**-8)
    if plain.rounds_operands(a):
        tolerance = plain.LIBRARY[a.value_dtype]
    tried = choices(a)
    without = case.norm_width == "row" or "without a kernel" in name
    assert (len(tried) == 1) == without
    for choice in tried:
        first, second = (results(with_fresh_caches(a), choice) for _ in range(2))
        for got, again, right in zip(first, second, want, strict=True):
            if choice.name == "library":
                # The library path rounds the weight, and rounds between its GEMM and the epilogue,
                # as the graph does.
                assert (got - right).norm() < 2.0**-7 * right.norm(), choice.reason
            else:
                assert tolerance.problem(got, right) is None, choice.reason
            assert torch.equal(got, again), choice.reason


@pytest.mark.parametrize(
    "name", ["nibbles", "gptq", "awq", "fp8 blocks", "nf4", "fp4, 300 tokens", "nvfp4", "mxfp4"]
)
def test_never_less_accurate_than_the_graph(name: str) -> None:
    """Compares with w = bf16((code - zero) * scale) and a GEMM with this w, both against
    float64."""
    case = replace(CASES[name], rope_style="none", rotary_dim=0, num_tokens=64)
    a = qkv_cache.OP.sample_inputs(case, device="cuda")
    exact = qkv_cache.reference(in_float64(a))
    rounded = [*choices(a)][-1]
    graph = (results(with_fresh_caches(a), rounded)[0].double() - exact).norm()
    for choice in choices(a)[:-1]:
        ours = (results(with_fresh_caches(a), choice)[0].double() - exact).norm()
        # bfloat16 holds NVFP4's products of number and scale exactly. Both multiply the same
        # weight, and differ only by the order of a sum in fp32.
        assert ours <= graph * (1 + 2.0**-12), choice.reason
