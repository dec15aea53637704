"""Compares the MLA ops with attention that is written out step by step, with Modular MAX's shapes.
Also tests what else the ops promise."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tests.ops.test_contract import clone
from tilewright.ops import CacheWindow, mla_prefill_plan
from tilewright.ops.formats import fp8_block
from tilewright.ops.mla.cases import BRANCH_CASES, BranchCase, PrefillCase
from tilewright.ops.mla.latents.latent_store import OP as STORE
from tilewright.ops.mla.latents.latent_store import mla_latent_store
from tilewright.ops.mla.prefill.branch import OP as BRANCH
from tilewright.ops.mla.prefill.branch import mla_prefill_branch_fp8
from tilewright.ops.mla.prefill.prefill import OP as PREFILL
from tilewright.ops.mla.prefill.prefill import mla_prefill

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turn(x, cos, sin):
    """Rotates pairs of neighbours, by products of complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


def written_out(q, latent, k_rope, weight, v_dim, scale, seen):
    """Computes attention of q [S, H, N + R] to keys [K, .], as a DeepSeek layer does without a
    cache."""
    heads, nope = q.shape[1], q.shape[2] - k_rope.shape[1]
    kv = (latent @ weight.T).unflatten(-1, (heads, nope + v_dim))
    rope = k_rope.unsqueeze(1).expand(-1, heads, -1)
    k, v = torch.cat((kv[..., :nope], rope), -1), kv[..., nope:]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return out.squeeze(0).transpose(0, 1)


