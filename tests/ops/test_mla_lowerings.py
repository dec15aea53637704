"""The MLA ops as a GPU runs them, kernel after kernel, on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_contract import as_double, clone
from tilewright.codegen.build import load_interpreted
from tilewright.codegen.targets import SM90
from tilewright.ops import (
    mla_attention,
    mla_attention_library,
    mla_key_kernels,
    mla_lowerings,
    mla_queries,
)
from tilewright.ops.contract import get_op
from tilewright.ops.mla_cases import BranchCase, PrefillCase
from tilewright.ops.mla_checks import FP8

CASES = {
    ("mla_prefill", "static_cache"): 3,
    ("mla_prefill", "codes"): 3,
    ("mla_prefill_branch_fp8", "chunks"): 17,
    ("mla_prefill_branch_fp8", "uint"): 4,
}


@pytest.fixture
def launches(monkeypatch):
    """Launches go to the interpreter; the kernels' names are noted."""
    noted = []

    def launch(spec, grid, values, device):
        noted.append(spec.kernel)
        load_interpreted(spec)[grid](**{name: values[name] for name, _ in spec.signature})

    library = mla_attention_library
    for module in (library, mla_attention, mla_key_kernels, mla_lowerings, mla_queries):
        monkeypatch.setattr(module, "launch", launch)
    for module in (mla_attention, mla_lowerings, mla_queries):
        monkeypatch.setattr(module, "device_target", lambda device: SM90)
    return noted


@pytest.mark.parametrize(("where", "count"), CASES.items(), ids=["-".join(w) for w in CASES])
def test_the_kernels_together_are_the_op(where, count, launches):
    """And its plan names them. count: four chunks of keys take four each and one that merges."""
    op = get_op(where[0])
    a = op.sample_inputs(next(case for case in op.cases if case.name == where[1]))
    planned = {spec.kernel for spec in op.plan_for(a, "sm90").specs}
    exact = as_double(clone(a))
    expected = op.reference(exact)
    args, kwargs = op.split(a)
    run = {"mla_prefill": "launch_mla_prefill", "mla_prefill_branch_fp8": "launch_mla_branch"}
    out = getattr(mla_lowerings, run[op.name])(*args, **kwargs)
    problem = op.tolerances[out.dtype].problem(out, expected)
    assert problem is None, problem
    for name in op.mutated:
        if getattr(a, name) is not None:
            torch.testing.assert_close(
                getattr(a, name).double(), getattr(exact, name), rtol=2.0**-7, atol=2.0**-7
            )
    assert len(launches) == count
    assert set(launches) == planned


def test_the_8_bit_core_is_the_op(launches):
    case = PrefillCase("narrow", weight="quantized", rank=128, attention_dtype=FP8)
    op = get_op("mla_prefill")
    a = op.sample_inputs(case)
    assert op.choose("cuda", a).lowering.name == "emitted_kernel"
    expected = op.reference(clone(a))
    args, kwargs = op.split(a)
    out = mla_lowerings.launch_mla_prefill(*args, **kwargs)
    error = (out.float() - expected.float()).square().mean().sqrt()
    assert float(error / expected.float().square().mean().sqrt()) < 0.03
    assert launches == ["mla_latents", "mla_up_projection", "mla_query", "mla_attention"]


ONE = {"new_tokens": (21,), "cached_tokens": (0,)}


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("mla_prefill", PrefillCase("one", **ONE)),
        ("mla_prefill_branch_fp8", BranchCase("one", **ONE, rope_style="half")),
    ],
    ids=["mla_prefill", "branch"],
)
def test_one_sequence_without_a_prefix_is_dense(name, case, library, launches, monkeypatch):
    """Its lengths are in the shapes: the library takes it, with queries that are rotated whole."""

    def attention(q, k, v, bias, lse, dropout, causal, *more, scale):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale
        )
        return out, None

    if library:
        monkeypatch.setattr(mla_attention_library, "library_gains", lambda *sizes: True)
        monkeypatch.setattr(mla_attention_library, "_accepted", lambda call: True)
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", attention)
    op = get_op(name)
    a = op.sample_inputs(case)
    expected = op.reference(as_double(clone(a)))
    planned = {spec.kernel for spec in op.plan_for(a, "sm90").specs}
    args, kwargs = op.split(a)
    run = {"mla_prefill": "launch_mla_prefill", "mla_prefill_branch_fp8": "launch_mla_branch"}
    out = getattr(mla_lowerings, run[name])(*args, **kwargs)
    problem = op.tolerances[out.dtype].problem(out, expected)
    assert problem is None, problem
    assert set(launches) == planned
    assert ("mla_join" in launches) == library
    assert ("mla_attention" in launches) != library


def test_memory_that_tma_cannot_reach_is_copied(launches):
    op = get_op("mla_prefill")
    a = op.sample_inputs(next(case for case in op.cases if case.name == "codes"))
    expected = op.reference(clone(a))
    moved = torch.empty(a.kv_b_weight.numel() + 1, dtype=a.kv_b_weight.dtype)[1:]
    moved = moved.view(a.kv_b_weight.shape).copy_(a.kv_b_weight)
    assert moved.data_ptr() % 16
    args, kwargs = op.split(a)
    args[3] = moved
    out = mla_lowerings.launch_mla_prefill(*args, **kwargs)
    problem = op.tolerances[out.dtype].problem(out, expected.double())
    assert problem is None, problem
