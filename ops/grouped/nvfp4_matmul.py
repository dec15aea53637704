"""`grouped_matmul_dynamic_scaled_nvfp4`: multiplies NVFP4 activations by NVFP4 expert weights, with
Modular MAX's signature.

Products are accumulated in fp32, and the expert's factor is applied in fp32 before the only
rounding. The signs of block scales are ignored, because the tensor core ignores them too. Rows of a
group with id -1 are set to zero; MAX leaves them unchanged.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.grouped.nvfp4_kernels import GROUPED_NVFP4, nvfp4_config, nvfp4_statics
from tilewright.codegen.grouped.problem import TMA_BYTES
from tilewright.codegen.grouped.tiles import GemmConfig
from tilewright.codegen.kernel import Statics
from tilewright.codegen.targets import Target
from tilewright.ops.checks import (
    ArgumentError,
    check_choice,
    check_operand,
    holds,
    readable,
)
from tilewright.ops.contract import FusedOp, emitted_kernel, register, rounded_once
from tilewright.ops.formats import nvfp4
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.formats.row_groups import (
    INDEX_DTYPES,
    OFFSET_DTYPES,
    check_expert_values,
    check_offset_values,
    check_offsets,
    contiguous,
    expert_of_rows,
)
from tilewright.ops.formats.scale_layout import (
    group_scale_offsets,
    layout_shape,
    swizzle,
    unswizzle,
)
from tilewright.ops.reference.expert_matmul import multiply_by_expert
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.operands import is_aligned
from tilewright.ops.runtime.program import Buffer, Library, Outcome, Steps
from tilewright.ops.schema import SymInt

NAME = "grouped_matmul_dynamic_scaled_nvfp4"
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Nvfp4MatmulArguments:
    """The arguments of `grouped_matmul_dynamic_scaled_nvfp4`, for T rows, K inner columns (32
    divides K), N outer columns, E experts and G groups.

    - `a` uint8 [T, K/2], `b` uint8 [E, N, K/2]: the packed codes. K is contiguous.
    - `a_scales` float8_e4m3fn [S, ceil(K/64), 32, 4, 4], `b_scales` [E, ceil(N/128), ceil(K/64),
      32, 4, 4]: the scales in the layout of ops.formats.scale_layout. Their signs are ignored.
    - `group_offsets` int or uint32 [>= G + 1]: the first row of each group, followed by the end of
      the last group.
    - `group_scale_offsets` of the same dtypes [>= G]: the deltas that
      ops.formats.scale_layout.group_scale_offsets returns, for empty groups too.
    - `expert_ids` int [>= G]: the expert of each group; -1 for none.
    - `expert_scales` fp32 [E]: a factor for each expert.
    - `num_active_experts`: G. If it is None, group_offsets has exactly G + 1 elements.

    The result is [T, N] of out_dtype (bfloat16 if that is None).
    """

    a: torch.Tensor
    b: torch.Tensor
    a_scales: torch.Tensor
    b_scales: torch.Tensor
    group_offsets: torch.Tensor
    group_scale_offsets: torch.Tensor
    expert_ids: torch.Tensor
    expert_scales: torch.Tensor
    _: KW_ONLY
    num_active_experts: SymInt | None = None
    out_dtype: torch.dtype | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.out_dtype is None else self.out_dtype

    @property
    def num_groups(self) -> int:
        given = self.group_offsets.shape[0] - 1
        return given if self.num_active_experts is None else self.num_active_experts


def validate(a: Nvfp4MatmulArguments) -> None:
    check_operand(NAME, "a", a.a, "[T, K/2]", (None, None), (torch.uint8,), dense=True)
    packed = a.a.shape[1]
    if packed % 16:
        expected = "K that 32 divides (rows of whole 16 bytes)"
        raise ArgumentError(NAME, "a", expected, f"K = {2 * packed}")
    sizes, device = (None, None, packed), a.a.device
    check_operand(NAME, "b", a.b, "[E, N, K/2]", sizes, (torch.uint8,), device, dense=True)
    _check_scales(a, 2 * packed)
    _check_groups(a)
    check_choice(NAME, "out_dtype", a.out_dtype, (None, *OUT_DTYPES))


def _check_scales(a: Nvfp4MatmulArguments, inner: int) -> None:
    num_experts, rows = a.b.shape[:2]
    columns, device = inner // nvfp4.BLOCK, a.a.device
    b_shape = layout_shape(rows, columns, (num_experts,))
    a_shape: tuple[Any, ...] = (None, *b_shape[2:])
    wanted = {
        "a_scales": (a.a_scales, "[S, K/64, 32, 4, 4]", a_shape),
        "b_scales": (a.b_scales, "[E, N/128, K/64, 32, 4, 4]", b_shape),
    }
    for name, (scales, letters, sizes) in wanted.items():
        check_operand(NAME, name, scales, letters, sizes, (torch.float8_e4m3fn,), device)
        if not scales.is_contiguous():
            raise ArgumentError(NAME, name, "a contiguous layout", "another")
    factors = (num_experts,), (torch.float32,)
    check_operand(NAME, "expert_scales", a.expert_scales, "[E]", *factors, device)


def _check_groups(a: Nvfp4MatmulArguments) -> None:
    check_offsets(NAME, "group_offsets", a.group_offsets, OFFSET_DTYPES, a.a.device)
    if not holds(a.num_groups >= 0):
        expected = "a number of groups that is not negative"
        raise ArgumentError(NAME, "num_active_experts", expected, a.num_active_experts)
    for name, least in (("group_offsets", 1), ("group_scale_offsets", 0), ("expert_ids", 0)):
        tensor = getattr(a, name)
        allowed = INDEX_DTYPES if name == "expert_ids" else OFFSET_DTYPES
        check_operand(NAME, name, tensor, "[G]", (None,), allowed, a.a.device)
        wanted = a.num_groups + least
        if not holds(tensor.shape[0] >= wanted):
            expected = f"at least {wanted} elements for {a.num_groups} groups"
            raise ArgumentError(NAME, name, expected, tensor.shape[0])


def validate_values(a: Nvfp4MatmulArguments) -> None:
    groups, ids = a.num_groups, a.expert_ids[: a.num_groups]
    if groups == 0 or not readable([a.group_offsets, a.group_scale_offsets, ids]):
        return
    offsets = a.group_offsets[: groups + 1].long()
    check_offset_values(NAME, "group_offsets", offsets, a.a.shape[0])
    check_expert_values(NAME, "expert_ids", ids, a.b.shape[0])
    expected = group_scale_offsets(offsets)
    given = a.group_scale_offsets[:groups].to(torch.int32)
    if not torch.equal(given, expected):
        group = int((given != expected).nonzero()[0])
        wanted = f"the delta {int(expected[group])} for group {group} (see group_scale_offsets)"
        raise ArgumentError(NAME, "group_scale_offsets", wanted, int(given[group]))
    blocks = int(((offsets.diff() + 127) // 128).sum())
    if blocks > a.a_scales.shape[0]:
        raise ArgumentError(NAME, "a_scales", f"{blocks} blocks of 128 rows", a.a_scales.shape[0])


def unsupported(a: Nvfp4MatmulArguments) -> str | None:
    """Returns why the emitted kernel cannot compute a call; None if it can. Reads only metadata."""
    for name, steps in (("a", a.a.stride()[:-1]), ("b", a.b.stride()[:-1])):
        if any(step % TMA_BYTES for step in steps):
            return f"{name}: strides {list(steps)} are not multiples of {TMA_BYTES} bytes"
    return None


def fake(a: Nvfp4MatmulArguments) -> torch.Tensor:
    return a.a.new_empty((a.a.shape[0], a.b.shape[1]), dtype=a.result_dtype)


def reference(a: Nvfp4MatmulArguments) -> torch.Tensor:
    """Computes the following in fp32 for each row t of group g:

        A[t, k] = e2m1(a[t, k]) * |a_scales[t, k // 16]|
        B[n, k] = e2m1(b[e, n, k]) * |b_scales[e, n, k // 16]| * expert_scales[e]
        out[t] = A[t] @ B^T

    e = expert_ids[g] is the expert of group g. Rows of expert -1, and rows that belong to no group,
    are set to zero. If expert_scales is float64, everything is computed in float64.
    """
    compute = a.expert_scales.dtype
    num_rows, columns = a.a.shape[0], 2 * a.a.shape[1] // nvfp4.BLOCK
    offsets = a.group_offsets[: a.num_groups + 1]
    deltas = a.group_scale_offsets[: a.num_groups]
    scales = nvfp4.read_scales(a.a_scales, offsets, deltas, (num_rows, columns))
    x = nvfp4.dequantize(a.a, scales, dtype=compute)
    b_scales = unswizzle(a.b_scales.view(torch.uint8), a.b.shape[1], columns)
    magnitudes = (b_scales & 0x7F).view(torch.float8_e4m3fn)
    weight = ExpertWeight(a.b, "nvfp4", magnitudes, expert_scale=a.expert_scales)
    expert = expert_of_rows(offsets[1:], a.expert_ids[: a.num_groups], num_rows)
    out = multiply_by_expert(x, expert, weight)
    return out if compute == torch.float64 else out.to(a.result_dtype)


# --- the kernel -----------------------------------------------------------------------------------


@cache
def _chosen(
    max_groups: int, num_rows: int, target: Target, config: GemmConfig | None, scaled: bool
) -> tuple[GemmConfig, Statics]:
    """Returns the tile sizes (`config`, if it is given) and the constants of the kernel, for up to
    `num_rows` rows."""
    config = config or nvfp4_config(max_groups, num_rows, target)
    return config, nvfp4_statics(max_groups, config, block_scaled=scaled)


def grouped_nvfp4_steps(
    a: Nvfp4MatmulArguments,
    target: Target,
    config: GemmConfig | None = None,
    *,
    block_scaled: bool | None = None,
) -> Steps:
    """Performs the steps of a `grouped_matmul_dynamic_scaled_nvfp4` call.

    config: the tile sizes to use instead of the planner's. block_scaled: whether the tensor core
    multiplies NVFP4 directly. If it is None, the tensor core does so if the target supports it.
    """
    a = _aligned(a)
    out = yield Buffer.like(fake(a))
    yield Library(torch.Tensor.zero_, (out,))  # tiles do not cover rows that belong to no group
    scaled = target.has("block_scaled_mma") if block_scaled is None else block_scaled
    covered = next_power_of_2(a.a.shape[0])
    config, statics = _chosen(max(a.num_groups, 1), covered, target, config, scaled)
    values = {
        "a": a.a,
        "b": a.b,
        "a_scales": a.a_scales,
        "b_scales": a.b_scales,
        "offsets": contiguous(a.group_offsets),
        "deltas": contiguous(a.group_scale_offsets),
        "expert_ids": contiguous(a.expert_ids),
        "expert_scales": contiguous(a.expert_scales),
        "out": out,
        "num_rows": a.a.shape[0],
        "num_scale_blocks": a.a_scales.shape[0],
        "num_groups": a.num_groups,
    }
    if 0 not in (out.numel(), a.num_groups, a.a_scales.numel()):
        experts, rows, half = a.b.shape
        sizes = {"NUM_EXPERTS": experts, "ROWS_OUT": rows, "INNER": 2 * half}
        grid = config.grid(target.num_sms)
        yield launch(GROUPED_NVFP4, target, grid, values, statics, **sizes)
    how = "block-scaled" if scaled else "dequantised exactly"
    return Outcome(out, "grouped kernel", f"{how}, {config}")


def _aligned(a: Nvfp4MatmulArguments) -> Nvfp4MatmulArguments:
    """Returns the arguments, with copies of the tensors that TMA cannot read from their
    addresses."""
    tensors = {name: getattr(a, name) for name in ("a", "b", "a_scales", "b_scales")}
    off = {name: t.clone() for name, t in tensors.items() if not is_aligned(t)}
    return replace(a, **off) if off else a


# --- samples --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvfp4Case:
    """One case of `grouped_matmul_dynamic_scaled_nvfp4`.

    Attributes:
        name: The name of the case.
        sizes: The number of rows of each group.
        ids: The expert of each group.
        rows: The number of rows of each weight, N.
        inner: The number of columns of each weight, K.
        num_experts: The number of experts.
        spare: The number of rows that belong to no group.
        dtype: The dtype of the result.
    """

    name: str
    sizes: tuple[int, ...]
    ids: tuple[int, ...]
    rows: int = 144
    inner: int = 160
    num_experts: int = 5
    spare: int = 0
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Nvfp4Case("one_block_each", (31, 97, 63), (0, 3, 2)),
    Nvfp4Case("across_blocks", (65, 130, 3), (2, 0, 1)),
    Nvfp4Case("empty_first", (0, 1, 2, 3), (0, 3, 2, 4), dtype=torch.float32),
    Nvfp4Case("no_expert", (20, 40, 10), (-1, 0, 2), dtype=torch.float16),
    Nvfp4Case("repeated", (5, 0, 129), (1, 1, 1), rows=256, inner=64, spare=3),
)


def sample_inputs(
    case: Nvfp4Case, device: str | torch.device = "cpu", seed: int = 0
) -> Nvfp4MatmulArguments:
    """Returns random arguments of a case: quantised activations and weights, which are normally
    distributed."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *case.sizes]).cumsum(0).to(torch.int32)
    x = torch.randn(int(offsets[-1]) + case.spare, case.inner, generator=generator)
    w = torch.randn(case.num_experts, case.rows, case.inner, generator=generator)
    a, a_scales = nvfp4.quantize_grouped(x, offsets)
    b, b_scales = nvfp4.quantize(w * case.inner**-0.5)
    factors = 1 + (torch.arange(case.num_experts) + 1.0) / case.num_experts
    layout = swizzle(b_scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    ids = torch.tensor(case.ids, dtype=torch.int32)
    tensors = (a, b, a_scales, layout, offsets, group_scale_offsets(offsets), ids, factors)
    return Nvfp4MatmulArguments(*(t.to(device) for t in tensors), out_dtype=case.dtype)


OP = register(
    FusedOp(
        name=NAME,
        arguments=Nvfp4MatmulArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel(grouped_nvfp4_steps, unsupported),),
        cases=CASES,
        sample_inputs=sample_inputs,
        tolerances=rounded_once(2.0**-16, 2.0**-16, 2.0**-16),
        error_model="Products are exact, sums are accumulated in fp32, the result is rounded once.",
    )
)
