"""Runs MAX's own test matrix for `grouped_matmul_dynamic_scaled_nvfp4`.

Every case runs through the kernel on a GPU at MAX's sizes. All lists of groups, each with one of
the shapes, run through the reference on a CPU, and some through the emitted SM100 source on
Triton's interpreter. Without a GPU, N and K are smaller, but the rows are not: groups that cross
blocks of 128 rows, empty groups, and experts that repeat or are -1 stay.

The values are standard normal and quantised to NVFP4. As in MAX, expert_scales[e] = 1 + (e + 1) /
E.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch

from tilewright.codegen.build import load_interpreted
from tilewright.codegen.emit import emit
from tilewright.codegen.grouped.nvfp4_kernels import nvfp4_config
from tilewright.codegen.targets import SM100
from tilewright.ops.formats import nvfp4
from tilewright.ops.formats.scale_layout import group_scale_offsets, swizzle
from tilewright.ops.grouped import nvfp4_matmul as op
from tilewright.ops.runtime.program import Planner, drive

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
EXPERTS = 8
# The errors that two operands in four bits may cause, and the errors that the order of the sum and
# the rounding may cause.
QUANTISED, EXACT = 0.02, 1e-5


@dataclass(frozen=True)
class Case:
    """The rows per group, the expert of each group, the rows (N) and columns (K) of the weights,
    and the number of experts."""

    sizes: tuple[int, ...]
    ids: tuple[int, ...]
    rows: int = 2048
    inner: int = 1024
    experts: int = EXPERTS

    def __str__(self) -> str:
        groups = " ".join(
            f"{size}:{expert}" for size, expert in zip(self.sizes, self.ids, strict=True)
        )
        return f"{self.rows}x{self.inner} {groups}"

    def shrunk(self, rows: int, inner: int) -> Case:
        """Returns the same groups with a smaller weight."""
        return replace(self, rows=rows, inner=inner)


PLAIN = (
    Case((512, 1000, 2000, 3000), (0, 3, 2, 4), experts=6),
    Case((65, 1027, 386), (2, 0, 1), experts=4),
    Case((128, 256, 1024), (0, 3, 2), experts=4),
    Case((256, 519, 1037, 129), (0, 3, 2, 4), experts=6),
    Case((127, 257, 513, 1025), (0, 3, 2, 4), experts=6),
    Case((31, 97, 63), (2, 0, 1), experts=4),
    Case((0, 1, 2, 3), (0, 3, 2, 4), experts=6),
    Case((128, 256, 512), (-1, 0, 2), experts=4),
    Case((0, 3, 1, 2), (-1, 2, -1, 0), experts=4),
    Case((128,) * 4, (0, 3, 2, 1), 2880, 2880, 4),
    Case((128,) * 4, (0, -1, 2, 1), 2880, 2880, 4),
)
DISPATCH_SHAPES = ((4096, 7168), (7168, 2048), (2048, 1024), (512, 7168), (7168, 256))
DISPATCH_SIZES = (
    (128, 256, 512, 1024), (2,) * 4, (64,), (65, 129, 257), (1,), (1,) * 8, (1,) * 9,
    (8, *(1,) * 8), (40,) * 8, (127, 128, 64, 256), (4, 256, 1, 200),
)  # fmt: skip


def dispatch_ids(sizes: tuple[int, ...], none: bool) -> tuple[int, ...]:
    """Returns experts in no order; with nine groups, one expert occurs twice. With `none`, every
    third group has no expert."""
    experts = (3 * group % EXPERTS for group in range(len(sizes)))
    return tuple(-1 if none and group % 3 == 1 else e for group, e in enumerate(experts))


#: The number of cases of each shape.
GROUPS = sum(1 + (len(sizes) > 1) for sizes in DISPATCH_SIZES)
DISPATCH = tuple(
    Case(sizes, dispatch_ids(sizes, none), rows, inner)
    for rows, inner in DISPATCH_SHAPES
    for sizes in DISPATCH_SIZES
    for none in ((False, True) if len(sizes) > 1 else (False,))
)
MATRIX = PLAIN + DISPATCH
# Each list of groups with one shape. The reference computes one group after the other.
ON_A_CPU = PLAIN + tuple(
    DISPATCH[number % len(DISPATCH_SHAPES) * GROUPS + number] for number in range(GROUPS)
)
# Groups that cross blocks, empty groups, groups of one row, no experts, and many groups of one row.
INTERPRETED = (
    *(PLAIN[i] for i in (1, 5, 6, 7, 8, 10)),
    *(
        Case(sizes, dispatch_ids(sizes, True))
        for sizes in ((8, *(1,) * 8), (127, 128, 64, 256), (4, 256, 1, 200))
    ),
)


@lru_cache(maxsize=4)
def weights(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (weights [E, N, K], their codes, their scales in the tensor core's layout)."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (case.experts, case.rows, case.inner)
    w = torch.randn(shape, generator=generator, device=device)
    codes, scales = nvfp4.quantize(w)
    return w, codes, swizzle(scales.view(torch.uint8)).view(scales.dtype)


def arguments(case: Case, device: str) -> tuple[op.Nvfp4MatmulArguments, torch.Tensor]:
    """Returns (arguments of the op, the activations that were quantised)."""
    generator = torch.Generator(device).manual_seed(2)
    offsets = torch.tensor([0, *case.sizes], device=device).cumsum(0)
    x = torch.randn(sum(case.sizes), case.inner, generator=generator, device=device)
    a, a_scales = nvfp4.quantize_grouped(x, offsets)
    _, b, b_scales = weights(replace(case, sizes=(), ids=()), device)
    factors = 1 + (torch.arange(case.experts, device=device) + 1.0) / case.experts
    deltas = group_scale_offsets(offsets).to(torch.uint32)
    ids = torch.tensor(case.ids, dtype=torch.int32, device=device)
    given = (a, b, a_scales, b_scales, offsets.to(torch.uint32), deltas, ids, factors)
    return op.Nvfp4MatmulArguments(*given), x


def calc_diff(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns DeepGEMM's distance of two tensors, 1 - 2 <a, e> / (<a, a> + <e, e>)."""
    actual, exact = actual.double(), exact.double()
    norms = (actual * actual + exact * exact).sum()
    return float(1 - 2 * (actual * exact).sum() / norms) if norms else 0.0


