"""Tests kernels that normalise the rows of x, and permute their columns to the order of codes,
without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted import Interpreter
from tilewright.codegen.rows import MOST_NORM_COLUMNS, ColumnOrder
from tilewright.codegen.targets import SM90
from tilewright.ops.reference.norm import RowNorm
from tilewright.ops.runtime.norms import normed, ordered
from tilewright.ops.runtime.program import Outcome, drive

ORDERS = {
    "words of eight": ColumnOrder(width=384, unit=64, per=8, interleaved_nibbles=False),
    "neighbours": ColumnOrder(width=384, unit=32, per=8, interleaved_nibbles=True),
    "bytes": ColumnOrder(width=384, unit=128, per=1, interleaved_nibbles=False),
}


def rows(tokens=5, columns=328, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.randn(tokens, columns).mul_(3).add_(1).to(dtype)


def norm_of(kind, dtype=torch.bfloat16, columns=328, weight=True, bias=False, offset=0.0):
    vectors = {"norm_weight": weight, "norm_bias": bias}
    given = {name: torch.randn(columns, dtype=dtype) for name, on in vectors.items() if on}
    kinds = {"rms_norm": kind == "rms", "layer_norm": kind == "layer"}
    return RowNorm(**kinds, **given, norm_eps=1e-5, norm_offset=offset)


def made_by(steps):
    """Returns the result of steps, and the names of their kernels."""

    def whole():
        return Outcome((yield from steps), "", "")

    machine = Interpreter()
    return drive(whole(), machine).outcome.result, machine.kernels


def permuted(x, order):
    """Returns x in an order, padded with zeros, by the definition of the order.

    In each unit, each of four threads has every fourth pair of columns, or every fourth pair of
    columns that lie four apart in a word.
    """
    x = torch.nn.functional.pad(x, (0, order.width - x.shape[1]))
    tokens, unit = x.shape[0], order.unit
    if order.per == 8 and not order.interleaved_nibbles:
        x = x.reshape(tokens, -1, 4, unit // 32, 2, 4).permute(0, 1, 3, 5, 2, 4)
    elif order.per == 8:
        x = x.reshape(tokens, -1, 4, unit // 32, 4, 2).permute(0, 1, 3, 4, 2, 5)
    else:
        x = x.reshape(tokens, -1, 4, unit // 8, 2).permute(0, 1, 3, 2, 4)
    return x.reshape(tokens, order.width)


@pytest.mark.parametrize("order", [None, *ORDERS], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rms", {}),
        ("rms", {"weight": False}),
        ("rms", {"offset": 1.0, "dtype": torch.float32}),
        ("layer", {"bias": True}),
        ("layer", {"weight": False}),
    ],
)
def test_a_norm_is_that_of_the_reference(kind, options, order):
    x, norm = rows(), norm_of(kind, **options)
    found, kernels = made_by(normed(x, norm, SM90, ORDERS.get(order)))
    expected = norm.apply(x.double()).bfloat16()
    if order is not None:
        expected = permuted(expected, ORDERS[order])
    assert kernels == ["norm_x"]
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_norm_in_other_dtypes(dtype):
    x, norm = rows(dtype=dtype), norm_of("rms", dtype)
    found, _ = made_by(normed(x, norm, SM90))
    exact = norm.apply(x.double())
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps * 4, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_columns_are_permuted_exactly(order, tokens):
    x = rows(tokens)
    held = torch.full((tokens, 2, 328), torch.nan, dtype=x.dtype)
    held[:, 1] = x
    found, kernels = made_by(ordered(held[:, 1], ORDERS[order], SM90))
    assert kernels == ["order_x"]
    assert torch.equal(found, permuted(x, ORDERS[order]))


def test_rows_that_fit_no_program_are_normed_by_pytorch():
    """These are rows that are too long, and rows whose columns lie apart."""
    columns = MOST_NORM_COLUMNS + 8
    for x in (rows(2, columns), rows(328, 4).t()[:2]):
        norm = norm_of("rms", columns=x.shape[1])
        found, kernels = made_by(normed(x, norm, SM90))
        assert not kernels
        torch.testing.assert_close(found, norm.apply(x.double()).bfloat16(), rtol=2**-8, atol=1e-6)
