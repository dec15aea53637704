"""The projection by library GEMMs: its numbers, and the strides that the epilogue builds on."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted import Interpreter
from tilewright.ops.formats.weight_rows import weight_rows
from tilewright.ops.qkv.library import project, project_packed
from tilewright.ops.runtime.program import Library, drive

T, H, G, D, K = 5, 3, 2, 4, 8


def weight(*shape, every=None):
    """A weight, or every other slice along an axis of one twice as long."""
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
