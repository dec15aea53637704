"""Tests the queries and keys that a library's attention reads: the rope columns come first, and
they are written in place."""

from __future__ import annotations

import pytest
import torch

from tests.attention_cases import performed
from tests.interpreted import Interpreter
from tests.mla_library import attention
from tilewright.codegen.targets import SM90
from tilewright.ops.mla.attention.lowering import query_steps
from tilewright.ops.mla.attention.operands import AttentionCall
from tilewright.ops.mla.latents.lowering import by_head
from tilewright.ops.reference.rope import RopeTables, apply_rope
from tilewright.ops.runtime.program import Planner, drive


@pytest.mark.parametrize("rope", [16, 24])
@pytest.mark.parametrize("style", ["half", "interleaved", "interleaved_to_half"])
def test_queries_and_joined_keys_have_the_rope_columns_first(style, rope):
    """One launch writes the queries and the joined keys. The rope keys are columns of wider rows.
    The launch writes nothing else into the joined keys."""
    batch, run, heads, nope, v_dim = 2, 9, 3, 24, 8
    q = torch.randn(batch, run, heads, nope + rope, dtype=torch.float16)
    cos, sin = torch.rand(run, rope // 2), torch.rand(run, rope // 2)
    shared = torch.randn(batch, run, rope + 8).half()[..., 8:]
    joined = torch.full((batch, run, heads, rope + nope + v_dim), 7.0).half()
    _, k, v = joined.split((rope, nope, v_dim), -1)
    tables = RopeTables(cos, sin, style)
    call = AttentionCall(q, None, k, v, shared, scale=1.0, tables=tables)
    machine = Interpreter(SM90)
    own, turned = performed(query_steps(call, SM90, whole=True, joined=joined), machine)
    assert torch.equal(joined[..., :rope], shared.unsqueeze(2).expand(-1, -1, heads, -1))
    assert bool((joined[..., rope:] == 7.0).all())
    assert torch.equal(own, q[..., :nope])
    width = nope + rope
    assert own.data_ptr() - turned.data_ptr() == rope * 2
    assert own.stride() == turned.stride() == (run * heads * width, heads * width, width, 1)
    places = torch.arange(batch * run) % run
    flat = q[..., nope:].flatten(0, 1).double()
    want = apply_rope(flat, cos[places].double(), sin[places].double(), rope, style)
    torch.testing.assert_close(turned.flatten(0, 1).double(), want, rtol=2e-3, atol=2e-3)
    assert machine.kernels == ["mla_query"]


def test_rope_keys_that_are_not_whole_16_bytes_are_told_apart():
    """Rope keys that do not start at multiples of 16 bytes need another kernel: a kernel for
    aligned rows would read them at wrong addresses."""
    joined = torch.zeros(1, 5, 2, 48).bfloat16()
    _, k, v = joined.split((16, 16, 16), -1)
    q = torch.zeros(1, 5, 2, 32).bfloat16()
    tables = RopeTables(torch.zeros(5, 8), torch.zeros(5, 8), "half")

    def aligned(rows):
        call = AttentionCall(q, None, k, v, rows, scale=1.0, tables=tables)
        steps = query_steps(call, SM90, whole=True, joined=joined)
        (spec,) = drive(steps, Planner(SM90), keep=True).specs
        return "k_rope_ptr" in spec.divisible16

    assert aligned(torch.zeros(1, 5, 16).bfloat16())
    assert not aligned(torch.zeros(1, 5, 24).bfloat16()[..., 1:17])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_library_writes_keys_and_values_where_they_belong(dtype):
    """The library writes each head into rows that are further apart than a head is wide. The
    columns of other parts must keep their contents."""
    rows, heads, rope, width, rank = 33, 3, 16, 56, 64
    latent = torch.randn(rows, rank + 16).to(dtype)[:, :rank]
    weight = torch.randn(heads * width, rank).to(dtype)
    joined = torch.full((rows, heads, rope + width), 7.0, dtype=dtype)
    out = joined[..., rope:]
    where, strides = out.data_ptr(), out.stride()
    result, x, weights = by_head(latent, weight, out)
    torch.bmm(x, weights, out=result)
    assert (out.data_ptr(), out.stride()) == (where, strides)
    assert bool((joined[..., :rope] == 7.0).all())
    want = (latent.double() @ weight.double().T).unflatten(-1, (heads, width))
    torch.testing.assert_close(joined[..., rope:].double(), want, rtol=2.0**-7, atol=2.0**-4)


def test_attention_over_joined_keys_is_that_over_parts():
    """The order of the columns does not change attention, if queries and keys have the same
    order."""
    batch, run, heads, nope, rope, v_dim = 2, 12, 3, 32, 16, 24
    q = torch.randn(batch, run, heads, nope + rope, dtype=torch.float64)
    joined = torch.randn(batch, run, heads, rope + nope + v_dim, dtype=torch.float64)
    shared, k, v = joined.split((rope, nope, v_dim), -1)
    ordered = torch.cat((q[..., nope:], q[..., :nope]), -1)
    parts = (ordered, joined[..., : rope + nope], v)
    out, _ = attention(*(t.transpose(1, 2) for t in parts), None, False, 0.0, True, scale=0.2)
    parts = (q, torch.cat((k, shared), -1), v)
    want, _ = attention(*(t.transpose(1, 2) for t in parts), None, False, 0.0, True, scale=0.2)
    torch.testing.assert_close(out, want)
