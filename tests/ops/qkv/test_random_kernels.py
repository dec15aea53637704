"""Runs random settings of every option through plan and kernels, on Triton's interpreter and on a
GPU.

Results start as NaN, caches lie inside buffers of random bits, and plain float64 code (plain.py)
computes the expected results.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.interpreted import interpret
from tests.ops.qkv import plain
from tests.ops.qkv.option_space import attention_cases, bounded
from tilewright.ops.contract import get_op

OPS = ("fused_qkv_paged", "paged_kv_store")
KERNEL_CASES = attention_cases(kernels=True)


def check(op, a, run):
    """Checks a call. `run` returns q and the name of the lowering."""
    a, changes = plain.guarded(a, op)
    expected = plain.outcome(plain.on_cpu(a), rounds_x=True)
    q, name = run(a)
    rounded = name == "library" or plain.rounds_operands(a)
    allowed = library_tolerances(a) if rounded else op.tolerances
    assert not list(plain.mismatches(op, a, q, expected, allowed)), name
    assert not list(changes(expected.touched)), name


def library_tolerances(a):
    """Returns the tolerances of a library's result. The library rounds before the result is
    clipped, when its numbers, and so the errors of rounding, are larger."""
    if not a.clip:
        return plain.LIBRARY
    whole = plain.outcome(plain.on_cpu(replace(a, clip=0.0)))
    rms = max(float(t.square().mean().sqrt()) for t in (whole.q, *whole.caches.values()))
    return {
        dtype: replace(allowed, absolute=allowed.of_rms * rms)
        for dtype, allowed in plain.LIBRARY.items()
    }


def random_arguments(op, case, seed, static, device="cpu"):
    if op.name == "paged_kv_store":
        case = replace(case, kv_repeat=1)
    return replace(op.sample_inputs(case, device, seed), static_tokens=static)


@pytest.mark.parametrize("name", OPS)
def test_interpreted_kernels_are_plain_code(name):
    op, seen = get_op(name), set()

    def interpreted(a):
        outcome = interpret(op, a).outcome
        seen.add(outcome.name)
        return outcome.result, outcome.name

    @bounded(10)
    @given(KERNEL_CASES, st.integers(0, 2**16), st.booleans())
    def run(case, seed, static):
        check(op, random_arguments(op, case, seed, static), interpreted)

    run()
    assert seen >= ({"store"} if name == "paged_kv_store" else {"swapped", "library"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("name", OPS)
def test_kernels_on_a_gpu_are_plain_code(name, monkeypatch, chosen):
    op = get_op(name)
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")  # a kernel that fails raises an error

    def called(a):
        chosen.clear()
        return op.call(a), chosen[0] if chosen else None

    @bounded(30)
    @given(KERNEL_CASES, st.integers(0, 2**16), st.booleans())
    def run(case, seed, static):
        check(op, random_arguments(op, case, seed, static, "cuda"), called)

    run()
