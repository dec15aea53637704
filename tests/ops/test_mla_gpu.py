"""MLA ops on a GPU at DeepSeek's widths: ragged batches with a prefix, chunks, GLM's heads, more
keys than queries by position, the 8-bit core; each against float64, and twice the same bits.

Latents go through a cache of 16 bits in float64 too. Those are what is quantised: rounded or not,
some come to lie at the other side of the middle of two codes, and where a query sees few keys that
alone is more than what the kernels err by.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.test_contract import as_double
from tilewright.ops.contract import Tolerance
from tilewright.ops.mla_cases import BranchCase, PrefillCase
from tilewright.ops.mla_checks import FP8
from tilewright.ops.mla_prefill import OP as PREFILL
from tilewright.ops.mla_prefill_fp8 import OP as BRANCH

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
# Weights of 8 bits err by up to a sixteenth each; keys and values are the same codes.
NARROW_TOLERANCE = Tolerance(relative=2.0**-4, of_rms=2.0**-1)


def exact_arguments(op: Any, case: Any) -> Any:
    """In float64, all but the caches that are written."""
    given = op.sample_inputs(case)
    caches = {name: getattr(given, name) for name in op.mutated}
    return replace(as_double(given), **caches)


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op.name}-{c.name}" for op, c in CASES])
def test_the_op_on_a_gpu(op, case, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")  # a kernel that fails is no reference's turn
    exact = exact_arguments(op, case)
    expected = op.reference(exact)
    a = op.sample_inputs(case, "cuda")
    out = op.call(a)
    assert torch.equal(op.call(a), out)
    tolerance = NARROW_TOLERANCE if case.attention_dtype else PREFILL.tolerances[out.dtype]
    assert tolerance.problem(out, expected) is None, tolerance.problem(out, expected)
    for name in op.mutated:
        if getattr(a, name) is not None:
            problem = op.tolerances[out.dtype].problem(getattr(a, name), getattr(exact, name))
            assert problem is None, problem
