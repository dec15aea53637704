"""Compares the results of ops and patterns for a made-up format with float64.

The format has unsigned 8-bit codes. In dense linears, each block has a zero point that is a float;
in experts, the zero point is 128. `test_new_format.py` calls each function in a process that has
added the format's row.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.interpreted import Interpreter, interpret
from tilewright.compiler import lower
from tilewright.ops import ArgumentError
from tilewright.ops.grouped import matmul
from tilewright.ops.mlp import linear_activation
from tilewright.ops.mlp.cases import LinearCase
from tilewright.ops.moe import moe
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.choices import run
from tilewright.ops.qkv.lowering import planned_lowering
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.samples import AttentionCase

NAME = "uint8"
GROUP = 32
CODED = {"weight_format": NAME, "scale_block": (1, GROUP), "zeros": "float"}
DENSE = {"weight_format": "dense", "scale_block": [], "zero_point": 0}


def by_hand(codes, scale, zero):
    """Computes (code - zero) * scale, [..., K], in float64. Each row and each GROUP columns have a
    scale and a zero."""
    rows = codes.double().flatten(0, -2)
    scale, zero = (t.double().repeat_interleave(GROUP, 1) for t in (scale, zero))
    return ((rows - zero) * scale).view(codes.shape)


def agree(got, want, bound):
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < bound, f"{error} away from what it should be"


def mlp():
    """Checks the reference, the kernel, and the refused arguments of linears."""
    a = linear_activation.sample_inputs(LinearCase("new", layout="separate", k=128, **CODED))
    assert a.weight.dtype == torch.uint8
    gate = by_hand(a.weight, a.weight_scale, a.weight_zero)
    up = by_hand(a.up_weight, a.up_scale, a.up_zero)
    want = F.silu(a.x.double() @ gate.T) * (a.x.double() @ up.T)
    agree(linear_activation.OP.call(a), want, 2.0**-7)
    program = interpret(linear_activation.OP, a)
    assert [spec.kernel for spec in program.specs] == ["order_x", "streamed_linear"]
    agree(program.outcome.result, want, 2.0**-7)
    with pytest.raises(ArgumentError, match="a tensor, since weights are uint8"):
        linear_activation.OP.call(replace(a, weight_scale=None))


def qkv():
    """Checks q and both caches, for the reference and for the lowering that the plan chooses."""
    a = qkv_cache.sample_inputs(AttentionCase("new", projection="packed", **CODED))
    numbers = {f"{x}_{what}": None for x in "qkv" for what in ("scale", "zero")} | {
        f"{x}_weight": by_hand(*(getattr(a, f"{x}_{what}") for what in ("weight", "scale", "zero")))
        for x in "qkv"
    }
    caches = {"k_cache": a.k_cache.double(), "v_cache": a.v_cache.double()}
    exact = replace(a, x=a.x.double(), **numbers, **caches, **DENSE)
    want = qkv_cache.reference(exact), exact.k_cache, exact.v_cache
    machine = Interpreter()
    choice = planned_lowering(prepare(a), machine.target)
    for compute in (qkv_cache.OP.call, lambda own: run(own, choice, machine)):
        own = replace(a, k_cache=a.k_cache.clone(), v_cache=a.v_cache.clone())
        for got, exactly in zip((compute(own), own.k_cache, own.v_cache), want, strict=True):
            agree(got, exactly, 2.0**-7)
    assert machine.kernels, "no kernel ran"


def experts():
    """Checks the references of experts, and that the reason names the missing kernel."""
    case = replace(matmul.GROUPED_CASES[0], name="new", weight_format=NAME, inner=64)
    a = matmul.sample_inputs(case)
    scale = a.weight_scale.double().repeat_interleave(GROUP, 2)
    numbers = (a.weight.double() - 128) * scale
    dense = replace(a, weight=numbers, x=a.x.double(), weight_scale=None, **_dense())
    agree(matmul.OP.call(a), matmul.reference(dense), 2.0**-6)
    assert matmul.OP.plan_for(a, "sm90").reason == (f"emitted_kernel: no kernel for {NAME} weights")
    mixture = replace(moe.MOE_CASES[0], name="new", weight_format=NAME, inner=64)
    made = moe.OP.call(moe.sample_inputs(mixture))
    plain = moe.OP.call(moe.sample_inputs(replace(mixture, weight_format="dense")))
    agree(made, plain, 2.0**-4)  # the error of eight bits
    assert moe.OP.plan_for(moe.sample_inputs(mixture), "sm90").name == "reference"


def _dense():
    return {"weight_format": "dense", "scale_block": [], "out_dtype": torch.float64}


class Linear(nn.Module):
    """A linear whose weight the graph decodes."""

    def __init__(self, columns, rows, seed):
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.codes = torch.randint(0, 256, (rows, columns), generator=made).to(torch.uint8)
        self.scale = torch.rand(rows, columns // GROUP, 1, generator=made).bfloat16() / 512
        self.zero = 255 * torch.rand(rows, columns // GROUP, 1, generator=made).bfloat16()
        for name, tensor in list(vars(self).items()):
            if isinstance(tensor, torch.Tensor):
                delattr(self, name)
                self.register_buffer(name, tensor)

    def forward(self, x):
        codes = self.codes.unflatten(1, (-1, GROUP)).to(x.dtype)
        return F.linear(x, ((codes - self.zero) * self.scale).flatten(1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = Linear(64, 96, 0), Linear(64, 96, 1), Linear(96, 64, 2)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        codes = torch.randint(0, 256, (4, 48, 64), generator=made).to(torch.uint8)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", torch.rand(4, 48, 2, 1, generator=made) / 512)

    def forward(self, x, ends):
        codes = self.codes.unflatten(2, (-1, GROUP)).float() - 128
        weight = (codes * self.scale).flatten(2).bfloat16()
        return torch._grouped_mm(x, weight.mT, offs=ends)


def patterns():
    """Checks that patterns recognise a graph that decodes such weights."""
    with torch.no_grad():
        report = lower(Layer(), (torch.randn(1, 3, 64).bfloat16(),))
        found = {match.pattern: match.shapes["weights"] for match in report.matches}
        assert found == {"linear_activation": NAME, "linear_residual": NAME}, report
        ends = torch.tensor([3, 5, 5, 9], dtype=torch.int32)
        report = lower(Mixture(), (torch.randn(9, 64).bfloat16(), ends))
        found = {match.pattern: match.shapes["weights"] for match in report.matches}
        assert found == {"grouped_gemm": NAME}, report
