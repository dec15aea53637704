"""Tests scales that the graph computes from stored exponents: ops read the bytes themselves. Also
tests scales of blocks of which the weight has only a part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse
from tests.found import matches_of
from tilewright.compiler import lower

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E8M0 = torch.float8_e8m0fnu
K, BLOCK = 128, 64


def cast(scale, dtype):
    return scale.view(E8M0).to(dtype)


def through_float32(scale, dtype):
    return scale.view(E8M0).float().to(dtype)


def power(scale, dtype):
    return torch.exp2(scale.to(torch.int32) - 127).to(dtype)


def shifted(scale, dtype):
    return (scale.to(torch.int32) << 23).view(torch.float32).to(dtype)


def of_another_bias(scale, dtype):
    return torch.exp2(scale.to(torch.int32) - 126).to(dtype)


def halved(scale, dtype):
    return cast(scale, dtype) * 0.5


class Linear(nn.Module):
    """A linear of float8 codes with a residual. `spelled` computes the scales from the exponents of
    blocks of rows, or of blocks of rows and columns."""

    def __init__(self, spelled, rows=K, columns=K):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        codes = torch.randn(rows, K, generator=generator).mul(40).to(torch.float8_e4m3fn)
        blocks = (-(-rows // BLOCK), -(-K // columns))
        exponents = torch.randint(117, 121, blocks, generator=generator, dtype=torch.uint8)
        self.codes, self.exponents = (
            nn.Parameter(t, requires_grad=False) for t in (codes, exponents)
        )
        self.spelled, self.columns = spelled, columns

    def weight(self, dtype):
        scale = self.spelled(self.exponents, dtype).repeat_interleave(BLOCK, 0)
        scale = scale.repeat_interleave(self.columns, 1)
        return self.codes.to(dtype) * scale[: len(self.codes)]

    def forward(self, x, residual):
        return residual + F.linear(x, self.weight(x.dtype))


def inputs(rows=K, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(9)
    return tuple(torch.randn(3, n, generator=generator).to(dtype) for n in (K, rows))


def scales_of(module, args):
    """Returns the example value of the scales that the op reads, and their graph."""
    lowered = lower(module, args)
    (site,) = matches_of(lowered, "mlp")
    assert (site.pattern, site.shapes["weights"]) == ("linear_residual", "fp8")
    (graph,) = (report.after.graph for report in lowered.graphs)
    (fused,) = [node for node in graph.nodes if "linear_residual" in str(node.target)]
    return fused.kwargs["weight_scale"].meta["example_value"], fused.kwargs["scale_block"]


def check(module, args):
    """Checks that the result is no less accurate than eager's."""
    with torch.no_grad():
        exact = args[1].double() + args[0].double() @ module.weight(torch.float64).T
        run = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        assert_no_worse(run(*args), module(*args), exact, "out")


@pytest.mark.parametrize("columns", [K, BLOCK])
@pytest.mark.parametrize("spelled", [cast, through_float32, power, shifted])
def test_exponents_are_read_as_they_are_stored(spelled, columns):
    module, args = Linear(spelled, columns=columns), inputs()
    scale, _ = scales_of(module, args)
    assert (scale.dtype, scale.shape) == (torch.uint8, module.exponents.shape)
    check(module, args)


@pytest.mark.parametrize("spelled", [of_another_bias, halved])
def test_other_powers_are_computed_by_the_graph(spelled):
    module, args = Linear(spelled), inputs()
    scale, _ = scales_of(module, args)
    assert scale.dtype.is_floating_point
    check(module, args)


def test_exponents_that_a_cast_makes_infinite_are_computed_by_the_graph():
    """float16 does not represent all powers."""
    module, args = Linear(cast), inputs(dtype=torch.float16)
    scale, _ = scales_of(module, args)
    assert scale.dtype == torch.float16
    check(module, args)


@pytest.mark.parametrize("rows", [96, 160])
@pytest.mark.parametrize("spelled", [cast, halved])
def test_a_block_may_reach_beyond_the_last_row(spelled, rows):
    """The op reads one scale for each block, although the graph makes one for each row."""
    module, args = Linear(spelled, rows), inputs(rows)
    scale, block = scales_of(module, args)
    assert (scale.shape, block) == ((-(-rows // BLOCK), 1), [BLOCK, K])
    check(module, args)


class CutElsewhere(Linear):
    """Leaves out the first scales in place of the last ones."""

    def weight(self, dtype):
        scale = self.spelled(self.exponents, dtype).repeat_interleave(BLOCK, 0)
        return self.codes.to(dtype) * scale[-len(self.codes) :]


def test_scales_without_the_first_ones_are_computed_by_the_graph():
    module, args = CutElsewhere(cast, 96), inputs(96)
    scale, block = scales_of(module, args)
    assert (scale.shape, block) == ((96, 1), [1, K])
    check(module, args)