def branch_written_out(a):
    """Computes the result and the cache of the branch op step by step in float64, one sequence
    after the other."""
    rank = a.kv_b_proj.shape[1]
    blocks = a.blocks.clone()
    pages = blocks[:, 0, a.layer_idx, :, 0]
    size = pages.shape[1]
    out = torch.zeros(*a.q.shape[:2], a.v_dim, dtype=a.q.dtype)
    scale_block = (a.granularity, a.granularity)
    weight = fp8_block.dequantize(a.kv_b_proj, a.kv_b_proj_scale, scale_block, torch.float64)
    for b, cached in enumerate(a.cache_lengths.tolist()):
        first, end = a.input_row_offsets[b : b + 2].tolist()
        positions = torch.arange(cached, cached + end - first)
        cos, sin = a.freqs_cis[positions, ::2].double(), a.freqs_cis[positions, 1::2].double()
        own = a.latents[first:end]
        normed = rms_norm(own[:, :rank], a.kv_norm_gamma, a.epsilon)
        turned = turn(own[:, rank:].contiguous(), cos, sin)
        places = torch.arange(cached + end - first)
        page, slot = a.lookup_table[b].long()[places // size], places % size
        pages[page[cached:], slot[cached:]] = torch.cat((normed, turned), -1)
        entries = pages[page, slot]
        codes, scales = fp8_block.quantize_rows(entries[:, :rank], a.granularity, 1200.0)
        latent = fp8_block.dequantize(codes, scales, (1, a.granularity), torch.float64)
        nope = a.q.shape[2] - entries.shape[1] + rank
        q = a.q[first:end]
        q = torch.cat(
            (q[..., :nope], turn(q[..., nope:].contiguous(), cos[:, None], sin[:, None])), -1
        )
        seen = places[None, :] <= positions[:, None]
        given = (q, latent, entries[:, rank:], weight, a.v_dim, a.scale, seen)
        if end > first:
            out[first:end] = written_out(*given)
    return out, blocks


# The (prompt, context) of MAX's ragged tests, which run here at MAX's widths with few heads.
SHAPES = [(120, 120), (12, 12), (350, 700), (120, 240), (1, 17), (64, 1088)]
WIDE = {"rank": 512, "rope_dim": 64, "nope": 128, "v_dim": 128, "num_heads": 2}


def shaped(prompt, context, batch=1, **more):
    return BranchCase(
        "shape", new_tokens=(prompt,) * batch, cached_tokens=(context - prompt,) * batch,
        num_pages=batch * (context // 64 + 2), page_size=64, dtype=torch.float64, **WIDE | more,
    )  # fmt: skip


@pytest.mark.parametrize(("prompt", "context"), SHAPES)
def test_the_branch_is_its_steps_written_out(prompt, context):
    a = BRANCH.sample_inputs(shaped(prompt, context, batch=2 if context < 200 else 1))
    out, blocks = branch_written_out(a)
    torch.testing.assert_close(BRANCH.call(a), out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a.blocks, blocks, rtol=1e-12, atol=1e-12)


def test_no_sequence_at_all_is_no_row_at_all():
    a = BRANCH.sample_inputs(BranchCase("none", new_tokens=(), cached_tokens=()))
    assert BRANCH.call(a).shape == (0, a.q.shape[1], a.v_dim)


@pytest.mark.parametrize("case", [c for c in BRANCH_CASES if c.buffer_size], ids=lambda c: c.name)
def test_chunks_merge_to_the_result_of_one(case):
    a = BRANCH.sample_inputs(case)
    one = clone(BRANCH.sample_inputs(replace(case, buffer_size=0, buffer_pages=False)))
    assert torch.equal(BRANCH.call(a), BRANCH.call(one))
    assert torch.equal(a.blocks, one.blocks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [STORE, PREFILL, BRANCH], ids=lambda op: op.name)
def test_twice_is_once(op, device):
    """Two calls do the same as one: q and the latents do not change, and the second call leaves the
    cache as the first did."""
    a = op.sample_inputs(op.cases[0], device)
    before = clone(a)
    first = op.call(a)
    caches = {name: getattr(a, name).clone() for name in op.mutated if getattr(a, name) is not None}
    second = op.call(a)
    for name, cache in caches.items():
        assert torch.equal(getattr(a, name), cache)
    if first is not None:
        assert torch.equal(first, second)
    for field in fields(a):
        value = getattr(a, field.name)
        if isinstance(value, torch.Tensor) and field.name not in op.mutated:
            assert torch.equal(value, getattr(before, field.name)), field.name


@pytest.mark.parametrize("device", DEVICES)
def test_large_zero_and_denormal_latents_have_defined_results(device):
    """Latents larger than 448 * 1200 / 448 saturate. Rows of zeros, and rows below fp32's normal
    range, become zeros. No result is NaN."""
    a = BRANCH.sample_inputs(BranchCase("rows", new_tokens=(4,), cached_tokens=(3,)), device)
    rank = a.kv_b_proj.shape[1]
    a = replace(a, kv_norm_gamma=torch.full_like(a.kv_norm_gamma, 3000.0))
    a.latents[1] = 0
    a.latents[2, :rank] = 1e-38
    a.blocks[:, 0, 1, 0] = 0
    a.blocks[:, 0, 1, 1] = 1e-40
    expected = BRANCH.reference(clone(a))
    out = BRANCH.call(a)
    assert bool(out.isfinite().all())
    problem = BRANCH.tolerances[out.dtype].problem(out, expected.double())
    assert problem is None, problem
    page = a.lookup_table[0, 0].item()
    assert float(a.blocks[page, 0, 1, 3, 0, :rank].abs().max()) > 1200


@pytest.mark.parametrize("device", DEVICES)
def test_a_buffer_of_no_rows_writes_nothing_and_gives_zeros(device):
    case = BranchCase("plain")
    a = BRANCH.sample_inputs(case, device)
    a = replace(a, buffer_length=[0], buffer_row_offsets=torch.zeros_like(a.buffer_row_offsets))
    blocks = a.blocks.clone()
    out = BRANCH.call(a)
    assert out.shape == (case.num_tokens, case.num_heads, case.v_dim)
    assert not out.any()
    assert torch.equal(a.blocks, blocks)


def test_a_sequence_without_tokens_neither_writes_nor_attends():
    a = BRANCH.sample_inputs(BranchCase("plain"))  # its second sequence
    page = a.lookup_table[1, 0].item()
    before = a.blocks[page].clone()
    BRANCH.call(a)
    assert torch.equal(a.blocks[page], before)


def test_a_query_that_sees_nothing_gives_zeros():
    a = PREFILL.sample_inputs(
        next(case for case in PREFILL.cases if case.name == "static_bool_mask")
    )
    out = PREFILL.call(a)
    assert not out[4].any()  # the last query of the first sequence is masked as a whole
    assert out[3].any()


@pytest.mark.parametrize("causal", [True, False])
def test_keys_given_without_a_cache(causal):
    a = PREFILL.sample_inputs(
        PrefillCase("dense", keys="given", slots="none", runs=True, new_tokens=(6, 6),
                    cached_tokens=(0, 0), norm=False, rope_style="none", dtype=torch.float64)
    )  # fmt: skip
    out = mla_prefill(a.q, a.latent, a.k_rope, a.kv_b_weight, v_dim=a.v_dim, scale=a.scale,
                      num_sequences=2, mask="causal" if causal else "none")  # fmt: skip
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    for rows in (slice(0, 6), slice(6, 12)):
        given = (a.q[rows], a.latent[rows], a.k_rope[rows], a.kv_b_weight)
        want = written_out(*given, a.v_dim, a.scale, seen)
        torch.testing.assert_close(out[rows], want)


def test_more_keys_than_queries_by_position():
    """The keys are a StaticCache of finished latents. Positions decide which latents a query sees;
    the others may hold anything."""
    queries, keys = 3, 16
    generator = torch.Generator().manual_seed(0)
    q, latent, rope, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2 * queries, 2, 12), (2 * keys, 8), (2 * keys, 4), (2 * (8 + 5), 8))
    )
    positions = torch.tensor([4, 5, 6])
    latent[7:16] = float("nan")
    out = mla_prefill(q, latent, rope, weight, v_dim=5, scale=0.3, num_sequences=2,
                      positions=positions)  # fmt: skip
    seen = torch.arange(7)[None, :] <= positions[:, None]
    for b in range(2):
        own, rows = slice(b * queries, (b + 1) * queries), slice(b * keys, b * keys + 7)
        want = written_out(q[own], latent[rows], rope[rows], weight, 5, 0.3, seen)
        torch.testing.assert_close(out[own], want)


