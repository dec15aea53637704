"""Ops compute the same results from e8m0 scales of float8 codes as from the numbers for which the
scales stand, in each kernel that reads scales, on Triton's interpreter.

`tests/codegen/test_code_points.py` has all 256 scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.interpreted import interpret
from tests.ops.mla.test_coded_heads import Coded
from tilewright.codegen.targets import SM90, Target
from tilewright.ops.contract import get_op
from tilewright.ops.formats import e8m0
from tilewright.ops.formats.sample_codes import stored_scales


@dataclass(frozen=True)
class Call:
    """A sample call of an op, or given arguments.

    Attributes:
        kernel: A kernel that reads the scales.
        case: The name of the case from which the sample is made.
        changes: Changes of the case.
    """

    op: str
    kernel: str
    case: str = ""
    changes: Sequence[tuple[str, Any]] = ()
    target: Target = SM90
    given: Any = None

    @property
    def arguments(self) -> Any:
        if self.given is not None:
            return self.given.made()[0]
        op = get_op(self.op)
        (case,) = [one for one in op.cases if one.name == self.case]
        return op.sample_inputs(replace(case, **dict(self.changes)))


LINEAR, GATED, MOE = "linear_residual", "linear_activation", "fused_moe"
BY_CODES = {"activation_format": "fp8", "hidden": 160, "inner": 144}.items()
MANY = {"sizes": (240,) * 5}.items()
CALLS = {
    "one token": Call(LINEAR, "dotted_linear", "fp8"),
    "a gate of one token": Call(GATED, "dotted_linear", "fp8"),
    "few tokens": Call(LINEAR, "streamed_linear", "fp8_tensor"),
    "blocks": Call(GATED, "streamed_linear", "fp8_blocks"),
    "qkv": Call("fused_qkv_paged", "qkv_projection_swapped", "fp8_blocks"),
    "qkv of codes": Call("fused_qkv_paged", "qkv_projection_swapped", "fp8_codes_block"),
    "groups": Call("grouped_matmul", "grouped_gemm", "fp8"),
    "groups of codes": Call("grouped_matmul", "grouped_scaled", "fp8_rows"),
    "experts": Call(MOE, "moe_up", "fp8"),
    "experts of codes": Call(MOE, "moe_up_scaled", "fp8", BY_CODES),
    "experts of one token": Call(MOE, "moe_up_dotted", "fp8", {"num_tokens": 1}.items()),
    "decoded experts": Call("grouped_matmul", "dequantize_experts", "fp8", MANY),
    "latents": Call("mla_prefill_dense", "mla_up_projection", "codes"),
    "heads": Call("mla_decode", "head_products", given=Coded()),
    "decoded heads": Call("mla_decode", "coded_head_products", given=Coded(block=(1, 128))),
    "a library's product by rows": Call("scaled_linear", "widen_scales", "rows_in_blocks"),
    "a library's product by blocks": Call("scaled_linear", "widen_scales", "blocks"),
}  # fmt: skip
#: The names of arguments that are scales of weights.
SCALES = ("weight_scale", "up_scale", "gate_scale", "down_scale", "q_scale", "k_scale", "v_scale",
          "kv_b_scale", "kv_b_proj_scale")  # fmt: skip


def with_powers(a: Any) -> tuple[Any, Any]:
    """Returns the call with powers of two near its scales: as numbers, and as e8m0 bytes."""
    given = {name: getattr(a, name, None) for name in SCALES}
    codes = {
        name: stored_scales(None, scale, torch.uint8)
        for name, scale in given.items()
        if isinstance(scale, torch.Tensor)
    }
    numbers = {name: e8m0.scale_numbers(scale, torch.float32) for name, scale in codes.items()}
    assert codes
    return replace(a, **numbers), replace(a, **codes)


def results(call: Call, a: Any) -> tuple[list[str], list[torch.Tensor]]:
    """Returns the kernels of a call, and the tensors that it returns or writes."""
    own = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in vars(a).items()}
    a = replace(a, **own)
    run = interpret(get_op(call.op), a, call.target)
    made = run.outcome.result
    made = list(made) if isinstance(made, (tuple, list)) else [made]
    caches = [v for name, v in vars(a).items() if name.endswith("_cache")]
    tensors = [v for v in (*made, *caches) if isinstance(v, torch.Tensor)]
    return [spec.kernel for spec in run.specs], tensors


@pytest.mark.parametrize("name", CALLS)
def test_exponents_are_as_good_as_numbers(name):
    call = CALLS[name]
    numbers, codes = with_powers(call.arguments)
    kernels, wanted = results(call, numbers)
    own_kernels, made = results(call, codes)
    assert call.kernel in own_kernels
    assert own_kernels == kernels or call.kernel == "widen_scales"
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one.float().abs().max() > 0


@pytest.mark.parametrize("name", CALLS)
def test_references_take_exponents(name):
    call = CALLS[name]
    op, (numbers, codes) = get_op(call.op), with_powers(call.arguments)
    op.validate(codes)
    (made, wanted) = (op.reference(a) for a in (codes, numbers))
    pairs = [(made, wanted)] if isinstance(made, torch.Tensor) else zip(made, wanted, strict=True)
    for one, other in pairs:
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
