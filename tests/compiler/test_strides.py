"""Results that are written in place: whether a view or a copy is written goes by their strides."""

from __future__ import annotations

import pytest
import torch

from tests.agreement import cloned
from tests.compiler.running import compiled, patterns_used
from tests.models import mla_idioms
from tilewright.compiler import reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def flattened_then_written(y):
    """`flatten` of a transposed result is a copy, which the write does not reach."""
    row, flat = y[0], y.flatten(1)
    row.mul_(0.5)
    return flat.view(y.shape)


def written_then_flattened(y):
    row = y[0] * 0.5
    return torch.cat((row[None], y[1:])).flatten(1).view(y.shape)


@pytest.mark.parametrize(
    ("after", "fused"), [(flattened_then_written, False), (written_then_flattened, True)]
)
def test_a_result_that_lies_otherwise_is_not_written(after, fused):
    module, args = mla_idioms.build("plain", dtype=torch.float32)
    attend = module.attend
    module.attend = lambda *given: after(attend(*given))
    eager, ours = cloned(args), cloned(args)
    expected, actual = module(*eager), compiled(module)(*ours)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert ("mla_prefill" in patterns_used("mla")) == fused
    codes = [m.code for m in reports()[-1].misses if m.pattern == "mla_prefill"]
    assert codes == ([] if fused else ["INPUT_MUTATED"])
