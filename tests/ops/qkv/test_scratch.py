"""Tests scratch arguments: to a kernel they look like the given arguments, and they use none of the
user's memory."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from tilewright.ops.cache.addressing import resolve_places
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.formats.weight_rows import weight_rows
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.scratch import argument_bytes, scratch_arguments

CPU = torch.device("cpu")
CASES = [case for case in qkv_cache.OP.cases if case.num_tokens]


def tensors(a):
    return {f.name: v for f in fields(a) if isinstance(v := getattr(a, f.name), torch.Tensor)}


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scratch_is_valid_and_like_the_given(case, tokens):
    a = qkv_cache.OP.sample_inputs(case)
    before = {name: tensor.clone() for name, tensor in tensors(a).items()}
    made = scratch_arguments(a, tokens, CPU)
    qkv_cache.OP.validate(made)
    qkv_cache.OP.validate_values(made)
    for name, tensor in tensors(made).items():
        given = getattr(a, name)
        if name == "v_cache" and given is None:
            continue
        assert tensor.dtype == given.dtype
        if name not in ("k_cache", "v_cache"):
            assert tensor.stride() == given.stride()
            assert tensor.shape[1:] == given.shape[1:]
    k_window = CacheWindow.from_ints(made.k_window)
    assert k_window.strides == CacheWindow.from_ints(a.k_window).strides
    count = made.x.shape[0]
    page, offset, written = resolve_places(made, k_window, count)
    assert bool(written.all())
    assert len(set(zip(page.tolist(), offset.tolist(), strict=True))) == count
    assert qkv_cache.OP.call(made).isfinite().all()
    for name, tensor in tensors(a).items():
        assert torch.equal(tensor.double(), before[name].double()), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_metadata_suffices(case):
    a = qkv_cache.OP.sample_inputs(case, device="meta")
    made = scratch_arguments(a, 4, CPU)
    assert made.x.device == CPU
    assert argument_bytes(made) > 0


@pytest.mark.parametrize("projection", ["separate", "packed", "per_head"])
def test_weights_of_one_tensor_stay_so(projection):
    case = qkv_cache.AttentionCase("it", num_kv_heads=4, projection=projection)
    made = scratch_arguments(qkv_cache.OP.sample_inputs(case), 4, CPU)
    rows = weight_rows(made.q_weight, made.k_weight, made.v_weight)
    assert (rows is not None) == (projection != "separate")


def test_seeds_differ_and_a_seed_repeats():
    a = qkv_cache.OP.sample_inputs(CASES[0])
    first, again, other = (scratch_arguments(a, 4, CPU, seed).x for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_long_cache_is_not_copied():
    case = qkv_cache.AttentionCase("long", num_pages=1000)
    made = scratch_arguments(qkv_cache.OP.sample_inputs(case), 16, CPU)
    assert CacheWindow.from_ints(made.k_window).num_pages == 2
