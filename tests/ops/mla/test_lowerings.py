"""Tests how the MLA ops run on a GPU, in addition to the tests of every op in
`tests/ops/test_lowerings.py`.

The tests cover the 8-bit core, the library's attention, and the memory of chunks, on Triton's
interpreter.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from tests.attention_cases import Case as CoreCase
from tests.attention_cases import attend, call_of, exact, with_options
from tests.interpreted import Interpreter, interpret, steps_of
from tests.mla_library import take_every_call
from tests.ops.test_contract import as_double, clone
from tilewright.codegen.targets import SM90
from tilewright.ops.contract import get_op
from tilewright.ops.mla.arguments import FP8
from tilewright.ops.mla.cases import BranchCase, PrefillCase
from tilewright.ops.runtime.program import Buffer, Planner, drive


def sample(op, name):
    return op.sample_inputs(next(case for case in op.cases if case.name == name))


def kernels_of(program):
    return [spec.kernel for spec in program.specs]


def test_the_8_bit_core_is_the_op():
    """Compares the 8-bit core with the op. The scales are in the call's own memory, so that the
    call can be repeated."""
    case = PrefillCase("narrow", weight="quantized", rank=128, attention_dtype=FP8)
    op = get_op("mla_prefill")
    a = replace(op.sample_inputs(case), k_scale=0.5)
    expected = op.reference(clone(a))
    program = interpret(op, a)
    error = (program.outcome.result.float() - expected.float()).square().mean().sqrt()
    assert float(error / expected.float().square().mean().sqrt()) < 0.03
    assert kernels_of(program) == [
        "mla_latents", "mla_up_projection", "mla_query", "mla_attention"
    ]  # fmt: skip
    assert program.repeatable


ONE = {"new_tokens": (21,), "cached_tokens": (0,)}


# For each case, the launches before and after the library's attention. Keys are joined, and one
# launch writes their rope columns and the queries. If the queries come rotated, or if no tile of
# the up-projection fits the rows of a head, a separate launch writes these columns.
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


def run_case(case):
    """Runs a case. Checks that its result is that of the reference, and that its plan has the same
    kernels. Returns the program."""
    op = get_op("mla_prefill_branch_fp8" if isinstance(case, BranchCase) else "mla_prefill")
    a = op.sample_inputs(case)
    expected = op.reference(as_double(clone(a)))
    planned = op.plan_for(a, "sm90").specs
    program = interpret(op, a, num_sms=SM90.num_sms)
    out = program.outcome.result
    problem = op.tolerances[out.dtype].problem(out, expected)
    assert problem is None, problem
    assert planned == program.specs
    return program


@pytest.mark.parametrize(("case", "around"), LIBRARY_CASES.values(), ids=LIBRARY_CASES)
def test_the_library_is_given_both_parts_of_keys_and_queries(case, around, monkeypatch):
    take_every_call(monkeypatch)
    kernels = kernels_of(run_case(case))
    assert {"mla_query", "mla_join", "mla_attention"} & set(kernels) == around


def test_given_codes_have_the_scale_of_their_row_and_block():
    """Given codes are multiplied by the scale of their row and block. There are two blocks of
    columns, and the scales of adjacent rows differ."""
    cases = get_op("mla_prefill").cases
    run_case(replace(next(case for case in cases if case.name == "codes"), rank=256))


@pytest.mark.parametrize("name", ["key_slots", "whole_table"])
def test_a_write_by_slots_is_not_given_the_bounds_of_sequences(name):
    """A write by slots does not get the bounds of sequences. With them, the kernel would search the
    sequence of each token, and each stride of the bounds would need another kernel."""
    op = get_op("mla_prefill")
    a = op.sample_inputs(next(case for case in op.cases if case.name == name))
    assert a.row_offsets is not None
    kernels = [spec for spec in op.plan_for(a, "sm90").specs if spec.kernel == "mla_latents"]
    assert [dict(spec.constants)["STORE"] for spec in kernels] == [True, False]
    assert not {"row_offsets_ptr", "lengths_ptr"} & {name for name, _ in kernels[0].signature}


@pytest.mark.parametrize("mask", ["causal", "none"])
def test_the_librarys_log_sum_exp_is_that_of_the_logits(mask, monkeypatch):
    case = CoreCase("dense", (19,) * 2, (19,) * 2, nope=24, rope=8, dense=True)
    a = call_of(with_options(case, mask=mask, out_dtype=torch.float16))
    a = replace(a, k_rope=a.k_rope.contiguous())
    machine = Interpreter(SM90)
    with monkeypatch.context() as patched:
        take_every_call(patched)
        got = attend(a, machine)
    assert machine.kernels == ["mla_join"]
    for tensor, want in zip(got, exact(a), strict=True):
        torch.testing.assert_close(tensor.double(), want, rtol=4e-3, atol=4e-3)


def test_a_chip_without_a_record_has_no_library(monkeypatch):
    take_every_call(monkeypatch)
    op = get_op("mla_prefill")
    target = replace(SM90, features=frozenset())
    steps = steps_of(op, op.sample_inputs(LIBRARY_CASES["mla_prefill"][0]), target)
    assert "mla_attention" in kernels_of(drive(steps, Planner(target), keep=True))


@pytest.mark.parametrize("name", ["mla_prefill", "branch"])
def test_one_sequence_without_a_prefix_is_dense(name):
    """One sequence without a prefix counts as dense, because the shapes give its length."""
    program = run_case(LIBRARY_CASES[name][0])
    (core,) = [spec for spec in program.specs if spec.kernel == "mla_attention"]
    assert core.constant("RAGGED") is False


def test_memory_that_tma_cannot_reach_is_copied():
    op = get_op("mla_prefill")
    a = sample(op, "codes")
    expected = op.reference(clone(a))
    moved = torch.empty(a.kv_b_weight.numel() + 1, dtype=a.kv_b_weight.dtype)[1:]
    moved = moved.view(a.kv_b_weight.shape).copy_(a.kv_b_weight)
    assert moved.data_ptr() % 16
    out = interpret(op, replace(a, kv_b_weight=moved)).outcome.result
    problem = op.tolerances[out.dtype].problem(out, expected.double())
    assert problem is None, problem


@pytest.mark.parametrize("name", ["kv_b_scale", "latent_scale"])
def test_scales_that_are_not_whole_16_bytes_are_told_apart(name):
    """Scales that do not start at multiples of 16 bytes need another kernel: a kernel for aligned
    scales would read them at wrong addresses."""
    op = get_op("mla_prefill")
    a = sample(op, "codes")
    scale = getattr(a, name)
    moved = torch.empty(scale.numel() + 1, dtype=scale.dtype)[1:].view(scale.shape).copy_(scale)

    def aligned(arguments):
        specs = op.plan_for(arguments, "sm90").specs
        (spec,) = [spec for spec in specs if spec.kernel == "mla_up_projection"]
        parameter = {"kv_b_scale": "weight_scale_ptr"}.get(name, f"{name}_ptr")
        return parameter in spec.divisible16

    assert aligned(replace(a, **{name: scale.clone()}))
    assert not aligned(replace(a, **{name: moved}))


@pytest.mark.parametrize("name", ["mla_prefill", "mla_prefill_branch_fp8"])
def test_scales_that_are_not_positive_are_the_references(name):
    """The op accepts any finite scale."""
    op = get_op(name)
    a = replace(sample(op, "paged" if name == "mla_prefill" else "plain"), scale=-0.5)
    choice = op.choose("cuda", a)
    assert choice.lowering.name == "reference"
    assert "a scale of -0.5" in str(choice.rejected)


class Counting(Interpreter):
    """A machine that runs no kernel. `most` is the largest number of bytes of the call's own memory
    at any one time."""

    def __init__(self):
        super().__init__(SM90, runs=False)
        self.most = 0
        self.made = weakref.WeakSet()

    def perform(self, step):
        answer = super().perform(step)
        made = getattr(step, "makes", None) if not isinstance(step, Buffer) else step
        if made is not None:
            self.made.add(answer.untyped_storage())
            self.most = max(self.most, sum(storage.nbytes() for storage in self.made))
        return answer


def most_memory(chunks):
    """Returns the most memory that a call takes at any one time. It has 16 times as many keys as
    queries, in this many chunks."""
    op = get_op("mla_prefill_branch_fp8")
    case = BranchCase("many keys", new_tokens=(16,), cached_tokens=(240,), num_pages=40)
    case = replace(case, buffer_size=-(-256 // chunks))
    machine = Counting()
    program = drive(steps_of(op, op.sample_inputs(case), machine.target), machine)
    assert machine.kernels.count("mla_attention") == chunks
    assert program.repeatable is (chunks == 1)
    assert program.steps or chunks > 1
    return machine.most


def test_the_keys_of_a_chunk_are_freed_before_the_next_are_made():
    whole, halves, quarters = (most_memory(chunks) for chunks in (1, 2, 4))
    assert halves < 0.75 * whole
    assert quarters < 0.75 * halves


def test_every_chunk_has_its_kernels_and_one_merges():
    """The report names each kernel once."""
    op = get_op("mla_prefill_branch_fp8")
    a = sample(op, "chunks")
    program = drive(steps_of(op, a, SM90), Planner(SM90), keep=True)
    one = ["mla_latents", "mla_up_projection", "mla_attention"]
    assert kernels_of(program) == [*(4 * one), "mla_merge"]
    report = op.plan_for(a, "sm90")
    assert len(report.specs) == len(set(report.specs)) < len(program.specs)
    assert set(report.specs) == set(program.specs)
    assert report.reason.startswith("4 chunks of up-projection ")
    assert report.reason.endswith("; merged")


@pytest.mark.parametrize(
    ("name", "case"),
    [("mla_latent_store", "no_tokens"), ("mla_prefill", "no_tokens"),
     ("mla_prefill_branch_fp8", "no_sequences")],
)  # fmt: skip
def test_a_call_without_tokens_is_planned_as_nothing(name, case):
    op = get_op(name)
    report = op.plan_for(sample(op, case), "sm100")
    assert (report.name, report.specs) == ("nothing", ())
