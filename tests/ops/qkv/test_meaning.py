"""Compares the references with attention code that is written the usual way, slot by slot
(plain.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.qkv import plain
from tilewright.ops.contract import get_op
from tilewright.ops.qkv.cases import ATTENTION_CASES
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.reference.rope import apply_rope

QKV = get_op("fused_qkv_paged")
STORE = get_op("paged_kv_store")


def double(arguments):
    return replace(
        arguments,
        **{
            name: value.double()
            for name, value in vars(arguments).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        },
    )


CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}") for op in (QKV, STORE) for case in op.cases
]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_reference_is_the_usual_attention_code(op, case):
    """In float64, the two may differ only by the order of their sums. Untouched elements of the
    caches, and the memory around the caches, keep their bits."""
    a = double(op.sample_inputs(case))
    a, changes = plain.guarded(a, op)
    expected = plain.outcome(a)
    q = op.reference(a)
    assert not list(plain.mismatches(op, a, q, expected))
    assert not list(changes(expected.touched))
    assert any(mask.any() for mask in expected.touched.values()) == (case.num_tokens > 0)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_no_other_slot_changes_by_a_bit(op, case):
    a, changes = plain.guarded(op.sample_inputs(case), op)
    op.call(a)
    assert not list(changes(plain.outcome(a).touched))


def test_rounding_happens_once():
    """The reference rounds once. A chain of bf16 operations would round after the projection, the
    norm and each product of the rotation."""
    case = AttentionCase("once", rope_style="half", rotary_dim=32, qk_norm=True, bias=True)
    a = QKV.sample_inputs(case)
    exact = QKV.reference(double(a))
    fused = QKV.call(a)
    rounded = exact.to(torch.bfloat16)
    assert (fused == rounded).float().mean() > 0.99


def test_rope_leaves_the_rest_of_the_head_alone():
    x = torch.randn(3, 2, 16)
    table = torch.randn(3, 6)
    out = apply_rope(x, table, table, 6, "half")
    assert torch.equal(out[..., 6:], x[..., 6:])
    assert not torch.equal(out[..., :6], x[..., :6])


def test_permuting_tokens_permutes_the_result_and_leaves_the_cache():
    case = AttentionCase("permuted", rope_style="half", rotary_dim=32, dtype=torch.float32)
    a, b = (QKV.sample_inputs(case) for _ in range(2))
    order = torch.tensor([3, 0, 4, 2, 1])
    b = replace(
        b, x=b.x[order], cos=b.cos[order], sin=b.sin[order], slot_mapping=b.slot_mapping[order]
    )
    torch.testing.assert_close(QKV.call(b), QKV.call(a)[order], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(b.k_cache, a.k_cache, rtol=1e-6, atol=1e-6)


def test_per_sequence_is_index_copy_into_a_static_cache():
    case = next(case for case in ATTENTION_CASES if case.name == "static_cache")
    a = STORE.sample_inputs(replace(case, rope_style="none", rotary_dim=0))
    usual = [cache.clone() for cache in (a.k_cache, a.v_cache)]
    for cache, values in zip(usual, (a.k, a.v), strict=True):
        by_head = values.view(case.num_pages, -1, case.num_kv_heads, case.head_dim).transpose(1, 2)
        cache.index_copy_(2, a.slot_mapping, by_head)
    STORE.call(a)
    assert torch.equal(a.k_cache, usual[0])
    assert torch.equal(a.v_cache, usual[1])
