"""`quantize_nvfp4`: quantises rows to NVFP4, with the scales in the layout that the tensor core
reads.

ops.formats.nvfp4 defines the order of operations, so every device returns the same bits. The
results can be passed as `a` and `a_scales` to `grouped_matmul_dynamic_scaled_nvfp4`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.grouped.nvfp4_kernels import QUANTIZE_NVFP4, QuantizeConfig, quantize_grid
from tilewright.codegen.targets import Target
from tilewright.ops.checks import ArgumentError, check_operand, check_shape, check_tensor, readable
from tilewright.ops.contract import EXACT, FusedOp, emitted_kernel, register
from tilewright.ops.formats import nvfp4
from tilewright.ops.formats.row_groups import (
    INDEX_DTYPES,
    check_offset_values,
    check_offsets,
    contiguous,
)
from tilewright.ops.formats.scale_layout import layout_shape, max_scale_blocks
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.program import Buffer, Outcome, Steps

NAME = "quantize_nvfp4"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantizeNvfp4Arguments:
    """The arguments of `quantize_nvfp4`, for T rows, K inner columns (16 divides K) and G groups.

    - `x` [T, K]: the rows.
    - `group_offsets` int [G + 1]: exclusive offsets, as the grouped GEMM expects them. If it is
      None, all rows are one group.
    - `tensor_scales` fp32 [G]: one positive number for each group. Without group_offsets, the shape
      is [1]. If it is None, all scales are 1.

    The results are packed codes uint8 [T, K/2], and scales float8_e4m3fn [S, ceil(K/64), 32, 4, 4].
    In the scales, every group has its own blocks (ops.formats.scale_layout), and
    `group_scale_offsets` returns the deltas of these blocks. S is ceil(T/128) without
    group_offsets, and ceil(T/128) + G with them. Rows that belong to no group have zero codes and
    no scales. Scales that belong to no row or column of x are zero.
    """

    x: torch.Tensor
    group_offsets: torch.Tensor | None = None
    tensor_scales: torch.Tensor | None = None

    @property
    def num_groups(self) -> int:
        return 1 if self.group_offsets is None else self.group_offsets.shape[0] - 1

    @property
    def num_blocks(self) -> int:
        """The number of blocks of scales. A block has the scales of 128 rows."""
        return max_scale_blocks(
            self.x.shape[0], 0 if self.group_offsets is None else self.num_groups
        )


def validate(a: QuantizeNvfp4Arguments) -> None:
    check_operand(NAME, "x", a.x, "[T, K]", (None, None), DTYPES, dense=True)
    if a.x.shape[1] % nvfp4.BLOCK:
        raise ArgumentError(NAME, "x", f"K that {nvfp4.BLOCK} divides", f"K = {a.x.shape[1]}")
    if a.group_offsets is not None:
        check_offsets(NAME, "group_offsets", a.group_offsets, INDEX_DTYPES, a.x.device)
    if a.tensor_scales is not None:
        sizes, dtypes = (a.num_groups,), (torch.float32,)
        check_operand(NAME, "tensor_scales", a.tensor_scales, "[G]", sizes, dtypes, a.x.device)


def validate_values(a: QuantizeNvfp4Arguments) -> None:
    if not readable([a.group_offsets, a.tensor_scales]):
        return
    if a.group_offsets is not None:
        check_offset_values(NAME, "group_offsets", a.group_offsets, a.x.shape[0])
    if a.tensor_scales is not None:
        wrong = ~((a.tensor_scales > 0) & a.tensor_scales.isfinite())
        if bool(wrong.any()):
            group = int(wrong.nonzero()[0])
            actual = f"{float(a.tensor_scales[group])} for group {group}"
            raise ArgumentError(NAME, "tensor_scales", "positive numbers", actual)


def fake(a: QuantizeNvfp4Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, inner = a.x.shape
    _, *tail = layout_shape(0, inner // nvfp4.BLOCK)
    packed = a.x.new_empty((num_rows, inner // 2), dtype=torch.uint8)
    return packed, a.x.new_empty((a.num_blocks, *tail), dtype=torch.float8_e4m3fn)


def reference(a: QuantizeNvfp4Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the following in fp32 with IEEE division for each block of 16 columns of a row:

        scale = e4m3(s * max |x of the block| / 6)        nearest even, at most 448
        code = e2m1(x * (s / scale))                      0 where scale is 0

    s is the tensor scale of the row's group. x is then approximately code * scale / s.
    """
    if a.x.numel() == 0:
        packed, scales = fake(a)
        return packed, scales.view(torch.uint8).zero_().view(scales.dtype)
    if a.group_offsets is not None:
        return nvfp4.quantize_grouped(a.x, a.group_offsets, a.tensor_scales)
    packed, scales = nvfp4.quantize(a.x, 1.0 if a.tensor_scales is None else a.tensor_scales)
    return packed, nvfp4.layout_scales(scales)


