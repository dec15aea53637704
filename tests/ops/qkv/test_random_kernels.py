"""Random settings of every option through plan and kernels: on Triton's interpreter, and on a GPU.

Results start as NaN, caches lie inside buffers of random bits, and what is expected is plain
float64 code (plain.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.ops.qkv import plain
from tests.ops.qkv.option_space import attention_cases
from tilewright.ops.contract import get_op
from tilewright.ops.qkv import launch as launches

OPS = {
    "fused_qkv_paged": launches.launch_fused_qkv_paged,
    "paged_kv_store": launches.launch_paged_kv_store,
}
KERNEL_CASES = attention_cases(kernels=True)


def bounded(examples):
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def check(op, a, run, chosen):
    a, changes = plain.guarded(a, op)
    expected = plain.outcome(plain.on_cpu(a))
    chosen.clear()
    q = run(a)
    allowed = library_tolerances(a) if "library" in chosen else op.tolerances
    assert not list(plain.mismatches(op, a, q, expected, allowed)), chosen
    assert not list(changes(expected.touched)), chosen


def library_tolerances(a):
    """A library's numbers were rounded before they were clipped, when they were larger."""
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


def launch(op, a):
    args, kwargs = op.split(a)
    return OPS[op.name](*args, **kwargs)


@pytest.mark.parametrize("name", OPS)
def test_interpreted_kernels_are_plain_code(name, interpreted, chosen):
    op, seen = get_op(name), set()

    @bounded(10)
    @given(KERNEL_CASES, st.integers(0, 2**16), st.booleans())
    def run(case, seed, static):
        a = random_arguments(op, case, seed, static)
        if case.weight_format != "dense" and op.name == "fused_qkv_paged":
            # Codes for a library's GEMM are made numbers on a GPU only.
            report = op.plan_for(replace(a, static_tokens=True), "sm90")
            assume(report.name != "library")
            a = replace(a, static_tokens=True)
        check(op, a, partial(launch, op), chosen)
        seen.update(chosen)

    run()
    assert seen or name == "paged_kv_store"  # its one form has no choice


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("name", OPS)
def test_kernels_on_a_gpu_are_plain_code(name, monkeypatch, chosen):
    op = get_op(name)
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")  # a kernel that fails is not covered up

    @bounded(30)
    @given(KERNEL_CASES, st.integers(0, 2**16), st.booleans())
    def run(case, seed, static):
        check(op, random_arguments(op, case, seed, static, "cuda"), op.call, chosen)

    run()
