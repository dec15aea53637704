"""Runs a model and compares it with eager and with float64."""

from __future__ import annotations

import torch

from tests.agreement import assert_no_worse, assert_untouched, cloned, upcast
from tests.found import misses_of, patterns_in
from tilewright.compiler import reports


def check_against_eager(name, module, args, patterns, **compile_options):
    eager, ours, exact = cloned(args), cloned(args), [upcast(a) for a in args]
    expected = module(*eager)
    reference = upcast(module)(*exact)
    torch._dynamo.reset()
    compiled = torch.compile(
        module, backend="tilewright", fullgraph=True, options={"inner": "eager"}, **compile_options
    )
    actual = compiled(*ours)
    assert patterns_in(reports()[-1], "qkv") == patterns, misses_of(reports()[-1], "qkv")
    assert_no_worse(actual, expected, reference, f"{name} output")
    for i, before in enumerate(args):
        if isinstance(before, torch.Tensor) and before.is_floating_point() and i > 0:
            assert_no_worse(ours[i], eager[i], exact[i], f"{name} argument {i}")
            assert_untouched(before, ours[i], exact[i], f"{name} argument {i}")
