"""The references against attention code written the usual way, slot by slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tilewright.ops.contract import get_op
from tilewright.ops.rope import apply_rope
from tilewright.ops.sample_cases import ATTENTION_CASES
from tilewright.ops.samples import AttentionCase

QKV = get_op("fused_qkv_paged")
STORE = get_op("paged_kv_store")


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def usual_rope(x, a):
    """Hugging Face's forms: x * cos + rotate_half(x) * sin, and the interleaved one."""
    if a.rope_style == "none":
        return x
    rows = torch.arange(x.shape[0]) % a.cos.shape[0]
    cos, sin = a.cos.double()[rows, None], a.sin.double()[rows, None]
    half_width = cos.shape[-1] == a.rotary_dim // 2
    turned, rest = x[..., : a.rotary_dim], x[..., a.rotary_dim :]
    if a.rope_style == "half":
        if half_width:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1)
    if half_width:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    swapped = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((turned * cos + swapped * sin, rest), dim=-1)


def usual_norm(x, weight, eps):
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight.double(), eps)


def usual_projection(a):
    def project(weight, bias):
        bias = None if bias is None else bias.double().flatten()
        return F.linear(a.x.double(), weight.double().flatten(0, 1), bias).unflatten(
            1, weight.shape[:2]
        )

    q = usual_norm(project(a.q_weight, a.q_bias), a.q_norm_weight, a.norm_eps)
    k = usual_norm(project(a.k_weight, a.k_bias), a.k_norm_weight, a.norm_eps)
    return usual_rope(q, a), usual_rope(k, a), project(a.v_weight, a.v_bias)


def halves(layout, k_cache, v_cache):
    """K and V as [P, S, H, D], by the layout's own words."""
    if layout == "vllm_pair":
        return k_cache.unbind(0)
    if layout == "max_pair":
        return k_cache[:, 0, 1], k_cache[:, 1, 1]
    if layout == "page_major":
        return k_cache, v_cache
    return k_cache.transpose(1, 2), v_cache.transpose(1, 2)


def usual_store(case, a, k, v):
    """Writes one token after the other."""
    k_cache, v_cache = halves(case.layout, a.k_cache, a.v_cache)
    slots = a.slot_mapping.tolist()
    for token in range(k.shape[0]):
        if case.slots == "per_sequence":
            page, slot = divmod(token, len(slots))
            slot, limit = slots[slot], case.page_size
        else:
            page, slot, limit = None, slots[token], case.num_pages * case.page_size
        if slot < 0 and case.indexing == "paged":
            continue
        slot %= limit
        if page is None:
            page, slot = divmod(slot, case.page_size)
        k_cache[page, slot], v_cache[page, slot] = k[token], v[token]


def double(arguments):
    return replace(
        arguments,
        **{
            name: value.double()
            for name, value in vars(arguments).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        },
    )


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_fused_qkv_is_the_usual_attention_code(case):
    a, usual = (double(QKV.sample_inputs(case)) for _ in range(2))
    q, k, v = usual_projection(usual)
    usual_store(case, usual, k, v)
    torch.testing.assert_close(QKV.reference(a), q, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.k_cache, usual.k_cache, rtol=1e-12, atol=1e-12)
    if a.v_cache is not None:
        torch.testing.assert_close(a.v_cache, usual.v_cache, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_store_is_the_usual_cache_write(case):
    a, usual = (double(STORE.sample_inputs(case)) for _ in range(2))
    usual_store(case, usual, usual_rope(usual.k, usual), usual.v)
    STORE.reference(a)
    torch.testing.assert_close(a.k_cache, usual.k_cache, rtol=1e-12, atol=1e-12)
    if a.v_cache is not None:
        assert torch.equal(a.v_cache, usual.v_cache)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_no_other_slot_changes_by_a_bit(case):
    a = QKV.sample_inputs(case)
    before = {name: getattr(a, name) for name in ("k_cache", "v_cache")}
    before = {name: cache.clone() for name, cache in before.items() if cache is not None}
    QKV.call(a)
    ones = torch.ones(case.num_tokens, case.num_kv_heads, case.head_dim, dtype=case.dtype)
    marks = replace(a, **{name: torch.zeros_like(cache) for name, cache in before.items()})
    usual_store(case, marks, ones, ones)
    for name, old in before.items():
        untouched = getattr(marks, name) == 0
        assert untouched.any()
        assert torch.equal(getattr(a, name)[untouched], old[untouched])


def test_rounding_happens_once():
    """A bf16 chain would round after the projection, the norm and each product of the rope."""
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
