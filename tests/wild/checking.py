"""Runs a layer in the style of a public code base, and compares it with eager and float64."""

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
    """Returns the report of a layer.

    Its outputs, and the arguments numbered `caches`, must be no less accurate than eager's against
    float64, and every point of the census must be accounted for. With `untouched`, slots of the
    caches that the layer does not write must keep every bit.
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