def by_group(case: Case, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Computes rows of `a` times the weights of their expert, times the expert's factor, in
    float64. Expert -1 gives zeros."""
    groups = []
    for rows, expert in zip(a.split(case.sizes), case.ids, strict=True):
        factor = (1 + (expert + 1.0) / case.experts) if expert >= 0 else 0.0
        groups.append(rows.double() @ b[max(expert, 0)].double().T * factor)
    return torch.cat(groups)


def check(case: Case, actual: torch.Tensor, a: op.Nvfp4MatmulArguments, x: torch.Tensor) -> None:
    """Checks MAX's criteria, and the op's own tolerance."""
    w, codes, layout = weights(replace(case, sizes=(), ids=()), str(x.device.type))
    offsets, columns = a.group_offsets.long(), case.inner // nvfp4.BLOCK
    scales = nvfp4.read_scales(
        a.a_scales, offsets, a.group_scale_offsets.long(), (x.shape[0], columns)
    )
    left = nvfp4.dequantize(a.a, scales, dtype=torch.bfloat16)
    right = dequantized_weights(case, codes, layout)
    product = by_group(case, left, right)
    assert calc_diff(actual, by_group(case, x, w)) < QUANTISED
    assert calc_diff(actual, product) < EXACT
    torch.testing.assert_close(actual.double(), product, rtol=1e-2, atol=1e-2)
    problem = op.OP.tolerances[actual.dtype].problem(actual, product)
    assert problem is None, problem


def dequantized_weights(case: Case, codes: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    """Returns the exact weights in bf16. They are decoded by the formula of the layout, not by the
    functions under test."""
    row = torch.arange(case.rows, device=codes.device)[:, None]
    column = torch.arange(case.inner // nvfp4.BLOCK, device=codes.device)[None, :]
    place = (row // 128 * -(-case.inner // 64) + column // 4) * 512
    place = place + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    flat = layout.view(torch.uint8).reshape(case.experts, -1)
    scales = flat[:, place.flatten()].view(case.experts, *place.shape).view(layout.dtype)
    return nvfp4.dequantize(codes, scales, dtype=torch.bfloat16)


@pytest.mark.parametrize("case", ON_A_CPU, ids=str)
def test_reference(case):
    """Runs the reference. N and K are an eighth of MAX's. Groups of scales are still complete, and
    an N that is not a multiple of 128 is still none."""
    small = case.shrunk(case.rows // 8, max(-(-case.inner // 256), 1) * 32)
    a, x = arguments(small, "cpu")
    check(small, op.OP.call(a), a, x)


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted_sm100_source(case):
    """The interpreter runs the source for SM100. With N = 144 there are two blocks of rows, the
    second of which is padded. With K = 288 there are two steps, and the second uses an eighth of
    its columns."""
    small = case.shrunk(144, 288)
    a, x = arguments(small, "cpu")
    config = nvfp4_config(a.num_groups, x.shape[0], SM100)
    steps = op.grouped_nvfp4_steps(a, SM100, config)
    (spec,) = drive(steps, Planner(SM100), keep=True).specs
    out = torch.zeros(x.shape[0], small.rows, dtype=torch.bfloat16)
    load_interpreted(spec)[(3,)](
        a.a, a.b, a.a_scales, a.b_scales, a.group_offsets, a.group_scale_offsets, a.expert_ids,
        a.expert_scales, out, a.a.shape[0], a.a_scales.shape[0], a.num_groups,
    )  # fmt: skip
    assert "tl.dot_scaled(" in emit(spec)
    check(small, out, a, x)


@pytest.mark.parametrize("case", [pytest.param(c, marks=GPU, id=str(c)) for c in MATRIX])
def test_gpu_kernel(case):
    """Runs the registered op at MAX's sizes, and runs it again to compare the bits."""
    a, x = arguments(case, "cuda")
    got = op.OP.call(a)
    check(case, got, a, x)
    check(case, op.reference(a), a, x)
    assert torch.equal(got, op.OP.call(a))
