"""Runs a layer in a public code base's style beside eager and float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.agreement import assert_no_worse, assert_untouched, cloned, flat, upcast
from tests.found import assert_accounted, counting
from tilewright.compiler import reports


def report_of(
    module: torch.nn.Module,
    args: Sequence[Any],
    name: str,
    caches: Sequence[int] = (),
    untouched: bool = True,
) -> Any:
    """Reports what is fused of a layer whose outputs, and the arguments numbered `caches`, are no
    worse than eager's against float64, with every point of the census accounted for.

    untouched: slots of the caches that the layer does not write keep every bit.
    """
    ours, theirs, exact = cloned(args), cloned(args), [upcast(a) for a in args]
    points: list = []
    with torch.no_grad():
        compiled = torch.compile(module, backend=counting(points), options={"inner": "eager"})
        results = compiled(*ours), module(*theirs), upcast(module)(*exact)
    for out, expected, wanted in zip(*map(flat, results), strict=True):
        if expected.dtype.is_floating_point:
            assert_no_worse(out, expected, wanted, f"{name}, output")
        else:
            assert torch.equal(out, expected)
    for i in caches:
        assert_no_worse(ours[i], theirs[i], exact[i], f"{name}, cache {i}")
        if untouched:
            assert_untouched(args[i], ours[i], exact[i], f"{name}, cache {i}")
    assert_accounted(points)
    return reports()[-1]
