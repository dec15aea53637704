"""Tests which templates the emitter refuses, and that the message says where and why."""

import pytest

from tilewright.codegen.emit import emit
from tilewright.codegen.emit.source import EmitError
from tilewright.codegen.spec import KernelSpec

REFUSED = "sample_templates.refused"

REASONS = {
    "return_in_branch": "may only return at its end",
    "effect_inside_expression": "writes memory",
    "unknown_effect_inside_expression": "writes memory",
    "recursion": "calls itself",
    "chained_comparison": "no chained comparison",
    "assertion": "static assertion failed: BLOCK % 32 == 0: 'whole warps'",
    "undecidable_assertion": "cannot be decided when the kernel is emitted: n > 0",
    "constant_under_runtime_control": "BLOCK is a compile-time value",
    "unknown_name": "undefined_helper is neither",
    "subscript": "only None and : may index a tensor",
    "comprehension": "ListComp is not supported",
    "division_by_zero": "BLOCK // 0",
    "loop_over_tuple": "loops run over range",
    "helper_in_conditional": "not allowed in a conditional expression",
}


def spec_of(kernel, constants=None, signature=None, template=REFUSED):
    constants = {"BLOCK": 16} if constants is None else constants
    return KernelSpec.make(template, kernel, constants, signature or {"x_ptr": "*i32", "n": "i32"})


@pytest.mark.parametrize(("kernel", "reason"), REASONS.items())
def test_refusal_names_place_and_reason(kernel, reason):
    with pytest.raises(EmitError) as caught:
        emit(spec_of(kernel))
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{REFUSED}:")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"constants": {"BLOCK": 16, "EXTRA": 1}}, "'EXTRA', which is not a parameter"),
        ({"constants": {}}, "no value or type for BLOCK"),
        ({"constants": {"BLOCK": 16}, "signature": {"x_ptr": "*i32"}}, "no value or type for n"),
        ({"signature": {"n": "i32", "x_ptr": "*i32"}}, "signature order"),
        (
            {"constants": {}, "signature": {"x_ptr": "*i32", "n": "i32", "BLOCK": "i32"}},
            "BLOCK is constexpr",
        ),
        ({"kernel": "missing"}, "no @triton.jit function 'missing'"),
        ({"template": "sample_templates.nowhere"}, "no such module"),
    ],
)
def test_spec_must_be_the_kernels(changes, reason):
    arguments = {"kernel": "plain", **changes}
    with pytest.raises(EmitError, match=reason):
        emit(spec_of(**arguments))
    assert "tl.store" in emit(spec_of("plain"))  # the control: this kernel is emitted
