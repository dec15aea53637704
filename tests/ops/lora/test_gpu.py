"""Compares the LoRA kernels that the plan chooses for real sizes with float64, on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.ops.test_contract import as_double, clone
from tilewright.ops.contract import get_op
from tilewright.ops.lora import expand as lora_expand
from tilewright.ops.lora import shrink as lora_shrink
from tilewright.ops.lora.cases import LoraCase
from tilewright.ops.lora.lowering import shrink_steps
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import drive
from tilewright.ops.runtime.replay import repeat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
ROWS = LoraCase("rows", num_rows=40, hidden=1024, num_adapters=5, none_every=6)
CASES = [
    ROWS,
    replace(ROWS, name="a row each", num_rows=9, hidden=2880, dtype=torch.float16),
    replace(ROWS, name="rows of many columns", num_rows=130, ranks=(64, 8, 33)),
    replace(ROWS, name="fp32", num_rows=9, dtype=torch.float32),
    replace(ROWS, name="fp32, many rows", num_rows=300, ranks=(64, 64, 64), dtype=torch.float32),
    replace(ROWS, name="sorted first", num_rows=700, index_dtype=torch.int64),
    replace(ROWS, name="transposed", num_rows=1500, layout="transposed", ranks=(40, 40, 40)),
    replace(ROWS, name="transposed, a few", num_rows=9, layout="transposed"),
    replace(ROWS, name="transposed, narrow", num_rows=90, layout="transposed", hidden=4096),
    replace(ROWS, name="transposed, wide", num_rows=90, layout="transposed", ranks=(64, 64, 64)),
    replace(ROWS, name="high ranks", num_rows=600, ranks=(128, 128, 128)),
    replace(ROWS, name="higher ranks", num_rows=200, ranks=(256, 200, 72)),
    replace(ROWS, name="sequences", rows="sequences", num_rows=1280, num_sequences=10),
    replace(ROWS, name="short sequences", rows="sequences", num_rows=1200, num_sequences=400),
    replace(ROWS, name="one adapter", rows="single", num_rows=2100, num_adapters=1),
    replace(
        ROWS, name="groups", rows="groups", sizes=(700, 0, 1, 900, 64, 13), base_rows=50, spare=7,
        ids=(4, 0, -1, 2, 2, 1), layout="stacked", hidden=4096,
    ),
]  # fmt: skip
# A single adapter with many rows, for which a library's product is faster.
ONE = LoraCase(
    "a batch", "single", num_rows=700, num_adapters=1, hidden=1024, layout="stacked",
    ranks=(64, 64, 64),
)  # fmt: skip
LIBRARY = [
    ONE,
    replace(ONE, name="rows", num_rows=1900, hidden=4096, dtype=torch.float16),
    replace(ONE, name="not all rows", num_rows=2000, hidden=4096, base_rows=77),
    replace(ONE, name="joined", num_rows=2500, layout="separate"),
    replace(ONE, name="one plane", num_rows=1200, ranks=(0, 128, 0), layout="separate"),
    replace(ONE, name="one group", rows="ends", sizes=(2600,), spare=9, num_adapters=1),
]


@pytest.mark.parametrize("op", [lora_shrink.OP, lora_expand.OP], ids=lambda op: op.name)
@pytest.mark.parametrize("case", CASES + LIBRARY, ids=lambda case: case.name)
def test_kernels_compute_the_op_and_repeat_bit_for_bit(op, case, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    a = op.sample_inputs(case, "cuda")
    exact = as_tuple(op.reference(as_double(a)))
    made = as_tuple(op.call(a))
    for out, expected in zip(made, exact, strict=True):
        problem = op.tolerances[case.dtype].problem(out, expected)
        assert problem is None, problem
    again = as_tuple(op.call(clone(a)))
    assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))


@pytest.mark.parametrize("op", [lora_shrink.OP, lora_expand.OP], ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["rows", "sorted first", "high ranks", "groups"])
def test_a_repeat_sees_what_is_there_now(op, name, monkeypatch):
    """A repeated call has the same addresses, but other rows and adapters, and must use the present
    ones."""
    monkeypatch.delenv("TILEWRIGHT_DEBUG", raising=False)
    a = op.sample_inputs(next(case for case in CASES if case.name == name), "cuda")
    before = as_tuple(op.call(a))
    (a.a if hasattr(a, "a") else a.s).mul_(-2)
    if a.expert_ids is not None:
        a.expert_ids.copy_(a.expert_ids.flip(0))
    exact = as_tuple(op.reference(as_double(a)))
    for _ in range(2):
        made = as_tuple(op.call(a))
        for out, expected in zip(made, exact, strict=True):
            problem = op.tolerances[out.dtype].problem(out, expected)
            assert problem is None, problem
    assert not any(torch.equal(one, other) for one, other in zip(before, made, strict=True))


@pytest.mark.parametrize("case", LIBRARY, ids=lambda case: case.name)
def test_one_adapter_goes_to_the_library_and_does_so_again(case):
    op = lora_shrink.OP
    a = op.sample_inputs(case, "cuda")
    args, kwargs = op.split(a)
    machine = machine_of(a.a.device)
    program = drive(shrink_steps(a, machine.target), machine)
    assert program.outcome.name == op.plan_for(a, "sm90").name == "library GEMM"
    assert {spec.kernel for spec in program.specs} <= {"lora_planes"}
    before = program.outcome.result
    again = repeat(program, args, kwargs, machine)
    assert torch.equal(again(*args, **kwargs), before)
    a.a.neg_()
    assert torch.equal(again(*args, **kwargs), -before)


def test_the_cache_write_takes_a_delta_that_the_library_began(monkeypatch):
    """The library computes the shrink of a delta, `lora_expand_add` completes it, and
    `fused_qkv_paged` adds it. The result is compared with the same ops on a float64 delta."""
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    op = get_op("fused_qkv_paged")
    case = replace(
        next(c for c in op.cases if c.name == "delta"), num_tokens=300, hidden=256, num_pages=50
    )
    a = op.sample_inputs(case, "cuda")
    widths = [math.prod(weight.shape[:-1]) for weight in (a.q_weight, a.k_weight, a.v_weight)]
    shrinks = [torch.randn(1, 64, 256, device="cuda").bfloat16() / 16 for _ in widths]
    expands = [torch.randn(1, width, 64, device="cuda").bfloat16() / 64 for width in widths]
    shrink = lora_shrink.ShrinkArguments(a.x, torch.cat(shrinks, 1))
    assert lora_shrink.OP.plan_for(shrink, "sm90").name == "library GEMM"
    s = lora_shrink.OP.call(shrink)
    delta = lora_expand.ExpandArguments(s, None, None, None, *expands, packed=True)
    fused = replace(a, delta=lora_expand.OP.call(delta)[0])
    exact = as_double(clone(a))
    products = zip(shrinks, expands, strict=True)
    parts = [a.x.double() @ one[0].double().T @ other[0].double().T for one, other in products]
    exact = replace(exact, delta=torch.cat(parts, 1))
    assert_close_to(fused, op.call(fused), exact, op.reference(exact))


def assert_close_to(fused, q, exact, exact_q):
    pairs = ((q, exact_q), (fused.k_cache, exact.k_cache), (fused.v_cache, exact.v_cache))
    for got, want in pairs:
        error = (got.double() - want).norm() / want.norm()
        assert error < 6e-3, error  # three roundings to bfloat16


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)