# --- the kernel -----------------------------------------------------------------------------------

CONFIG = QuantizeConfig()


def quantize_nvfp4_steps(
    a: QuantizeNvfp4Arguments, target: Target, config: QuantizeConfig = CONFIG
) -> Steps:
    """Performs the steps of a `quantize_nvfp4` call."""
    packed, scales = fake(a)
    packed = yield Buffer.like(packed)
    scales = yield Buffer.like(scales)
    values = {
        "x": a.x,
        "offsets": contiguous(a.group_offsets),
        "tensor_scales": contiguous(a.tensor_scales),
        "packed": packed,
        "scales": scales,
        "num_rows": a.x.shape[0],
    }
    groups, inner = a.num_groups, a.x.shape[1]
    sizes = {"NUM_GROUPS": groups, "GROUPS": next_power_of_2(groups), "INNER": inner}
    grid = quantize_grid(inner, config, a.num_blocks)
    yield launch(QUANTIZE_NVFP4, target, grid, values, config, **sizes)
    return Outcome((packed, scales), "quantisation kernel", "one pass over x")


# --- samples --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizeCase:
    """One case of `quantize_nvfp4`.

    Attributes:
        name: The name of the case.
        sizes: The number of rows of each group. If it is None, there are no groups, and x has
            `spare` rows.
        inner: The number of columns, K.
        spare: The number of rows that belong to no group.
        scales: The tensor scales of the groups.
        dtype: The dtype of x.
    """

    name: str
    sizes: tuple[int, ...] | None = None
    inner: int = 96
    spare: int = 0
    scales: tuple[float, ...] | None = None
    dtype: torch.dtype = torch.bfloat16


CASES = (
    QuantizeCase("plain", spare=130),
    QuantizeCase("plain_scaled", spare=5, scales=(0.43,), dtype=torch.float16, inner=176),
    QuantizeCase("grouped", sizes=(100, 20, 50), scales=(0.5, 1.0, 0.43)),
    QuantizeCase("empty_groups", sizes=(0, 13, 0, 129, 0), dtype=torch.float32, inner=16),
    QuantizeCase("spare_rows", sizes=(60, 7), spare=140, inner=64),
    QuantizeCase("no_groups", sizes=(), spare=3),
    QuantizeCase("no_rows", sizes=(0, 0)),
)


def sample_inputs(
    case: QuantizeCase, device: str | torch.device = "cpu", seed: int = 0
) -> QuantizeNvfp4Arguments:
    """Returns random rows. Some of their blocks are zero, and others have tiny, huge or infinite
    numbers."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(case.sizes or ()) + case.spare
    x = torch.randn(num_rows, case.inner, generator=generator) * 3
    for row, value in enumerate((0.0, 1e-5, 6e4, float("inf"), float("-inf"))):
        x[row::11, 2:16] *= value
    offsets = None
    if case.sizes is not None:
        offsets = torch.tensor([0, *case.sizes]).cumsum(0).to(torch.int32).to(device)
    scales = None if case.scales is None else torch.tensor(case.scales, device=device)
    return QuantizeNvfp4Arguments(x.to(case.dtype).to(device), offsets, scales)


OP = register(
    FusedOp(
        name=NAME,
        arguments=QuantizeNvfp4Arguments,
        returns="(Tensor, Tensor)",
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel(quantize_nvfp4_steps),),
        cases=CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"x"}),
        tolerances={torch.uint8: EXACT, torch.float8_e4m3fn: EXACT},
        error_model="None: the order of operations is fixed, so every device gives the same bits.",
    )
)


def quantize_nvfp4(
    x: torch.Tensor,
    group_offsets: torch.Tensor | None = None,
    tensor_scales: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the op and returns (packed, scales) of x [T, K]; see QuantizeNvfp4Arguments.

    If tensor_scales is a number, it is used for every group. Raises ArgumentError. The op is not
    differentiable.
    """
    if isinstance(tensor_scales, (int, float)):
        check_tensor(NAME, "x", x)
        groups = 1
        if group_offsets is not None:
            check_shape(NAME, "group_offsets", group_offsets, "[G + 1]", (None,))
            groups = max(group_offsets.shape[0] - 1, 0)
        tensor_scales = torch.full((groups,), float(tensor_scales), device=x.device)
    return OP.torch_op(x, group_offsets, tensor_scales)
