"""One grouped GEMM over expert weights as plain data, and the kernel spec of `grouped_gemm`.

It is `grouped_matmul` by itself and the second GEMM of a mixture of experts. Nothing here touches
torch or a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.spec import Constant, KernelSpec
from tilewright.codegen.targets import get_target

# TMA: strides and base addresses in whole 16 bytes.
TMA_BYTES = 16
# format -> (type of a stored element, None for the activations'; weights in it).
STORED: dict[str, tuple[str | None, int]] = {
    "dense": (None, 1),
    "fp8": ("fp8e4nv", 1),
    "int4": ("u8", 2),
    "nvfp4": ("u8", 2),
    "mxfp4": ("u8", 2),
}


@dataclass(frozen=True)
class ExpertLayout:
    """A weight [E, N, K] in memory; strides in elements.

    n_major: N is the contiguous dim and row_stride leads from one k to the next; else K is, and it
    leads from one row to the next.
    """

    expert_stride: int
    row_stride: int
    n_major: bool


@dataclass(frozen=True)
class GemmConfig:
    """Tiles of one grouped GEMM: block_m routes, block_n columns, block_k of the inner dim."""

    block_m: int
    block_n: int
    block_k: int
    swapped: bool
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    flatten: bool = False
    warp_specialize: bool = False

    def __str__(self) -> str:
        kind = "swapped " if self.swapped else ""
        more = f" p{self.programs_per_sm}" + ("f" if self.flatten else "")
        more += " ws" if self.warp_specialize else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{kind}{tile} w{self.num_warps} s{self.num_stages}{more}"


@dataclass(frozen=True)
class GroupedProblem:
    """The static part of a grouped GEMM: x [M, K] in groups of rows, weights [E, N, K].

    num_groups: how many ends there are. ends_dtype, ids_dtype: of the groups' ends and experts;
    ids_dtype None: group g's expert is g. ordered: rows are stored where `order` says (int32).
    scale_strides (expert, row block, column block), scale_block, scale_dtype: of the weights'
    scales, see ops.formats.expert_weight; factor: one more fp32 factor per expert. bias: (expert
    stride, column stride) or None. x_scale: strides (row, column block) of the scales of an x of
    e4m3 codes, per row and 128 columns; None: x is numbers. unaligned: pointers that are not at
    whole 16 bytes.
    """

    dtype: str
    out_dtype: str
    num_groups: int
    num_experts: int
    rows: int
    inner: int
    x_stride: int
    weight: ExpertLayout
    format: str = "dense"
    scale_block: tuple[int, int] = (1, 1)
    scale_dtype: str = "fp32"
    scale_strides: tuple[int, int, int] = (0, 0, 0)
    factor: bool = False
    bias: tuple[int, int] | None = None
    bias_dtype: str = "bf16"
    ends_dtype: str = "i32"
    ids_dtype: str | None = None
    ordered: bool = False
    x_scale: tuple[int, int] | None = None
    unaligned: tuple[str, ...] = ()

    @property
    def stored_type(self) -> str:
        """Triton's type of a stored element."""
        return STORED[self.format][0] or self.dtype


def grouped_spec(problem: GroupedProblem, config: GemmConfig, target: str) -> KernelSpec:
    """The kernel of a grouped GEMM of numbers; its parameters are those of the template."""
    arguments = grouped_arguments(problem)
    del arguments["x_scale_ptr"]
    constants: dict[str, Constant] = {
        **grouped_constants(problem),
        **tile_constants(config),
        "SEARCH_STEPS": search_steps(config, problem.num_groups) if problem.ordered else 0,
    }
    return make_spec(
        "grouped.gemm", "grouped_gemm", constants, arguments, problem.unaligned, config.num_warps,
        config.num_stages, target, dependent=True,
    )  # fmt: skip


def grouped_arguments(problem: GroupedProblem) -> dict[str, str | None]:
    """Types of the run-time arguments."""
    quantised = problem.format != "dense"
    return {
        "x_ptr": f"*{problem.dtype}",
        "x_scale_ptr": None if problem.x_scale is None else "*fp32",
        "order_ptr": "*i32" if problem.ordered else None,
        "ends_ptr": f"*{problem.ends_dtype}",
        "expert_ids_ptr": None if problem.ids_dtype is None else f"*{problem.ids_dtype}",
        "weight_ptr": f"*{problem.stored_type}",
        "scale_ptr": f"*{problem.scale_dtype}" if quantised else None,
        "factor_ptr": "*fp32" if problem.factor else None,
        "bias_ptr": None if problem.bias is None else f"*{problem.bias_dtype}",
        "y_ptr": f"*{problem.out_dtype}",
        "num_rows": "i32",
    }


def grouped_constants(problem: GroupedProblem) -> dict[str, Constant]:
    """All that is known of the operands."""
    # One more group has the rows that belong to none.
    groups = problem.num_groups if problem.ordered else problem.num_groups + 1
    return {
        "NUM_GROUPS": problem.num_groups,
        "GROUPS": next_power_of_2(groups),
        "NUM_EXPERTS": problem.num_experts,
        "HIDDEN": problem.rows,
        "INNER": problem.inner,
        "X_STRIDE": problem.x_stride,
        **weight_constants(problem.weight, problem.format, problem.scale_block),
        "SCALE_STRIDES": problem.scale_strides,
        "BIAS_STRIDES": problem.bias or (0, 0),
    }


