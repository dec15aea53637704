"""Tests that the emitted code computes the same results as the template, and contains nothing
superfluous."""

import ast
import importlib
import os
import subprocess
import sys

import pytest
import torch

from tilewright.codegen.build import emitted_path, load_interpreted
from tilewright.codegen.build.interpreter import interpret
from tilewright.codegen.emit import emit
from tilewright.codegen.spec import KernelSpec

SAMPLES = "sample_templates.kernels"


def spec_of(kernel, constants, signature, **options):
    return KernelSpec.make(SAMPLES, kernel, constants, signature, **options)


def run_both(spec, grid, arguments, outputs):
    """Runs the emitted file and the template. Compares `outputs` bit by bit and returns them."""
    template = interpret(getattr(importlib.import_module(spec.module), spec.kernel))
    results = []
    for kernel, constants in ((load_interpreted(spec), {}), (template, dict(spec.constants))):
        given = {k: v.clone() if torch.is_tensor(v) else v for k, v in arguments.items()}
        kernel[grid](**given, **constants)
        results.append([given[name] for name in outputs])
    for emitted, expected in zip(*results, strict=True):
        torch.testing.assert_close(emitted, expected, rtol=0, atol=0, equal_nan=True)
    return results[0]


def body_of(text):
    """Returns the statements of the kernel as text, without docstring and header."""
    function = ast.parse(text).body[-1]
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    return "\n".join(map(ast.unparse, statements))


@pytest.mark.parametrize(("n", "alpha"), [(64, 1.0), (50, 0.5), (1, -2.0)])
def test_vector_add(n, alpha):
    pointers = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32"}
    spec = spec_of("vector_add", {"ALPHA": alpha, "BLOCK": 16}, {**pointers, "n": "i32"})
    x, y = torch.randn(80), torch.randn(80)
    (out,) = run_both(
        spec, (5,), {"x_ptr": x, "y_ptr": y, "out_ptr": torch.full((80,), 7.0), "n": n}, ["out_ptr"]
    )
    torch.testing.assert_close(out[:n], (x + alpha * y)[:n])
    assert (out[n:] == 7.0).all()


def test_static_count_and_grid_leave_no_mask():
    pointers = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32"}
    constants = {"ALPHA": 1.0, "BLOCK": 16, "n": 80}
    text = emit(spec_of("vector_add", constants, pointers, grid=(5,)))
    assert "mask" not in body_of(text)
    # If there is one element fewer, or the grid is not known, the masks are needed.
    fewer = emit(spec_of("vector_add", {**constants, "n": 79}, pointers, grid=(5,)))
    unknown = emit(spec_of("vector_add", constants, pointers))
    assert body_of(fewer).count("mask=") == body_of(unknown).count("mask=") == 3


def test_triton_makes_no_variants_for_integers_of_which_the_spec_says_nothing():
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    constants = {"ALPHA": 1.0, "BLOCK": 16}
    for divisible, expected in (
        (("x_ptr",), "triton.jit(do_not_specialize=['n'])"),
        (("x_ptr", "n"), "triton.jit"),
    ):
        text = emit(spec_of("vector_add", constants, signature, divisible16=divisible))
        function = ast.parse(text).body[-1]
        (decorator,) = function.decorator_list
        assert ast.unparse(decorator) == expected
        assert {a.arg: a.annotation and ast.unparse(a.annotation) for a in function.args.args} == {
            **dict.fromkeys(("x_ptr", "y_ptr", "out_ptr")), "n": "tl.int32",
        }  # fmt: skip


GEMM_SIGNATURE = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16", "bias_ptr": "*bf16"}


