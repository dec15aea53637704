"""What a library's attention reads: keys and queries with the rope columns first, in place."""

from __future__ import annotations

import pytest
import torch

from tests.mla_library import attention
from tilewright.codegen import mla_join_kernels as kernels
from tilewright.codegen.build import load_interpreted
from tilewright.codegen.targets import SM90
from tilewright.ops import mla_attention_library, mla_key_kernels, mla_queries
from tilewright.ops.mla_attention_problems import AttentionCall, QueryRope
from tilewright.ops.rope import apply_rope


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    names = []

    def launch(spec, grid, values, device):
        names.append(spec.kernel)
        load_interpreted(spec)[grid](**{name: values[name] for name, _ in spec.signature})

    for module in (mla_attention_library, mla_queries):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(mla_queries, "device_target", lambda device: SM90)
    return names


@pytest.mark.parametrize(("keys", "heads", "rope"), [(21, 3, 8), (1, 1, 24), (100, 2, 64)])
def test_rope_keys_go_to_the_first_columns_of_every_head(keys, heads, rope):
    """From rows with others beside them; nothing else is written."""
    wide = torch.randn(keys, rope + 8).bfloat16()
    joined = torch.full((keys, heads, rope + 40), 7.0, dtype=torch.bfloat16)
    mla_attention_library.write_rope_keys(wide[:, 8:], joined, SM90)
    assert torch.equal(joined[..., :rope], wide[:, None, 8:].expand(-1, heads, -1))
    assert bool((joined[..., rope:] == 7.0).all())
    assert kernels.rope_keys_grid(kernels.ROPE_ROWS + 1) == (2,)


def test_rows_that_are_not_whole_16_bytes_are_told_apart():
    """A kernel for aligned rows would read and write others at wrong addresses."""

    def aligned(k_rope, joined):
        return mla_attention_library.rope_keys_spec(k_rope, joined, SM90).divisible16

    rows, joined = torch.zeros(5, 16).bfloat16(), torch.zeros(5, 2, 48).bfloat16()
    assert aligned(rows, joined)
    assert not aligned(rows[:, 1:], joined)
    assert not aligned(torch.zeros(5, 17).bfloat16()[:, :16], joined)
    assert not aligned(rows, torch.zeros(5, 2, 52).bfloat16()[..., :50])


@pytest.mark.parametrize("style", ["half", "interleaved", "interleaved_to_half"])
def test_whole_queries_may_have_the_rotated_columns_first(style, launched):
    run, heads, nope, rope = 9, 3, 24, 16
    q = torch.randn(2, run, heads, nope + rope, dtype=torch.float16)
    cos, sin = torch.rand(run, rope // 2), torch.rand(run, rope // 2)
    k, v = torch.empty(2, run, heads, nope).half(), torch.empty(2, run, heads, 8).half()
    plain = AttentionCall(q, None, k, v, torch.empty(2, run, rope).half(), scale=1.0)
    turn = QueryRope(cos, sin, style)
    own, turned = mla_queries.finished_queries(plain, turn, whole=True, rope_first=True)
    assert torch.equal(own, q[..., :nope])
    assert own.data_ptr() - turned.data_ptr() == rope * 2
    assert own.stride() == turned.stride() == (run * heads * 40, heads * 40, 40, 1)
    places = torch.arange(2 * run) % run
    flat = q[..., nope:].flatten(0, 1).double()
    want = apply_rope(flat, cos[places].double(), sin[places].double(), rope, style)
    torch.testing.assert_close(turned.flatten(0, 1).double(), want, rtol=2e-3, atol=2e-3)
    assert launched == ["mla_query"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_library_writes_keys_and_values_where_they_belong(dtype):
    """By head into rows that are further apart: the memory is the buffer's own, and the columns
    of other parts keep what is in them."""
    rows, heads, rope, width, rank = 33, 3, 16, 56, 64
    latent = torch.randn(rows, rank + 16).to(dtype)[:, :rank]
    weight = torch.randn(heads * width, rank).to(dtype)
    joined = torch.full((rows, heads, rope + width), 7.0, dtype=dtype)
    out = joined[..., rope:]
    where, strides = out.data_ptr(), out.stride()
    mla_key_kernels._mm_by_head(latent, weight, out)
    assert (out.data_ptr(), out.stride()) == (where, strides)
    assert bool((joined[..., :rope] == 7.0).all())
    want = (latent.double() @ weight.double().T).unflatten(-1, (heads, width))
    torch.testing.assert_close(joined[..., rope:].double(), want, rtol=2.0**-7, atol=2.0**-4)


def test_attention_over_joined_keys_is_that_over_parts():
    """Columns of queries and keys may come in any order, so long as it is the same."""
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
