"""Tests mixtures that compute all experts: they are fused if the graph shows that the weights of
the other experts are zero."""

from __future__ import annotations

import pytest
import torch

from tests.agreement import assert_no_worse, upcast
from tests.found import matches_of, misses_of, patterns_in
from tests.models.moe_dense import NEAR_MISSES, SPELLINGS, build
from tests.patterns.recognise.test_gemm import value
from tilewright.compiler import lower, reports
from tilewright.patterns.moe.moe_dense import _repeats

CASES = [(name, False) for name in SPELLINGS]
CASES += [(name, True) for name in ("bmm_output", "llama4")]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_every_spelling_is_fused_and_no_less_accurate(name, dynamic):
    torch._dynamo.reset()
    module, args = build(*SPELLINGS[name])
    compiled = torch.compile(
        module, backend="tilewright", dynamic=dynamic, options={"inner": "eager"}
    )
    with torch.no_grad():
        fused, eager = compiled(*args), module(*args)
        exact = upcast(module)(*(upcast(a) for a in args))
    report = reports()[-1]
    assert patterns_in(report, "fused_moe") == ["moe_dense"], misses_of(report, "fused_moe")
    assert_no_worse(fused, eager, exact, name)


@pytest.mark.parametrize("step", NEAR_MISSES, ids=lambda step: step.__name__)
def test_near_misses_say_what_is_wrong(step):
    torch._dynamo.reset()
    code, slots = NEAR_MISSES[step]
    lowered = lower(*build(step, slots))
    assert not matches_of(lowered, "fused_moe"), str(lowered)
    assert {miss.code for miss in misses_of(lowered, "moe_dense")} == ({code} if code else set())


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_single_token_is_not_repeated(tokens):
    by_token = value("input", torch.ones(1, tokens, 4)).whole.expand(5, tokens, 4)
    by_expert = value("input", torch.ones(5, 1, 4)).whole.expand(5, tokens, 4)
    assert _repeats(by_token) == [True, False, False]
    assert _repeats(by_expert) == [False, tokens > 1, False]