def gemm_spec(n, k, block_k, activation, bias=True, m=None):
    constants = {"N": n, "K": k, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": block_k}
    constants["ACTIVATION"] = activation
    signature = {**GEMM_SIGNATURE, "m": "i32"}
    for name, value in (("bias_ptr", None if not bias else ...), ("m", m if m else ...)):
        if value is not ...:
            constants[name] = value
            del signature[name]
    return spec_of("gemm", constants, signature)


@pytest.mark.parametrize("activation", ["none", "relu", "squared"])
@pytest.mark.parametrize(("m", "n", "k", "block_k"), [(20, 32, 64, 32), (16, 24, 40, 32)])
def test_gemm(m, n, k, block_k, activation):
    spec = gemm_spec(n, k, block_k, activation)
    a, b, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    a, b, bias = (x.bfloat16() for x in (a, b, bias))
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": torch.zeros(m, n).bfloat16(), "bias_ptr": bias}
    grid = (-(-m // 16) * -(-n // 16),)
    (out,) = run_both(spec, grid, {**arguments, "m": m}, ["c_ptr"])
    expected = a.double() @ b.double().T + bias.double()
    if activation != "none":
        expected = expected.clamp(min=0) ** (2 if activation == "squared" else 1)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-3)


def test_gemm_drops_what_is_decided():
    text = emit(gemm_spec(32, 64, 32, "relu", bias=False))
    body = body_of(text)
    assert "bias" not in body
    assert "inner_mask" not in body
    assert "column_mask" not in body
    assert "row_mask" in body  # m is known only at run time
    assert "static_assert" not in body
    assert "tl.bfloat16" in body  # the element type that the output pointer points to
    uneven = body_of(emit(gemm_spec(24, 40, 32, "relu", bias=False)))
    assert "inner_mask" in uneven
    assert "column_mask" in uneven


@pytest.mark.parametrize("specialize", [False, True])
def test_descriptors(specialize):
    constants = {"N": 32, "K": 64, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32}
    signature = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16", "m": "i32"}
    spec = spec_of("tma_gemm", {**constants, "WARP_SPECIALIZE": specialize}, signature)
    assert ("warp_specialize" in emit(spec)) == specialize
    a, b = torch.randn(24, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    c = torch.zeros(24, 32).bfloat16()
    (out,) = run_both(spec, (3,), {"a_ptr": a, "b_ptr": b, "c_ptr": c, "m": 24}, ["c_ptr"])
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, rtol=2**-8, atol=1e-3)


def test_module_constants_and_infinity():
    constants = {"WIDTH": 40, "BLOCK": 64, "SCALE": 0.125}
    spec = spec_of("softmax_rows", constants, {"x_ptr": "*fp32", "out_ptr": "*fp32"})
    x = torch.randn(3, 40)
    (out,) = run_both(spec, (3,), {"x_ptr": x, "out_ptr": torch.zeros(3, 40)}, ["out_ptr"])
    torch.testing.assert_close(out, torch.softmax(0.125 * x, 1))
    assert "0.18033688" in body_of(emit(spec))  # 0.125 * log2(e)


@pytest.mark.parametrize("clamp", [None, 2.0])
@pytest.mark.parametrize("mode", ["add", "product", "neither"])
@pytest.mark.parametrize(("steps", "limit"), [(0, 0), (1, 2), (4, 3)])
def test_branches_and_loops(mode, steps, limit, clamp):
    constants = {"BLOCK": 16, "STEPS": steps, "MODE": mode, "CLAMP": clamp}
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "limit": "i32"}
    spec = spec_of("branches", constants, signature)
    x = torch.randn(40)
    arguments = {"x_ptr": x, "out_ptr": torch.zeros(40), "n": 40, "limit": limit}
    (out,) = run_both(spec, (4,), arguments, ["out_ptr"])
    expected = sum((2 * x * s if s % 2 == 0 else -x / 2 for s in range(steps)), torch.zeros(40))
    expected = {"add": expected + x, "product": expected * x, "neither": expected}[mode] + limit
    for _ in range(limit):
        expected = expected * (3.0 if limit > 2 else 1.5 / 3.0)
        expected = expected if clamp is None else expected.clamp(-clamp, clamp)
    torch.testing.assert_close(out, expected)
    body = body_of(emit(spec))
    assert "static_range" not in body
    assert "MODE" not in body


def test_a_static_loop_that_is_long_stays_a_loop():
    constants = {"BLOCK": 16, "STEPS": 400, "MODE": "add", "CLAMP": None}
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "limit": "i32"}
    spec = spec_of("branches", constants, signature)
    assert "tl.static_range(400)" in body_of(emit(spec))
    arguments = {"x_ptr": torch.randn(16), "out_ptr": torch.zeros(16), "n": 16, "limit": 1}
    run_both(spec, (1,), arguments, ["out_ptr"])


