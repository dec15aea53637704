"""Tests the shrink of one adapter by a library's product: when the plan chooses it, what it
computes, and repeated calls.

The lowering for CUDA runs here on CPU tensors, with its kernels on Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter
from tests.ops.test_contract import as_double
from tilewright.codegen.lora.library_plan import ALONE, APART, STACKED, library_shrink
from tilewright.codegen.lora.library_plan import LibraryShrink as Way
from tilewright.codegen.lora.problem import RowForm, ShrinkProblem
from tilewright.codegen.operand import Operand
from tilewright.ops.lora import shrink as lora_shrink
from tilewright.ops.lora.cases import LoraCase
from tilewright.ops.lora.lowering import library_choice, library_steps
from tilewright.ops.lora.operands import row_counts, shrink_problem
from tilewright.ops.runtime.program import Buffer, Outcome, drive
from tilewright.ops.runtime.replay import repeat

OP = lora_shrink.OP
SINGLE = RowForm("single", 1)


def problem(rank=64, hidden=4096, form=SINGLE, dtype="bf16", strides=None, a=None, **changes):
    weight = Operand(dtype, strides or (3 * rank * hidden, hidden, 1))
    a = a or Operand(dtype, (hidden,))
    made = ShrinkProblem(hidden, (rank,) * 3, a, (weight,) * 3, form)
    return replace(made, **changes)


TABLES = {"stacked": STACKED, "apart": APART, "alone": ALONE}


@pytest.mark.parametrize("table", TABLES)
def test_each_step_is_taken_from_its_rows_on(table):
    tried = 0
    for hidden, by_columns in TABLES[table].items():
        for columns, steps in by_columns.items():
            planes = 1 if table == "alone" else 3
            rank = min(columns, 384) // planes // 8 * 8
            given = problem(rank, max(hidden, 1024))
            given = replace(given, ranks=given.ranks[:planes], weights=given.weights[:planes])
            before = "kernels"
            for rows, way in steps:
                assert way != before
                for count, expected in ((rows - 1, before), (rows, way)):
                    taken = library_shrink(given, table != "apart", False, count)
                    assert ("kernels" if taken is None else taken.way) == expected
                    assert taken is None or taken.joined == (table == "apart")
                assert taken is None or f"from {rows} rows" in str(taken)
                before = way
                tried += 1
    assert tried > 5


LARGE = 8192


def refused(given, *, stacked=True, one_group=False):
    return library_shrink(given, stacked, one_group, LARGE) is None


def test_the_library_is_for_one_adapter_of_all_rows():
    assert not refused(problem())
    ids = Operand("i32")
    groups = RowForm("groups", 1, None, ids)
    assert not refused(problem(form=groups), one_group=True)
    assert refused(problem(form=groups))
    assert refused(problem(form=replace(groups, num_adapters=2)), one_group=True)
    assert refused(problem(form=replace(groups, ids=ids)), one_group=True)
    assert refused(problem(form=RowForm("rows", 1, ids)))


def test_the_library_is_for_what_it_computes_alike_and_fast():
    assert not refused(problem(dtype="fp16"))
    assert refused(problem(dtype="fp32"))
    assert refused(problem(ranks=(64, 32, 64)))
    assert refused(problem(rank=60))
    assert refused(problem(hidden=4100))
    assert refused(problem(a=Operand("bf16", (4097,))))
    assert refused(problem(a=Operand("bf16", (4096,), aligned=False)))
    weights = problem().weights
    off = replace(weights[0], aligned=False)
    assert refused(problem(weights=(off, *weights[1:])))
    assert not refused(problem(weights=(weights[0], off, off)))
    transposed = problem(strides=(192 * 4096, 1, 192))
    assert not refused(transposed)
    assert refused(transposed, stacked=False)


def performed(a, way, machine):
    """Performs a call by one way to call a library."""

    def steps():
        out = yield Buffer.like(lora_shrink.fake(a))
        problem = shrink_problem(a, row_counts(a, a.rows, a.rows))
        yield from library_steps(a, way, problem, out, machine.target)
        return Outcome(out, "library GEMM")

    return drive(steps(), machine)


STACK = LoraCase(
    "stack", "single", num_rows=21, hidden=64, num_adapters=1, layout="stacked", ranks=(8, 8, 8)
)
APART = replace(STACK, layout="separate")
ONE_GROUP = replace(STACK, rows="ends", sizes=(17,), spare=5)
CASES = {
    "rows": (STACK, Way("rows", False, 1)),
    "rows, fp16": (replace(STACK, dtype=torch.float16), Way("rows", False, 1)),
    "rows, not all": (replace(STACK, base_rows=4), Way("rows", False, 1)),
    "rows, odd rank": (replace(STACK, ranks=(12, 12, 12)), Way("rows", False, 1)),
    "a batch": (STACK, Way("batch", False, 1)),
    "joined": (APART, Way("rows", True, 1)),
    "joined, transposed": (replace(APART, layout="transposed"), Way("rows", True, 1)),
    "joined, two": (replace(APART, ranks=(8, 0, 8)), Way("rows", True, 1)),
    "one plane": (replace(APART, ranks=(0, 8, 0)), Way("plane", False, 1)),
    "one group": (ONE_GROUP, Way("rows", False, 1)),
}


def one_group(inclusive):
    """Returns arguments whose first rows belong to one group. The other rows belong to no group and
    hold NaN."""
    a = OP.sample_inputs(ONE_GROUP)
    a.a[17:] = torch.nan
    if inclusive:
        return a
    return replace(a, a_offsets=torch.tensor([0, 17, 99]), inclusive_offsets=False,
                   num_active_experts=1)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_way_computes_the_op(name):
    case, way = CASES[name]
    a = OP.sample_inputs(case)
    out = performed(a, way, Interpreter()).outcome.result
    found = OP.tolerances[case.dtype].problem(out, OP.reference(as_double(a)))
    assert found is None, found


@pytest.mark.parametrize("inclusive", [True, False])
def test_rows_of_no_group_are_zero(inclusive):
    a = one_group(inclusive)
    out = performed(a, CASES["one group"][1], Interpreter()).outcome.result
    assert not out[:, 17:].any()
    exact = OP.reference(as_double(replace(a, a=a.a.nan_to_num())))
    assert OP.tolerances[out.dtype].problem(out, exact) is None


@pytest.mark.parametrize("name", CASES)
def test_a_repeat_calls_the_library_again(name):
    """A repeated call has the same addresses and other contents. It must call the library again,
    and give a new result."""
    case, way = CASES[name]
    a, machine = OP.sample_inputs(case), Interpreter()
    args, kwargs = OP.split(a)
    program = performed(a, way, machine)
    first, again = program.outcome.result, repeat(program, args, kwargs, machine)
    kept = first.clone()
    a.a.neg_()
    second = again(*args, **kwargs)
    assert second.data_ptr() != first.data_ptr()
    assert torch.equal(first, kept)
    assert torch.equal(second, -kept)
    assert (second.shape, second.stride(), second.dtype) == (kept.shape, kept.stride(), kept.dtype)


def meta(rank=64, rows=4096, hidden=4096, adapters=1, layout="b"):
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta")
    if layout == "b":
        return lora_shrink.ShrinkArguments(x, x.new_empty(adapters, 3 * rank, hidden))
    names = ("q_weight", "k_weight", "v_weight")
    return lora_shrink.ShrinkArguments(
        x, **{name: x.new_empty(adapters, rank, hidden) for name in names}
    )


def test_reports_say_what_the_library_does():
    report = OP.plan_for(meta(), "sm90")
    assert report.name == "library GEMM"
    assert report.reason.startswith("one product, then planes: faster from ")
    assert [spec.kernel for spec in report.specs] == ["lora_planes"]
    apart = OP.plan_for(meta(layout="apart", rows=8192), "sm90")
    assert "weights joined before" in apart.reason
    batch = OP.plan_for(meta(rows=1024), "sm90")
    assert "a batch of a product for each plane" in batch.reason
    assert batch.specs == ()
    assert OP.plan_for(meta(rows=16), "sm90").name == "shrink kernel"


def test_weights_on_a_stack_are_seen_as_one():
    """If q, k and v are parts of one tensor in this order, the tensor is used as it is. In another
    order, the parts are joined."""
    stack = torch.zeros(1, 192, 128, dtype=torch.bfloat16)
    q, k, v = stack.split(64, 1)
    x = torch.zeros(4096, 128, dtype=torch.bfloat16)

    def joined(**weights):
        a = lora_shrink.ShrinkArguments(x, **weights)
        counts = row_counts(a, a.rows, a.rows)
        given = shrink_problem(a, counts)
        return library_choice(a, given, counts).joined

    assert not joined(q_weight=q, k_weight=k, v_weight=v)
    assert joined(q_weight=k, k_weight=q, v_weight=v)
    assert joined(q_weight=q, k_weight=k.clone(), v_weight=v)


def test_a_row_seen_many_times_is_no_stack():
    row = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    a = lora_shrink.ShrinkArguments(
        torch.zeros(4096, 128, dtype=row.dtype), row.expand(1, 192, 128)
    )
    counts = row_counts(a, a.rows, a.rows)
    given = shrink_problem(a, counts)
    assert library_choice(a, given, counts) is None
