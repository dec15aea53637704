"""The MLA ops as a GPU runs them, kernel after kernel, on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted_launches import interpret_launches
from tests.mla_library import take_every_call
from tests.ops.test_contract import as_double, clone
from tilewright.codegen.targets import SM90
from tilewright.ops.contract import get_op
from tilewright.ops.mla import attention_lowering as mla_attention
from tilewright.ops.mla import cudnn as mla_attention_library
from tilewright.ops.mla import key_lowering as mla_key_kernels
from tilewright.ops.mla import lowering as mla_lowerings
from tilewright.ops.mla import query_lowering as mla_queries
from tilewright.ops.mla.cases import BranchCase, PrefillCase
from tilewright.ops.mla.checks import FP8

CASES = {
    ("mla_prefill", "static_cache"): 2,
    ("mla_prefill", "codes"): 2,
    ("mla_prefill_branch_fp8", "chunks"): 13,
    ("mla_prefill_branch_fp8", "uint"): 3,
}


@pytest.fixture
def launches(monkeypatch):
    """Launches go to the interpreter; the kernels' names are noted."""
    for module in (mla_attention, mla_lowerings, mla_queries):
        monkeypatch.setattr(module, "device_target", lambda device: SM90)
    library = mla_attention_library
    return interpret_launches(
        monkeypatch, library, mla_attention, mla_key_kernels, mla_lowerings, mla_queries
    )


@pytest.mark.parametrize(("where", "count"), CASES.items(), ids=["-".join(w) for w in CASES])
def test_the_kernels_together_are_the_op(where, count, launches):
    """And its plan names them. count: four chunks of keys take three each and one that merges."""
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


# What is launched around the library. Keys are made joined, their rope columns written with the
# queries; or in a launch of their own, where queries came rotated, and where no tile of the
# up-projection fits the rows of a head.
LIBRARY_CASES = {
    "mla_prefill": (PrefillCase("one", **ONE), {"mla_query"}),
    "runs": (
        PrefillCase("runs", keys="given", slots="none", runs=True, new_tokens=(9, 9),
                    cached_tokens=(0, 0)),
        {"mla_query"},
    ),
    "interleaved": (PrefillCase("one", **ONE, rope_style="interleaved"), {"mla_query"}),
    "rotated": (PrefillCase("one", **ONE, rope_on="k"), {"mla_join"}),
    "branch": (BranchCase("one", **ONE, rope_style="half", v_dim=32), {"mla_query"}),
    "branch, odd": (BranchCase("one", **ONE, rope_style="half"), {"mla_query", "mla_join"}),
}  # fmt: skip


def run_case(name, case, launches):
    """Runs the op and compares result and plan with the reference's."""
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


@pytest.mark.parametrize(("case", "around"), LIBRARY_CASES.values(), ids=LIBRARY_CASES)
def test_the_library_is_given_both_parts_of_keys_and_queries(case, around, launches, monkeypatch):
    take_every_call(monkeypatch)
    name = "mla_prefill_branch_fp8" if isinstance(case, BranchCase) else "mla_prefill"
    run_case(name, case, launches)
    assert {"mla_query", "mla_join", "mla_attention"} & set(launches) == around


@pytest.mark.parametrize("name", ["mla_prefill", "branch"])
def test_one_sequence_without_a_prefix_is_dense(name, launches):
    """Its lengths are in the shapes."""
    case, _ = LIBRARY_CASES[name]
    run_case("mla_prefill" if name == "mla_prefill" else "mla_prefill_branch_fp8", case, launches)
    assert "mla_attention" in launches


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


@pytest.mark.parametrize("name", ["mla_prefill", "mla_prefill_branch_fp8"])
def test_scales_that_are_not_positive_are_the_references(name):
    """The op takes any finite one."""
    op = get_op(name)
    a = replace(sample(op, "paged" if name == "mla_prefill" else "plain"), scale=-0.5)
    choice = op.choose("cuda", a)
    assert choice.lowering.name == "reference"
    assert "a scale of -0.5" in str(choice.rejected)


def sample(op, name):
    return op.sample_inputs(next(case for case in op.cases if case.name == name))