def test_an_additive_mask_of_large_finite_numbers_is_no_minus_infinity():
    q, latent, rope = torch.randn(2, 1, 6), torch.randn(4, 8), torch.randn(4, 2)
    weight = torch.randn(4 + 3, 8)
    mask = torch.full((1, 1, 2, 4), torch.finfo(torch.float32).min)
    given = {"v_dim": 3, "scale": 1.0, "mask": "none"}
    out = mla_prefill(q, latent, rope, weight, attn_mask=mask, **given)
    assert bool(out.isfinite().all())
    assert out.any()
    hidden = mla_prefill(q, latent, rope, weight, attn_mask=mask - torch.inf, **given)
    assert not hidden.any()


def test_windows_of_a_pool_and_of_two_caches_are_the_same_store():
    latent, rope = torch.randn(5, 8), torch.randn(5, 4)
    slots = torch.tensor([3, 0, 9, -1, 6])
    pool = torch.zeros(4, 3, 12)
    pair = torch.zeros(4, 3, 8), torch.zeros(4, 3, 4)
    mla_latent_store(latent, rope, pool, None, slots)
    mla_latent_store(latent, rope, *pair, slots)
    assert torch.equal(pool, torch.cat(pair, -1))
    assert torch.equal(pool.view(-1, 12)[9], torch.cat((latent[2], rope[2])))
    assert int((pool != 0).any(-1).sum()) == 4


def test_a_static_cache_is_two_windows():
    latents, ropes = torch.zeros(2, 1, 6, 8), torch.zeros(2, 1, 6, 4)
    windows = [CacheWindow.static_cache(base).to_ints() for base in (latents, ropes)]
    latent, rope = torch.randn(4, 8), torch.randn(4, 4)
    mla_latent_store(latent, rope, latents, ropes, torch.tensor([2, 3]), slots="per_sequence",
                     latent_window=windows[0], rope_window=windows[1])  # fmt: skip
    assert torch.equal(latents[:, 0, 2:4], latent.unflatten(0, (2, 2)))
    assert torch.equal(ropes[:, 0, 2:4], rope.unflatten(0, (2, 2)))
    assert int((latents != 0).any(-1).sum()) == 4


def test_tensors_that_the_form_of_writing_does_not_read_change_no_place():
    a = STORE.sample_inputs(next(case for case in STORE.cases if case.slots == "block_table"))
    same_slot = torch.zeros(a.latent.shape[0], dtype=torch.int64)
    b = replace(clone(a), slot_mapping=same_slot, cache_lengths=same_slot)
    for given in (a, b):
        STORE.torch_op(**vars(given))
    assert torch.equal(a.latent_cache, b.latent_cache)


def test_plans_of_the_documents():
    rows, starts, lengths = mla_prefill_plan(torch.tensor([0, 10, 40]), torch.tensor([0, 0]), 32)
    assert rows[:3].tolist() == [[0, 10, 32], [0, 0, 8], [0, 0, 0]]
    assert starts[:3, :2].tolist() == [[0, 0], [10, 22], [10, 30]]
    assert lengths[:3].tolist() == [32, 8, -1]
    assert rows.shape == (16, 3)
    rows, starts, lengths = mla_prefill_plan(
        torch.tensor([0, 160, 360]), torch.tensor([0, 0]), 256, page_size=128
    )
    assert rows[:2].tolist() == [[0, 256, 256], [0, 0, 256]]
    assert starts[:3, :2].tolist() == [[0, 0], [256, 0], [256, 256]]
    assert lengths[:3].tolist() == [256, 256, -1]


def test_the_branch_takes_a_plan_as_it_is():
    a = BRANCH.sample_inputs(BranchCase("plain", num_heads=1))
    lengths = a.cache_lengths, a.input_row_offsets
    rows, starts, counts = mla_prefill_plan(lengths[1], lengths[0], 8, 6)
    given = [getattr(a, field.name) for field in fields(a) if not field.kw_only]
    given[11:14] = rows, starts, counts
    out = mla_prefill_branch_fp8(*given, v_dim=a.v_dim)
    assert torch.equal(out, BRANCH.call(clone(a)))


@pytest.mark.parametrize("attention_dtype", [None, torch.float8_e4m3fn])
def test_the_8_bit_core_is_close_to_the_other(attention_dtype):
    case = BranchCase("core", attention_dtype=attention_dtype, dtype=torch.float32)
    exact = BRANCH.call(BRANCH.sample_inputs(replace(case, attention_dtype=None)))
    out = BRANCH.call(BRANCH.sample_inputs(case))
    error = (out - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert (float(error) == 0.0) == (attention_dtype is None)
    assert float(error) < 0.06
