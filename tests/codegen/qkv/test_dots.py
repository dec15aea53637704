"""The projection of one token by weights of codes without tensor cores, as emitted for SM100, on
Triton's interpreter: against the op's reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.codegen.qkv.test_quantized import in_wide_cache
from tests.codegen.qkv.test_templates import (
    CASES as EPILOGUES,
)
from tests.codegen.qkv.test_templates import (
    OPTIONS,
    check,
    problem_of,
    run_fused,
)
from tests.ops.qkv import plain
from tilewright.codegen.qkv.candidates import candidates, dots_config, fits, wants_dots
from tilewright.codegen.qkv.kernels import DotsConfig, SwappedConfig
from tilewright.codegen.qkv.plan import choose
from tilewright.codegen.qkv.problem import dots_obstacle
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.cases import CODE_CASES
from tilewright.ops.qkv.samples import AttentionCase

BYTES = {"words": torch.uint8}
TABLE = {**BYTES, "nibble_order": (1, 0), "scale_block": (1, 64), "scale_dtype": torch.float32}
INT4 = {"weight_format": "int4_k", "scale_block": (1, 32)}
# Each kind of word, order, scale and zero that the kernel takes.
FORMATS = {
    "int4": {**INT4, "zero_point": 8},
    "int4 bytes": {**INT4, **BYTES, "zeros": "float"},
    "int4 awq": {**INT4, "nibble_order": AWQ_ORDER, "zeros": "packed"},
    "int4 packed zeros": {**INT4, "zeros": "packed", "zero_point": 1},
    "int4 a scale per row": {**INT4, "scale_block": (1, 256), "zero_point": 8},
    "int4 a zero per row": {**INT4, "scale_block": (1, 256), "zeros": "int"},
    "int4 offset": {
        "weight_format": "int4_k_offset",
        **BYTES,
        "zeros": "float",
        "scale_block": (1, 32),
        "zero_point": 8,
        "factor": True,
    },
    "int8": {"weight_format": "int8", "scale_block": (1, 64)},
    "int8 zeros": {
        "weight_format": "int8",
        "scale_block": (1, 32),
        "zeros": "int",
        "zero_point": 1,
    },
    "int8 unsigned": {
        "weight_format": "int8",
        **{"words": torch.uint8, "zero_point": 128, "scale_block": (1, 256)},
    },
    "fp8": {"weight_format": "fp8", "scale_block": (1, 256)},
    "fp8 blocks": {"weight_format": "fp8", "scale_block": (32, 32)},
    "nvfp4": {"weight_format": "nvfp4", **BYTES, "scale_block": (1, 16), "factor": True},
    "mxfp4": {"weight_format": "mxfp4", **BYTES, "scale_block": (1, 32)},
    "nf4": {"weight_format": "nf4", **TABLE},
    "fp4": {"weight_format": "fp4", **TABLE},
}
ONE = AttentionCase(
    "one",
    num_tokens=1,
    hidden=256,
    head_dim=32,
    num_heads=4,
    num_kv_heads=2,
    rope_style="half",
    rotary_dim=32,
)
CONFIGS = {
    "slices of a head": DotsConfig(8, 256, 4),
    "whole heads": DotsConfig(16, 256, 4),
    "split K": DotsConfig(16, 128, 4, split_k=2),
    "split K unevenly": DotsConfig(16, 128, 4, split_k=3),
}


def check_dots(case: AttentionCase, config: DotsConfig) -> None:
    a = in_wide_cache(case)
    tolerances = plain.LIBRARY if plain.rounds_operands(a) or case.input_norm else None
    assert fits(problem_of(a), config, SM100)
    check(qkv_cache.OP, a, lambda a: run_fused(a, config), tolerances)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, dtype: torch.dtype) -> None:
    """Each in bfloat16 with a norm of x, which float16 has no range for."""
    norm = "rms" if dtype == torch.bfloat16 else ""
    case = replace(ONE, dtype=dtype, input_norm=norm, **FORMATS[name])
    configs = [config for config in CONFIGS.values() if config.split_k < 3]
    check_dots(case, configs[list(FORMATS).index(name) % len(configs)])
