"""Tests which mixture-of-experts kernels `make audit` covers. One kernel of each family is compiled
for SM100 with the installed Triton."""

from __future__ import annotations

import dataclasses
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tilewright.codegen.audit import check
from tilewright.codegen.build import compile_for
from tilewright.codegen.grouped.tiles import GemmConfig
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.grouped.nvfp4_matmul import grouped_nvfp4_steps
from tilewright.ops.runtime.program import Planner, drive
from tilewright.tools.audit.families import all_cases
from tilewright.tools.audit.moe import MODELS, moe_cases, nvfp4_arguments, nvfp4_case
from tilewright.tools.matrix.audit_matrix import audit_one

# The kernels that are compiled here: one for most families, in the form that is most likely to
# fail. `make audit` compiles all of them.
COMPILED = {
    "weights stream": r"qwen3-30b-a3b dense T=64 moe_up",
    "specialised warps": r"gpt-oss-20b dense T=8192 grouped_gemm",
    "codes in tiles": r"qwen3-30b-a3b int4 T=1024 grouped_gemm",
    "one token by codes": r"deepseek-v3 of 8 fp8 by codes T=1 moe_down_dotted",
    "one token of nibbles": r"qwen3-30b-a3b nvfp4 T=1 moe_up_dotted",
    "rows by codes": r"deepseek-v3 of 8 fp8 by codes T=1024 moe_up_scaled",
    "combine": r"qwen3-30b-a3b dense .* moe_combine",
    "router of groups": r"router deepseek-v3 T=64 moe_router",
    "choice": r"router deepseek-v3 T=1024 moe_choose",
    "alone": r"grouped bfloat16 dense rows=1024",
    "nvfp4 weights as rows": r"nvfp4 2880x2880 rows=1$",
    "nvfp4 tokens as rows": r"nvfp4 2880x2880 rows=1024",
}
TILES = GemmConfig(128, 128, 256, 8, 3)


def nvfp4_spec(target, *, block_scaled):
    """Returns the kernel of a call with TILES."""
    a = nvfp4_arguments(1024, 2880, 2880)
    steps = grouped_nvfp4_steps(a, target, TILES, block_scaled=block_scaled)
    (spec,) = drive(steps, Planner(target), keep=True).specs
    return spec


@pytest.fixture(scope="module")
def cases():
    return moe_cases(SM100)


@pytest.fixture(scope="module")
def outcomes(cases, tmp_path_factory):
    """Returns the audits by case. All compile at once, because each takes a separate process."""
    picked = [next(c for c in cases if re.search(COMPILED[name], c.name)) for name in COMPILED]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        root = tmp_path_factory.getbasetemp() / "tilewright-cache"
        patch.setenv("TILEWRIGHT_CACHE_DIR", str(root))
        python = Path(sys.executable)
        made = pool.map(lambda case: audit_one(case, "installed", python, SM100), picked)
        return dict(zip(COMPILED, made, strict=True))


def test_cases_cover_models_formats_and_kernels(cases):
    assert len({case.spec for case in cases}) == len(cases)
    assert all(case.spec.target == "sm100" for case in cases)
    names = [case.name for case in cases]
    for model in MODELS:
        for weight_format in model.formats:
            for step in ("moe_up", "grouped_gemm"):
                start = f"moe {model.name} {weight_format} T="
                assert any(n.startswith(start) and step in n.split() for n in names), (start, step)
    kernels = {case.spec.kernel for case in cases}
    assert {"moe_order", "moe_count", "moe_up", "grouped_gemm", "moe_combine"} <= kernels
    assert {"moe_up_dotted", "moe_down_dotted"} <= kernels
    assert {"grouped_nvfp4", "quantize_nvfp4"} <= kernels
    claims = [case.expectations for case in cases if case.spec.kernel == "grouped_nvfp4"]
    assert {c.mma for c in claims} == {"nvfp4"}
    assert {bool(c.row_scales_reason) for c in claims} == {False, True}  # both tile orders
    up = [c.expectations for c in cases if c.spec.kernel in ("moe_up", "moe_up_scaled")]
    assert up
    assert all(c.mma for c in claims + up)


def test_make_audit_has_them(cases):
    assert {case.spec for case in cases} <= {case.spec for case in all_cases(SM100)}


def test_a_chip_without_the_format_multiplies_it_as_bf16():
    spec = nvfp4_spec(SM90, block_scaled=False)
    assert nvfp4_case("case", spec, SM90).expectations.mma == "bf16"


@pytest.mark.parametrize("name", COMPILED)
def test_one_of_each_family_keeps_the_rules(name, outcomes):
    outcome = outcomes[name]
    assert outcome.error == ""
    assert outcome.problems == ()


def test_the_block_scaled_path_shows_in_the_machine_code(outcomes):
    for name in ("nvfp4 weights as rows", "nvfp4 tokens as rows"):
        audit = outcomes[name].audit
        assert audit.main_loop["UTCOMMA"] > 0
        assert audit.main_loop["UTCCP"] > 0
        assert any("mxf4nvf4" in kind for kind in audit.mma_kinds)
    assert outcomes["nvfp4 tokens as rows"].audit.warp_specialized


def test_a_fallback_to_bf16_fails_the_audit(tmp_path, monkeypatch):
    """A fallback to bf16 fails the audit. The kernel is the same with dequantised operands: its
    numbers are right, but its rate is a quarter."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    scaled = nvfp4_spec(SM100, block_scaled=True)
    claims = nvfp4_case("case", scaled, SM100).expectations
    fallback = nvfp4_spec(SM100, block_scaled=False)
    audit = compile_for(fallback).audit
    assert audit.count("UTCHMMA") > 0
    problems = check(audit, SM100, claims)
    assert [p.partition(":")[0] for p in problems][:2] == ["tensor core", "block scales"]
    honest = dataclasses.replace(claims, mma="bf16")
    assert not [p for p in check(audit, SM100, honest) if p.startswith(("tensor", "block scales"))]
