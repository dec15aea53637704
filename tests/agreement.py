"""Checks that a compiled model is at most as far from a float64 run as the eager model is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

# The size of one rounding in each dtype. The error of the fused model may exceed the error of eager
# by at most one rounding.
ALLOWANCE = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-22,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}


def upcast(item):
    """Returns a float64 copy of a module or of a floating-point tensor, and a clone of any other
    tensor. Returns anything else unchanged."""
    if isinstance(item, torch.nn.Module):
        return copy.deepcopy(item).to(torch.float64)
    if isinstance(item, torch.Tensor):
        return item.double() if item.dtype.is_floating_point else item.clone()
    return item


def in_float64(record: Any) -> Any:
    """Returns a copy of a record of arguments, with floating-point tensors in float64 and clones of
    indices."""
    return replace(record, **{f.name: upcast(getattr(record, f.name)) for f in fields(record)})


def with_fresh_caches(record: Any) -> Any:
    """Returns a record of arguments with clones of its caches."""
    caches = {name: getattr(record, name) for name in ("k_cache", "v_cache")}
    return replace(record, **{name: t.clone() for name, t in caches.items() if t is not None})


def cloned(args: Sequence) -> list:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.double()
    scale = torch.linalg.vector_norm(exact).item() or 1.0
    return torch.linalg.vector_norm(actual.double() - exact).item() / scale


def assert_no_worse(fused: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str):
    """Asserts that the fused result's error against float64 is at most eager's plus one
    rounding."""
    ours, theirs = relative_error(fused, exact), relative_error(eager, exact)
    allowed = theirs + ALLOWANCE[eager.dtype]
    assert ours <= allowed, f"{what}: fused is off by {ours:.2e}, eager by {theirs:.2e}"


def assert_as_eager(layer, make, exactly: bool):
    """Compares eager and the backend: their outputs, and their arguments after the call.

    `make()` returns new arguments. Caches that alias each other alias in the copies, too.
    """
    eager, ours = make(), make()
    torch.manual_seed(0)
    expected = layer(*eager)
    torch.manual_seed(0)
    actual = torch.compile(layer, backend="tilewright", options={"inner": "eager"})(*ours)
    for a, b in zip(flat([actual, ours]), flat([expected, eager]), strict=True):
        if exactly:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def flat(items) -> list[torch.Tensor]:
    """Returns the tensors of nested sequences."""
    if isinstance(items, torch.Tensor):
        return [items]
    return [t for item in items for t in flat(item)]


def assert_untouched(before, fused, exact, what: str):
    """Asserts that the fused run changed no bit of a cache at places that the float64 run did not
    change."""
    alone = exact.double() == before.double()
    assert alone.any(), f"{what}: every element was written, the test shows nothing"
    if before.dtype.itemsize == 1:  # some devices cannot compare 8-bit floats
        fused, before = fused.view(torch.uint8), before.view(torch.uint8)
    assert torch.equal(fused[alone], before[alone]), f"{what}: an untouched slot changed"
