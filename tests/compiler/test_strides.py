"""Tests in-place writes to results of ops. The strides of a result decide whether `flatten` is a
view or a copy, and so what the write changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import cloned
from tests.compiler.running import compiled, patterns_used
from tests.models import mla_idioms
from tilewright.compiler import reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def flattened_then_written(y):
    """Flattens a transposed result, which makes a copy. A write to the copy does not change `y`."""
    row, flat = y[0], y.flatten(1)
    row.mul_(0.5)
    return flat.view(y.shape) + y


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


def rows_then_flattened(y):
    """The result is a copy, because `y` has columns first in memory. Writing to the copy does not
    change `y`."""
    flat = y.flatten()
    flat[3] = 7
    return y, flat


def doubled_then_flattened(y):
    """The result of an elementwise operation has the memory layout of `y`."""
    return rows_then_flattened(y * 2)


def read_by_strides(y):
    return y.as_strided((3, 64), (64, 1)), y


def doubled_and_viewed(y):
    return (y * 2).transpose(0, 1).view(-1), y


@pytest.mark.parametrize(
    "after", [rows_then_flattened, doubled_then_flattened, read_by_strides, doubled_and_viewed]
)
def test_a_result_that_the_graph_reads_by_its_strides(after):
    """Reads a result by its strides. The first two dimensions of the residual are transposed, and
    so are those of its sum with a linear."""

    def model(x, weight, residual):
        return after(residual.transpose(0, 1) + F.linear(x, weight))

    generator = torch.Generator().manual_seed(0)
    shapes = (3, 2, 64), (64, 64), (2, 3, 64)
    args = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    expected, actual = (f(*cloned(args)) for f in (model, compiled(model)))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        assert a.stride() == b.stride()


def test_a_result_that_is_returned_lies_as_eager_s():
    """The returned result has the memory layout of eager's, [B, H, S, D]. The op's own result is
    ordered by tokens."""

    def attend(q, k, v):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        return (q @ k.transpose(2, 3)).softmax(-1) @ v * 2

    args = [torch.randn(2, heads, 3, 16) for heads in (4, 2, 2)]
    expected, actual = (f(*cloned(args)) for f in (attend, compiled(attend)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert actual.stride() == expected.stride()
    assert patterns_used("attention") == ["cache_attention"]
