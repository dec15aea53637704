"""Pattern `moe`: every spelling of the routing matches and computes no worse than the model;
what only looks like a mixture does not."""

from __future__ import annotations

import pytest
import torch

from tests.agreement import assert_no_worse
from tests.models.moe_idioms import IDIOMS, build, exact
from tilewright.compiler import lower


@pytest.mark.parametrize("name", IDIOMS)
def test_every_idiom_matches_and_is_no_less_accurate(name):
    torch._dynamo.reset()
    module, args = build(name)
    with torch.no_grad():
        lowered = lower(module, args)
        assert [site.op for site in lowered.matches] == ["fused_moe"], str(lowered)
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        fused, eager = compiled(*args), module(*args)
    assert_no_worse(fused, eager, exact(module, *args), name)
