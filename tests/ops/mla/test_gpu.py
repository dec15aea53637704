"""Compares the MLA ops on a GPU with float64 at DeepSeek's sizes, and checks that two runs give the
same bits.

The cases have ragged batches with a prefix, chunks, GLM's heads, more keys than queries by
position, and the 8-bit core. The float64 run also stores its latents in a 16-bit cache, because the
ops quantise latents that were rounded so. This rounding moves some latents across the middle
between two codes. If a query sees few keys, this difference alone is larger than the error of the
kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.test_contract import as_double
from tilewright.ops.contract import Tolerance
from tilewright.ops.mla.arguments import FP8
from tilewright.ops.mla.attention import cudnn
from tilewright.ops.mla.cases import BranchCase, PrefillCase
from tilewright.ops.mla.latents.lowering import by_head
from tilewright.ops.mla.prefill.branch import OP as BRANCH
from tilewright.ops.mla.prefill.prefill import OP as PREFILL
from tilewright.ops.runtime.products import multiply_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

DIMS = {"rank": 512, "rope_dim": 64, "nope": 128, "v_dim": 128, "num_heads": 4}
POOL = {**DIMS, "num_pages": 64, "page_size": 16}
RAGGED = {**POOL, "new_tokens": (120, 0, 35, 1), "cached_tokens": (100, 7, 0, 300)}
GLM = {**RAGGED, "nope": 192, "v_dim": 256}
STATIC = {
    **DIMS, "keys": "pages", "pool": "static", "slots": "per_sequence", "runs": True,
    "page_size": 640, "rope_style": "interleaved_to_half", "table_width": "full",
}  # fmt: skip
NARROW = {"attention_dtype": FP8}
CASES = [
    (PREFILL, PrefillCase("ragged", **RAGGED)),
    (PREFILL, PrefillCase("sliding", **RAGGED, mask="sliding_window", window=50)),
    (PREFILL, PrefillCase("static", **STATIC, new_tokens=(5, 5), cached_tokens=(130, 130))),
    (BRANCH, BranchCase("ragged", **RAGGED)),
    (BRANCH, BranchCase("chunks", **RAGGED, buffer_size=200)),
    (BRANCH, BranchCase("page_chunks", **RAGGED, buffer_size=128, buffer_pages=True)),
    (BRANCH, BranchCase("glm", **GLM, granularity=64)),
    (BRANCH, BranchCase("one", **POOL, new_tokens=(128,), cached_tokens=(0,), **NARROW)),
    (BRANCH, BranchCase("narrow", **RAGGED, **NARROW)),
    (PREFILL, PrefillCase("narrow", **RAGGED, **NARROW)),
]
# Each weight of 8 bits has an error of up to a sixteenth. Keys and values are the same codes.
NARROW_TOLERANCE = Tolerance(relative=2.0**-4, of_rms=2.0**-1)
# The tolerance for latents that go through no cache, which the float64 run does not round.
WIDER = Tolerance(relative=2.0**-7, of_rms=2.0**-4)


def exact_arguments(op: Any, case: Any) -> Any:
    """Returns the arguments in float64, except the caches that are written."""
    given = op.sample_inputs(case)
    caches = {name: getattr(given, name) for name in op.mutated}
    return replace(as_double(given), **caches)


# Cases in which keys are joined for the library, even if they are few: one sequence, and a batch of
# sequences of equal length.
ALONE = {**POOL, "new_tokens": (300,), "cached_tokens": (0,)}
RUNS = {**POOL, "keys": "given", "slots": "none", "runs": True, "cached_tokens": (0, 0)}
JOINED = [
    (PREFILL, PrefillCase("alone", **ALONE)),
    (PREFILL, PrefillCase("interleaved", **ALONE, rope_style="interleaved")),
    (PREFILL, PrefillCase("runs", **RUNS, new_tokens=(150, 150))),
    (BRANCH, BranchCase("alone", **ALONE)),
]


@pytest.mark.parametrize(("op", "case"), JOINED, ids=[f"{op.name}-{c.name}" for op, c in JOINED])
def test_joined_keys_for_the_library(op, case, monkeypatch):
    monkeypatch.setattr(cudnn, "library_gains", lambda *sizes: True)
    a = op.sample_inputs(case, "cuda")
    names = [spec.kernel for spec in op.plan_for(a, "sm90").specs]
    assert not {"mla_join", "mla_attention"} & set(names)
    check(op, case, WIDER, monkeypatch)


def test_the_library_writes_between_the_rope_columns():
    """The library writes into memory that is not contiguous, between the rope columns. The numbers
    do not change, and no other memory is allocated."""
    rows, heads, widths = 512, 16, (64, 256)
    latent = torch.randn(rows, 512, device="cuda").bfloat16()
    weight = torch.randn(heads * widths[1], 512, device="cuda").bfloat16()
    joined = torch.zeros(rows, heads, sum(widths), device="cuda", dtype=torch.bfloat16)
    out = joined[..., widths[0] :]
    for _ in range(2):  # the library allocates its own workspace in its first call
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        multiply_batch(*by_head(latent, weight, out))
    assert torch.cuda.max_memory_allocated() == before
    assert not joined[..., : widths[0]].any()
    want = (latent.double() @ weight.double().T).unflatten(-1, (heads, -1))
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=2.0**-8)


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op.name}-{c.name}" for op, c in CASES])
def test_the_op_on_a_gpu(op, case, monkeypatch):
    tolerance = NARROW_TOLERANCE if case.attention_dtype else PREFILL.tolerances[case.dtype]
    check(op, case, tolerance, monkeypatch)


def check(op, case, tolerance, monkeypatch):
    # With this variable, a kernel that fails raises an error instead of running the reference.
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    exact = exact_arguments(op, case)
    expected = op.reference(exact)
    a = op.sample_inputs(case, "cuda")
    out = op.call(a)
    assert torch.equal(op.call(a), out)
    assert tolerance.problem(out, expected) is None, tolerance.problem(out, expected)
    for name in op.mutated:
        if getattr(a, name) is not None:
            problem = op.tolerances[out.dtype].problem(getattr(a, name), getattr(exact, name))
            assert problem is None, problem
