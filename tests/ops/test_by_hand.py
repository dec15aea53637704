"""Tests that ops are attributes of `tilewright.ops`, found in their own files, and that their
records have defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import tilewright.ops
from tilewright.codegen.targets import SM80, SM90
from tilewright.ops.contract import FusedOp, all_ops
from tilewright.ops.fused_op import emitted_kernel

OURS = [op for op in all_ops() if op.namespace == "tilewright"]


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_every_op_is_an_attribute_that_is_called(op):
    found = getattr(tilewright.ops, op.name)
    assert op.name in tilewright.ops.__all__
    assert found is op or found.__name__ == op.name


def test_a_record_is_called_as_its_op_is():
    op = tilewright.ops.linear_residual
    a = op.sample_inputs(op.cases[0])
    made = op(a.x, a.weight, a.residual, scale=2.0)
    assert torch.equal(
        made, torch.ops.tilewright.linear_residual(a.x, a.weight, a.residual, scale=2.0)
    )
    assert not torch.equal(made, op(a.x, a.weight, a.residual))


def test_what_is_no_op_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'no_such_op'"):
        tilewright.ops.no_such_op  # noqa: B018


@dataclass(frozen=True)
class Arguments:
    x: torch.Tensor
    y: torch.Tensor


def record(**changes):
    given = {"name": "plain", "namespace": "tests", "arguments": Arguments, "cases": ()}
    given |= {"validate": print, "reference": print, "lowerings": (), "sample_inputs": print}
    return FusedOp(**given | changes)


@pytest.mark.parametrize(("returns", "count"), [("Tensor", 1), ("(Tensor, Tensor)", 2), ("()", 0)])
def test_results_are_like_the_first_argument(returns, count):
    x = torch.empty(4, 6, dtype=torch.float16)[:, ::2]
    made = record(returns=returns).faked(Arguments(x, torch.empty(1)))
    made = () if made is None else made if isinstance(made, tuple) else (made,)
    assert len(made) == count
    assert all((t.shape, t.dtype, t.stride()) == ((4, 3), x.dtype, (3, 1)) for t in made)


@pytest.mark.parametrize("emits", [True, False])
def test_a_chip_is_asked_about_emitted_kernels_alone(emits):
    """A chip is checked only for lowerings that emit kernels. Other lowerings use the chip's
    library."""
    lowering = emitted_kernel("a:b")
    op = record(lowerings=(lowering if emits else replace(lowering, build=None, entry=print),))
    a = Arguments(torch.empty(1, dtype=torch.float8_e4m3fn), torch.empty(1))
    refused = (("emitted_kernel", "x has the dtype float8_e4m3fn, which sm80 does not support"),)
    assert op.choose("cuda", a, SM80).rejected == (refused if emits else ())
    assert op.choose("cuda", a, SM90).rejected == op.choose("cuda", a).rejected == ()
    assert op.choose("cpu", a, SM90).rejected == (("emitted_kernel", "runs on cuda only"),)


def test_kernels_take_the_dtypes_that_are_named():
    lowering = emitted_kernel("a:b", lambda a: "too wide", (torch.float16,))
    a = Arguments(torch.empty(1), torch.empty(1))
    assert lowering.unsupported(a) == "no kernel for torch.float32"
    assert lowering.unsupported(Arguments(a.x.half(), a.y)) == "too wide"
    assert emitted_kernel("a:b").unsupported(a) is None