@dataclass(frozen=True)
class DequantizeConfig:
    """Tiles of `dequantize_experts`: rows and columns of a weight."""

    block_n: int = 32
    block_k: int = 128
    num_warps: int = 4


def dequantize_spec(problem: GroupedProblem, config: DequantizeConfig, target: str) -> KernelSpec:
    """What decodes all weights of a problem before its GEMM."""
    constants: dict[str, Constant] = {
        "HIDDEN": problem.rows,
        "INNER": problem.inner,
        **weight_constants(problem.weight, problem.format, problem.scale_block),
        "SCALE_STRIDES": problem.scale_strides,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    del constants["N_MAJOR"]
    arguments = {
        "weight_ptr": f"*{problem.stored_type}",
        "scale_ptr": f"*{problem.scale_dtype}",
        "out_ptr": f"*{problem.dtype}",
    }
    return make_spec(
        "grouped.dequantize_experts", "dequantize_experts", constants, arguments, problem.unaligned,
        config.num_warps, 1, target,
    )  # fmt: skip


def dequantize_grid(problem: GroupedProblem, config: DequantizeConfig) -> tuple[int, int, int]:
    columns = cdiv(problem.inner, config.block_k)
    return (columns, cdiv(problem.rows, config.block_n), problem.num_experts)


def dequantized(problem: GroupedProblem) -> GroupedProblem:
    """The problem after `dequantize_experts`; the factors of the experts are left."""
    layout = ExpertLayout(problem.rows * problem.inner, problem.inner, False)
    aligned = tuple(name for name in problem.unaligned if name != "weight_ptr")
    return replace(
        problem, weight=layout, format="dense", scale_block=(1, 1), scale_strides=(0, 0, 0),
        unaligned=aligned,
    )  # fmt: skip


def weight_constants(
    layout: ExpertLayout, name: str, scale_block: tuple[int, int]
) -> dict[str, Constant]:
    """What the templates know of a weight's storage; name: its format."""
    return {
        "EXPERT_STRIDE": layout.expert_stride,
        "ROW_STRIDE": layout.row_stride,
        "N_MAJOR": layout.n_major,
        "FORMAT": name,
        "PER_BYTE": STORED[name][1],
        "SCALE_BLOCK": scale_block,
    }


def tile_constants(config: GemmConfig) -> dict[str, Constant]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SWAPPED": config.swapped,
        "FLATTEN": config.flatten,
        "WARP_SPECIALIZE": config.warp_specialize,
    }


def search_steps(config: GemmConfig, num_experts: int) -> int:
    """Steps in which a tile of `config` finds its expert in memory; 0: not there."""
    return next_power_of_2(max(num_experts, 2)).bit_length() - 1 if config.warp_specialize else 0


def make_spec(
    template: str,
    kernel: str,
    constants: Mapping[str, Constant],
    arguments: Mapping[str, str | None],
    unaligned: tuple[str, ...],
    num_warps: int,
    num_stages: int,
    target: str,
    *,
    dependent: bool = False,
    max_registers: int | None = None,
) -> KernelSpec:
    """A spec whose signature is `arguments` but for those without a type, which are None.

    unaligned: pointers that are not known to be at whole 16 bytes. dependent: the template waits
    for the kernel before it where LAUNCH_PDL says so: on targets that start one before that ends.
    """
    signature = {name: kind for name, kind in arguments.items() if kind is not None}
    pdl = dependent and get_target(target).has("dependent_launch")
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or n == "distance"]
    return KernelSpec.make(
        template,
        kernel,
        {
            **constants,
            **{name: None for name in arguments if name not in signature},
            **({"LAUNCH_PDL": pdl} if dependent else {}),
        },
        signature,
        divisible16=[name for name in aligned if name not in unaligned],
        ranges={name: (1, 2**31 - 1) for name in ("num_chunks",) if name in signature},
        num_warps=num_warps,
        num_stages=num_stages,
        target=target,
        maxnreg=max_registers,
        launch_pdl=pdl,
    )


def weight_obstacle(name: str, layout: ExpertLayout, dtype: str, fmt: str) -> str | None:
    """Why TMA cannot reach the weight called `name`; None where it can. dtype: the activations'."""
    size = ELEMENT_BYTES[dtype] if fmt == "dense" else 1
    steps = (layout.expert_stride, layout.row_stride)
    if any(step * size % TMA_BYTES for step in steps):
        return f"{name}: strides {steps} are not whole {TMA_BYTES} bytes"
    if fmt != "dense" and layout.n_major:
        return f"{fmt} weights are not contiguous along the inner dimension"
    return None


def gemm_grid(config: GemmConfig, num_sms: int) -> tuple[int]:
    """Persistent: the tiles are known on the device only."""
    return (num_sms * config.programs_per_sm,)
