"""Tests the projection by library GEMMs: its numbers, and the strides that the epilogue relies
on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter
from tilewright.codegen.qkv.plan import library_choice
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.formats.weight_rows import weight_rows
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.choices import choice_steps
from tilewright.ops.qkv.library import project, project_packed
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime.program import Library, drive

T, H, G, D, K = 5, 3, 2, 4, 8


def weight(*shape, every=None):
    """Returns a weight, or every other slice along an axis of a weight that is twice as long."""
    if every is None:
        return torch.randn(*shape)
    wide = list(shape)
    wide[every] *= 2
    return torch.randn(*wide).split(shape[every], dim=every)[0]


@pytest.mark.parametrize(
    ("given", "strides", "calls"),
    [
        (weight(H, D, K), (H * D, D, 1), 1),
        (weight(K, H * D).T.unflatten(0, (H, D)), (H * D, D, 1), 1),
        (weight(H, D, K, every=1), (D, T * D, 1), 1),
        (weight(H, G, D, K), (H * G * D, G * D, D, 1), 1),
        (weight(H, G, D, K, every=1), (H * G * D, G * D, D, 1), G + 1),
        (weight(H, G, D, K, every=2), (H * G * D, G * D, D, 1), G + 1),
    ],
    ids=["rows", "n-major", "heads apart", "groups", "groups apart", "heads of groups apart"],
)
def test_one_weight(given, strides, calls):
    x = torch.randn(T, K)
    made = drive(project(x, given), Interpreter())
    assert made.outcome.stride() == strides
    assert sum(isinstance(step, Library) for step, _ in made.steps) == calls
    want = torch.einsum("tk,...dk->t...d", x, given)
    torch.testing.assert_close(made.outcome, want)


def test_rows_of_one_tensor_take_one_gemm():
    x, whole = torch.randn(T, K), torch.randn(H, G + 2, D, K)
    parts = whole[:, :G], whole[:, G], whole[:, G + 1]
    made = drive(project_packed(x, parts, weight_rows(*parts)), Interpreter())
    assert sum(isinstance(step, Library) for step, _ in made.steps) == 1
    total = H * (G + 2) * D
    assert made.outcome[0].stride() == (total, (G + 2) * D, D, 1)
    for out, part in zip(made.outcome, parts, strict=True):
        torch.testing.assert_close(out, torch.einsum("tk,...dk->t...d", x, part))


CODES = AttentionCase(
    "codes", num_heads=8, num_kv_heads=4, head_dim=32, hidden=256, weight_format="fp8", codes=True,
    scale_block=(1, 256), x_scale="token",
)  # fmt: skip
BY_BLOCK = replace(CODES, scale_block=(128, 128), x_scale="block")


def by_library(case, target=SM90):
    """Computes a call by the library. Returns (names of the kernels, (result, caches), (expected
    result, expected caches))."""
    a, wanted = (qkv_cache.OP.sample_inputs(case) for _ in range(2))
    call = prepare(a)
    choice = library_choice(call.problem, a.x.shape[0], target, False, None)
    machine = Interpreter(replace(target, num_sms=3))
    made = drive(choice_steps(call, choice, machine.target), machine).outcome.result
    right = qkv_cache.reference(wanted)
    return machine.kernels, (made, a.k_cache, a.v_cache), (right, wanted.k_cache, wanted.v_cache)


@pytest.mark.parametrize(
    "case",
    [
        CODES,
        replace(CODES, x_scale="tensor", scale_block=(256, 256), qk_norm=True),
        replace(CODES, x_scale="tensor", bias=True),
        replace(CODES, x_scale="none"),
        replace(CODES, num_heads=1, num_kv_heads=1),
        BY_BLOCK,
        replace(BY_BLOCK, num_tokens=6, bias=True),
    ],
    ids=["rows", "tensors", "one for all of x", "x unscaled", "one head", "blocks", "odd tokens"],
)
def test_codes_are_multiplied_with_codes(case):
    """Multiplies codes by codes. In front of each product by blocks, rows of two scales are padded
    to four."""
    kernels, made, wanted = by_library(case)
    padded = 3 if case.x_scale == "block" else 0
    assert kernels == ["widen_scales"] * padded + ["qkv_epilogue"]
    for got, right in zip(made, wanted, strict=True):
        assert (got.double() - right.double()).norm() < 2.0**-7 * right.double().norm()


@pytest.mark.parametrize(
    ("case", "target"),
    [
        (BY_BLOCK, SM100),
        (replace(CODES, scale_block=(1, 64)), SM90),
        (replace(CODES, head_dim=24, num_heads=5, num_kv_heads=5), SM90),
    ],
    ids=["blocks elsewhere", "blocks of 64", "rows that are no multiple of 16"],
)
def test_codes_that_no_library_multiplies_become_numbers(case, target):
    kernels, made, wanted = by_library(case, target)
    assert kernels.count("dequantize_weight") == 3
    for got, right in zip(made, wanted, strict=True):
        assert (got.double() - right.double()).norm() < 2.0**-7 * right.double().norm()