def test_index_arithmetic_folds():
    signature = {"x_ptr": "*i32", "out_ptr": "*i32", "rows": "i32"}
    spec = spec_of(
        "index_games",
        {"WIDTH": 32, "GROUP": 8},
        signature,
        grid=(6,),
        ranges={"rows": (6, 6)},
    )
    body = body_of(emit(spec))
    for gone in ("mask", "+ 0", "* 1)"):
        assert gone not in body, f"{gone!r} is still in\n{body}"
    arguments = {"x_ptr": torch.arange(192).int(), "out_ptr": torch.zeros(192).int(), "rows": 6}
    (out,) = run_both(spec, (6,), arguments, ["out_ptr"])
    assert torch.equal(out, torch.arange(192).int() + (torch.arange(192) // 32).int())
    # There are fewer rows than the grid covers. A mask must stay, and nothing may be written after
    # the last row.
    few = spec_of("index_games", {"WIDTH": 32, "GROUP": 8}, signature, grid=(6,))
    (out,) = run_both(few, (6,), {**arguments, "rows": 4}, ["out_ptr"])
    assert (out[128:] == 0).all()


def test_divisible_count_needs_no_mask():
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    spec = spec_of("strided_sum", {"BLOCK": 16}, signature, divisible16=["n"])
    assert "mask" not in body_of(emit(spec))
    assert "mask" in body_of(emit(spec_of("strided_sum", {"BLOCK": 16}, signature)))
    assert "mask" in body_of(
        emit(spec_of("strided_sum", {"BLOCK": 32}, signature, divisible16=["n"]))
    )
    x = torch.randn(48)
    (out,) = run_both(spec, (1,), {"x_ptr": x, "out_ptr": torch.zeros(1), "n": 48}, ["out_ptr"])
    torch.testing.assert_close(out[0], x.sum())


def test_an_axis_from_the_end_and_a_positional_mask_fold_too():
    constants = {"ROWS": 8, "COLUMNS": 16}
    spec = spec_of("sums_of_rows", constants, {"x_ptr": "*i32", "out_ptr": "*i32"})
    body = body_of(emit(spec))
    assert "where" not in body
    assert "<" not in body
    x = torch.arange(128, dtype=torch.int32).view(8, 16)
    (out,) = run_both(spec, (1,), {"x_ptr": x, "out_ptr": torch.zeros(8).int()}, ["out_ptr"])
    assert torch.equal(out, x.sum(1).int())


def test_names_that_are_assigned_together_keep_what_is_known():
    """The emitter knows nothing of a function's two results, and all of two names that change
    places."""
    spec = spec_of("exchanged_pairs", {"PAIRS": 8}, {"x_ptr": "*i32", "out_ptr": "*i32"})
    assert "mask" not in body_of(emit(spec))
    x = torch.arange(16, dtype=torch.int32)
    (out,) = run_both(spec, (1,), {"x_ptr": x, "out_ptr": torch.zeros(16).int()}, ["out_ptr"])
    assert torch.equal(out, x.view(8, 2).flip(1).flatten())


def test_helper_passed_as_argument_is_printed():
    spec = spec_of("reduce_with", {"BLOCK": 16}, {"x_ptr": "*fp32", "out_ptr": "*fp32"})
    assert "def _larger" in emit(spec)
    x = torch.randn(16)
    (out,) = run_both(spec, (1,), {"x_ptr": x, "out_ptr": torch.zeros(1)}, ["out_ptr"])
    assert out[0] == x.max()


def test_output_stands_alone_and_says_what_it_is():
    spec = gemm_spec(32, 64, 32, "relu")
    text = emit(spec)
    assert emit(KernelSpec.from_json(spec.to_json())) == text
    imported = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {a.name.split(".")[0] for n in imported for a in n.names}
    assert names == {"triton"}
    header = ast.get_docstring(ast.parse(text))
    assert "c[m, N] = activation(a[m, K] @ b[N, K]^T + bias)" in header
    assert "K=64" in header
    assert f"{SAMPLES}.gemm" in header
    namespace = {}
    script = f"import runpy; m = runpy.run_path({str(emitted_path(spec))!r}); print(m['KERNEL'])"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == spec.name, done.stderr
    exec(compile(text.split("@triton.jit")[0], "header", "exec"), namespace)
    assert namespace["SIGNATURE"] == dict(spec.signature)
    assert all(len(line) <= 100 for line in text.split("\n"))


def test_hash_randomisation_does_not_show():
    spec = gemm_spec(24, 40, 32, "squared")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tilewright.codegen.emit import emit\n"
        "from tilewright.codegen.spec import KernelSpec\n"
        "sys.stdout.write(emit(KernelSpec.from_json(sys.argv[2])))"
    )
    folder = importlib.util.find_spec("sample_templates").submodule_search_locations[0]
    parent = folder.rsplit("/", 1)[0]
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script, parent, spec.to_json()],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.stdout == emit(spec), done.stderr
