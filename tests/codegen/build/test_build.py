"""Tests compilation for SM90 and SM100 without a GPU, and the facts that the audit reads from the
result."""

import json
import re
import subprocess
import sys

import pytest

from tilewright.codegen import build
from tilewright.codegen.audit import Expectations, check
from tilewright.codegen.build import BuildError, compile_for, emitted_path, load_jit, needs_scratch
from tilewright.codegen.emit import emit
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, SM100

SAMPLES = "sample_templates.kernels"

ADD = KernelSpec.make(
    SAMPLES,
    "vector_add",
    {"ALPHA": 2.0, "BLOCK": 1024},
    {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"},
    divisible16=["x_ptr", "y_ptr", "out_ptr"],
)


def tma_spec(target, num_stages=3, block=128, warps=8, specialize=False):
    constants = {"N": 4096, "K": 4096, "BLOCK_M": block, "BLOCK_N": 128, "BLOCK_K": 64}
    pointers = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16"}
    return KernelSpec.make(
        SAMPLES,
        "tma_gemm",
        {**constants, "WARP_SPECIALIZE": specialize},
        {**pointers, "m": "i32"},
        divisible16=pointers,
        num_warps=warps,
        num_stages=num_stages,
        target=target,
    )


@pytest.mark.parametrize("target", [SM90, SM100])
def test_vector_add(target):
    built = compile_for(ADD, target)
    assert f".target {target.sm_name}" in built.ptx
    assert built.cubin[:4] == b"\x7fELF"
    assert "tt.store" in built.ttgir
    assert built.source == emit(ADD)
    assert built.metadata["num_warps"] == 4
    audit = built.audit
    assert (audit.kernel, audit.sm_target, audit.num_warps) == (ADD.name, target.sm_name, 4)
    assert audit.mma == {}
    assert audit.spills == audit.stack_bytes == 0
    assert audit.count("LDG") >= 2
    assert audit.count("STG") >= 1
    assert check(audit, target) == []
    # The case makes no claim about tensor cores. If it did, the audit would report a broken rule.
    assert any("expected" in p for p in check(audit, target, Expectations(mma="bf16")))


def test_promised_alignment_gives_vector_loads():
    names = ["x_ptr", "y_ptr", "out_ptr", "n"]
    constants = dict(ADD.constants)
    for promised, wide in ((names, True), ([], False)):
        spec = KernelSpec.make(
            SAMPLES, "vector_add", constants, ADD.signature, divisible16=promised
        )
        assert bool(re.search(r"ld\.global\.v4", compile_for(spec, "sm90").ptx)) == wide


@pytest.mark.parametrize(("target", "opcode"), [(SM100, "UTCHMMA"), (SM90, "HGMMA")])
def test_gemm_uses_the_targets_tensor_core(target, opcode):
    built = compile_for(tma_spec(target.name))
    audit = built.audit
    assert audit.count(opcode) > 0
    assert audit.main_loop.get(opcode)
    assert audit.count("UTMALDG") >= 2
    assert audit.count("UTMASTG") >= 1
    assert audit.count("HMMA") == 0
    assert audit.staged_bytes == 3 * 2 * 128 * 64 * 2
    assert audit.global_scratch_bytes >= 3 * 128
    assert bool(audit.tmem_columns) == (target is SM100)
    expected = Expectations(mma="bf16", tma_loads=True, tma_stores=True, memory_bound=True)
    assert check(audit, target, expected) == []


def test_specialised_warps_show():
    audit = compile_for(tma_spec("sm100", specialize=True)).audit
    assert audit.warp_specialized
    assert audit.num_warps > 8
    assert check(audit, SM100, Expectations(mma="bf16", warp_specialized=True)) == []


def test_small_tile_falls_back_and_the_audit_says_so():
    audit = compile_for(tma_spec("sm100", block=16, warps=4)).audit
    assert audit.count("HMMA") > 0
    problems = check(audit, SM100, Expectations(mma="bf16"))
    assert any(p.startswith("tensor core: expected UTCHMMA") for p in problems)
    assert any(p.startswith("no legacy tensor core") for p in problems)
    excused = Expectations(mma="bf16", legacy_mma_reason="reads each weight once: memory-bound")
    assert check(audit, SM100, excused) == []


def test_too_much_shared_memory_is_a_problem_though_triton_compiles_it():
    audit = compile_for(tma_spec("sm100", num_stages=9)).audit
    assert audit.shared_bytes > SM100.max_shared_bytes
    assert any(
        p.startswith(f"shared: {audit.shared_bytes} bytes, expected at most")
        for p in check(audit, SM100)
    )


def test_compiled_once_per_source_target_and_options(monkeypatch):
    calls = []
    worker = build._run_worker
    monkeypatch.setattr(build, "_run_worker", lambda *a: (calls.append(a), worker(*a)))
    spec = KernelSpec.make(SAMPLES, "vector_add", {"ALPHA": 3.5, "BLOCK": 256}, ADD.signature)
    folder = compile_for(spec, "sm90").folder
    assert compile_for(spec, "sm90").folder == folder
    assert len(calls) == 1
    other = compile_for(spec, "sm90", options={"num_warps": 8})
    assert other.folder != folder
    assert other.audit.num_warps == 8
    assert len(calls) == 2


def test_what_triton_refuses_is_an_error_with_its_words():
    text = emit(ADD).replace("tl.arange(0, 1024)", "tl.arange(0, 1000)")
    with pytest.raises(BuildError, match="power of 2"):
        compile_for(text, "sm90")


def test_a_process_that_dies_is_an_error_too():
    with pytest.raises(BuildError, match=r"aborted its process \(SIGABRT\)"):
        compile_for("import os\nos.abort()\n" + emit(ADD).split('"""', 2)[2], "sm90")


def test_targets_that_cannot_be_compiled_for():
    with pytest.raises(ValueError, match="expected a GPU, got interpret"):
        compile_for(ADD, "interpret")
    with pytest.raises(ValueError, match="expected a target, because the source is a text"):
        compile_for(emit(ADD))


def test_worker_needs_neither_torch_nor_this_package(tmp_path):
    (tmp_path / "block.py").write_text(
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'tilewright', 'sympy'):\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "import runpy\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    request = {"source": str(emitted_path(ADD)), "out": str(tmp_path), "arch": 100}
    (tmp_path / "request.json").write_text(json.dumps(request))
    command = [sys.executable, str(tmp_path / "block.py"), str(build.WORKER)]
    done = subprocess.run(
        [*command, str(tmp_path / "request.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kernel.cubin").stat().st_size > 1000
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert metadata["arch"] == 100


def test_jit_function_is_ready_for_a_gpu():
    kernel = load_jit(ADD)
    assert kernel.function.__name__ == ADD.name
    assert kernel.function.arg_names == ["x_ptr", "y_ptr", "out_ptr", "n"]
    assert kernel.options == {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert load_jit(ADD) is kernel
    assert not needs_scratch(emit(ADD))
    assert needs_scratch(emit(tma_spec("sm90")))


@pytest.mark.gpu
def test_jit_runs_on_the_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    x, y = torch.randn(2, 5000, device="cuda")
    out = torch.zeros(5000, device="cuda")
    load_jit(ADD)[(5,)](x, y, out, 5000)
    torch.testing.assert_close(out, x + 2.0 * y)
    a, b = (torch.randn(n, 4096, device="cuda").bfloat16() for n in (300, 4096))
    c = torch.zeros(300, 4096, device="cuda").bfloat16()
    load_jit(tma_spec("sm90"))[(132,)](a, b, c, 300)
    torch.testing.assert_close(c.float(), a.float() @ b.float().T, rtol=2e-2, atol=0.5)
