"""Tests that a report names the kernels that a launch with the same shapes uses."""

from dataclasses import replace

import pytest
import torch

from tilewright.codegen.emit import emit
from tilewright.ops.contract import all_ops, get_op
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.qkv.arguments import KvStoreArguments


def store_arguments(tokens, pages=4, page_size=16, heads=2, head_dim=32, device="meta"):
    k = torch.empty(tokens, heads, head_dim, device=device, dtype=torch.bfloat16)
    shape = (pages, page_size, heads, head_dim)
    caches = [torch.empty(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    window = list(CacheWindow.page_major(caches[0]).to_ints())
    slots = torch.empty(tokens, device=device, dtype=torch.int64)
    return KvStoreArguments(k, k, *caches, slots, window, window)


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_one_store_kernel_serves_counts_up_to_a_power_of_two(target):
    specs = [
        get_op("paged_kv_store").plan_for(store_arguments(tokens, heads=1), target).specs
        for tokens in (4097, 5000, 8192, 1)
    ]
    assert specs[0] == specs[1] == specs[2] != specs[3]


def test_a_cache_of_one_slot_has_a_kernel():
    window = [1, 1, 2, 32, 0, 0, 32, 1, 0]
    a = replace(store_arguments(1, pages=1, page_size=1), k_window=window, v_window=window)
    (spec,) = get_op("paged_kv_store").plan_for(a, "sm100").specs
    assert "tl.store(" in emit(spec)


NAMES = [
    "fused_qkv_paged",
    "paged_kv_store",
    "fused_qkv_matmul_kv_cache_paged_ragged",
    "mla_latent_store",
    "mla_prefill",
    "mla_prefill_branch_fp8",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_case_has_a_plan_with_a_reason(name):
    op = get_op(name)
    assert op in all_ops()
    for case in op.cases:
        a = op.sample_inputs(case)
        report = op.plan_for(a, "sm100")
        assert report.name
        assert report.reason
        assert (report.name in ("reference", "nothing")) == (not report.specs)
        assert all(spec.target == "sm100" for spec in report.specs)


def test_a_plan_says_why_there_is_no_kernel():
    op = get_op("fused_qkv_paged")
    case = next(case for case in op.cases if case.dtype == torch.float64)
    report = op.plan_for(op.sample_inputs(case), "sm100")
    assert (report.name, report.specs) == ("reference", ())
    assert report.reason == "emitted_kernel: no kernel for torch.float64"


def test_no_tokens_need_no_kernel():
    op = get_op("fused_qkv_paged")
    case = next(case for case in op.cases if case.name == "no_tokens")
    report = op.plan_for(replace(op.sample_inputs(case), static_tokens=True), "sm90")
    assert (report.name, report.specs) == ("nothing", ())
