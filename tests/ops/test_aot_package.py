"""Tests that AOTInductor's package of a model with our ops runs in a process that only loads it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap

import pytest

from tilewright.codegen.build import emitted, travel
from tilewright.ops import contract

MODEL = """
    import torch
    import tilewright.ops
    from tilewright.ops import contract

    OP = contract.get_op("fused_qkv_paged")

    def sample():
        return OP.sample_inputs(OP.cases[0])

    class Layer(torch.nn.Module):
        def __init__(self, a):
            super().__init__()
            for name in ("q_weight", "k_weight", "v_weight"):
                setattr(self, name, torch.nn.Parameter(getattr(a, name)))
            self.windows = (list(a.k_window), list(a.v_window))

        def forward(self, x, k_cache, v_cache, slots):
            weights = (self.q_weight, self.k_weight, self.v_weight)
            places = (k_cache, v_cache, slots, *self.windows)
            return torch.ops.tilewright.fused_qkv_paged(2 * x, *weights, *places) + 1
"""
MAKE = """
    a = sample()
    exported = torch.export.export(Layer(a), (a.x, a.k_cache, a.v_cache, a.slot_mapping))
    # Two programs are compiled, with two sets of flags: a header for each set saves nothing.
    quickly = {
        "aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False
    }
    torch._inductor.aoti_compile_and_package(
        exported, package_path=PACKAGE, inductor_configs=quickly
    )
    assert travel.parcels()  # of whatever this process used
    assert tilewright.ops.pack_kernels(PACKAGE)
"""
LOAD = """
    assert tilewright.ops.load_kernels(PACKAGE) > 0
    a, b = sample(), sample()
    with torch.no_grad():
        expected = Layer(b)(b.x, b.k_cache, b.v_cache, b.slot_mapping)
    run = torch._inductor.aoti_load_package(PACKAGE)
    result = run(a.x, a.k_cache, a.v_cache, a.slot_mapping)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(a.k_cache, b.k_cache)
    torch.testing.assert_close(a.v_cache, b.v_cache)
    assert not torch.equal(a.k_cache, sample().k_cache)
    print("the same")
"""
COMPILER = next((name for name in ("g++", "clang++") if shutil.which(name)), None)


@pytest.mark.skipif(COMPILER is None, reason="AOTInductor needs a C++ compiler")
def test_a_package_runs_in_a_fresh_process(tmp_path):
    """Runs a package in a new process. AOTInductor's runtime passes None for an argument whose
    default is an empty list."""
    package = str(tmp_path / "layer.pt2")
    make, load = (textwrap.dedent(MODEL) + textwrap.dedent(part) for part in (MAKE, LOAD))
    op = contract.get_op("fused_qkv_paged")
    emitted(op.plan_for(op.sample_inputs(op.cases[0]), "sm100").specs[0])
    exec(make, {"PACKAGE": package, "travel": travel})
    script = tmp_path / "load.py"
    script.write_text(f"PACKAGE = {package!r}\n{load}")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "the same"
