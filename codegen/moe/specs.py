"""Mixture-of-experts problems as plain data, and the kernel specs of the `moe_*` templates.

Nothing here touches torch or a GPU: a problem is what is static about one call site, a config is a
choice of tiles, and the two give a KernelSpec and a launch grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.grouped.codes_specs import (
    WORD_BYTES,
    CodesConfig,
    down_codes_spec,
    row_arguments,
    scale_steps,
    scale_type,
    storage_constants,
)
from tilewright.codegen.grouped.specs import (
    STORED,
    TMA_BYTES,
    ExpertLayout,
    GemmConfig,
    GroupedProblem,
    grouped_spec,
    make_spec,
    search_steps,
    tile_constants,
    weight_constants,
    weight_obstacle,
)
from tilewright.codegen.grouped.specs import (
    gemm_grid as gemm_grid,
)
from tilewright.codegen.spec import Constant, KernelSpec

# Up to here every program of the sort counts all routes itself.
COUNTED_BY_ALL = 2048


@dataclass(frozen=True)
class MoeProblem:
    """The static part of a `fused_moe` call.

    coded_rows: x and the hidden rows are quantised to e4m3 before they are multiplied.
    format, scale_block, scale_dtype, scale_strides: of the weights, see ops.formats.expert_weight;
    strides (expert, row block, column block) for gate, up, down. factors: whether gate, up and
    down have one more factor per expert. gated: there is an up weight. interleaved: its rows lie
    between gate's, in one tensor; else `distance` elements from gate's, None where they are two
    tensors. up_first: up lies at the lower address. biases: (expert stride, column stride) or None
    for gate, up, down; all of one dtype.
    """

    dtype: str
    id_dtype: str
    weight_dtype: str
    num_experts: int
    num_slots: int
    hidden: int
    inner: int
    x_stride: int
    weight_strides: tuple[int, int]
    gate_up: ExpertLayout
    down: ExpertLayout
    gated: bool
    interleaved: bool
    distance: int | None
    up_first: bool
    activation: str
    alpha: float
    limit: float
    format: str = "dense"
    scale_block: tuple[int, int] = (1, 1)
    scale_dtype: str = "fp32"
    scale_strides: tuple[tuple[int, int, int], ...] = ((0, 0, 0),) * 3
    factors: tuple[bool, ...] = (False, False, False)
    biases: tuple[tuple[int, int] | None, ...] = (None, None, None)
    bias_dtype: str = "bf16"
    coded_rows: bool = False
    unaligned: tuple[str, ...] = ()

    @property
    def stored_type(self) -> str:
        """Triton's type of a stored element."""
        return STORED[self.format][0] or self.dtype

    @property
    def experts(self) -> int:
        return next_power_of_2(self.num_experts)


@dataclass(frozen=True)
class OrderConfig:
    """Routes per program of the counting sort, and how it loads what it compares them with.

    counted: `moe_count` and `moe_scan` count beforehand. row_block: rows of the blocks whose first
    number it gives for each expert, 0: none.
    """

    chunk: int
    counted: bool
    num_warps: int = 4
    routes_per_load: int = 512
    routes_per_step: int = 32
    chunks_per_load: int = 64
    experts_per_scan: int = 8
    row_block: int = 0


@dataclass(frozen=True)
class CombineConfig:
    block_t: int
    block_h: int
    num_warps: int = 4


def order_config(problem: MoeProblem, num_routes: int) -> OrderConfig:
    """Short chunks: a program's work is the square of its routes."""
    covered = max(next_power_of_2(num_routes), 16)
    if num_routes <= COUNTED_BY_ALL:
        chunk = min(32 if covered <= 128 else 64, covered)
        return OrderConfig(chunk, False, routes_per_load=min(covered, 512), routes_per_step=chunk)
    if num_routes <= 8 * COUNTED_BY_ALL:
        return OrderConfig(128, True)
    return OrderConfig(256, True, num_warps=8)


def sort_specs(problem: MoeProblem, config: OrderConfig, target: str) -> dict[str, KernelSpec]:
    """The kernels of the sort by step: count and scan, where there are many routes, and order."""
    warps = config.num_warps
    experts: dict[str, Constant] = {"EXPERTS": problem.experts}
    chunked = experts | {"NUM_EXPERTS": problem.num_experts, "CHUNK": config.chunk}
    counts = "*i32" if config.counted else None
    ids = f"*{problem.id_dtype}"
    made = {}
    if config.counted:
        arguments = {"ids_ptr": ids, "counts_ptr": counts, "num_routes": "i32"}
        made["count"] = _spec("moe.order", "moe_count", problem, chunked, arguments, warps, target)
        arguments = {"counts_ptr": counts, "total_ptr": counts, "num_chunks": "i32"}
        scanned = experts | {
            "BLOCK_E": min(config.experts_per_scan, problem.experts),
            "CHUNKS_PER_LOAD": config.chunks_per_load,
        }
        made["scan"] = _spec("moe.order", "moe_scan", problem, scanned, arguments, warps, target)
    arguments = {
        "ids_ptr": ids, "counts_ptr": counts, "total_ptr": counts, "order_ptr": "*i32",
        "ends_ptr": "*i32", "num_routes": "i32",
    }  # fmt: skip
    compared = chunked | {
        "ROUTES_PER_LOAD": config.routes_per_load,
        "ROUTES_PER_STEP": config.routes_per_step,
        "ROW_BLOCK": config.row_block,
    }
    made["order"] = _spec("moe.order", "moe_order", problem, compared, arguments, warps, target)
    return made


def sort_grids(
    problem: MoeProblem, config: OrderConfig, num_routes: int
) -> dict[str, tuple[int, ...]]:
    """The grids of `sort_specs`."""
    chunks = cdiv(num_routes, config.chunk)
    scans = cdiv(problem.experts, config.experts_per_scan)
    return {"count": (chunks,), "scan": (scans,), "order": (chunks,)}


def up_spec(
    problem: MoeProblem, config: GemmConfig, target: str, order: tuple[int, int] = (0, 0)
) -> KernelSpec:
    """order: of the result's columns, see `order_of`."""
    if isinstance(config, CodesConfig):
        return _up_codes_spec(problem, config, target, order)
    arguments = up_arguments(problem)
    constants: dict[str, Constant] = {
        **up_constants(problem),
        **weight_constants(problem.gate_up, problem.format, problem.scale_block),
        "GATE_SCALE_STRIDES": problem.scale_strides[0],
        "UP_SCALE_STRIDES": problem.scale_strides[1],
        **tile_constants(config),
        "SEARCH_STEPS": search_steps(config, problem.num_experts),
    }
    return _spec(
        "moe.gemm", "moe_up", problem, constants, arguments, config.num_warps, target,
        config.num_stages,
    )  # fmt: skip


def _up_codes_spec(
    problem: MoeProblem, config: CodesConfig, target: str, order: tuple[int, int]
) -> KernelSpec:
    storage = up_problem(problem)
    scales = f"*{scale_type(storage, config)}"
    rows = row_arguments(config, problem.id_dtype, "i32")
    arguments = {"x_ptr": None, **rows} | up_arguments(problem) | rows
    arguments |= {"weight_ptr": "*i32", "gate_scale_ptr": scales}
    arguments["num_routes"] = "i32" if config.by_route else None
    if problem.gated:
        arguments["up_scale_ptr"] = scales
    constants: dict[str, Constant] = {
        **up_constants(problem),
        **storage_constants(storage, config),
        "HIDDEN_STEP": order[0],
        "HIDDEN_RUN": order[1],
    }
    for name, strides in zip(("GATE", "UP"), problem.scale_strides[:2], strict=True):
        constants[f"{name}_SCALE_STRIDES"] = scale_steps(storage, strides, config)
    distance = None if problem.distance is None else problem.distance // WORD_BYTES
    return _spec(
        "grouped.codes", "moe_up_codes", replace(problem, distance=distance), constants, arguments,
        config.num_warps, target, config.num_stages,
    )  # fmt: skip


def up_arguments(problem: MoeProblem) -> dict[str, str | None]:
    """Types of the first GEMM's run-time arguments."""
    return {
        "x_ptr": f"*{problem.dtype}",
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        "weight_ptr": f"*{problem.stored_type}",
        "gate_scale_ptr": _scale_type(problem),
        "up_scale_ptr": _scale_type(problem) if problem.gated else None,
        "gate_factor_ptr": "*fp32" if problem.factors[0] else None,
        "up_factor_ptr": "*fp32" if problem.factors[1] else None,
        "gate_bias_ptr": _bias_type(problem, 0),
        "up_bias_ptr": _bias_type(problem, 1),
        "hidden_ptr": f"*{problem.dtype}",
        "distance": "i64",
    }


def up_constants(problem: MoeProblem) -> dict[str, Constant]:
    """What is known of its operands, but for the weights' storage."""
    strides = [stride for bias in problem.biases[:2] for stride in (bias or (0, 0))]
    return {
        "NUM_SLOTS": problem.num_slots,
        "NUM_EXPERTS": problem.num_experts,
        "EXPERTS": problem.experts,
        "HIDDEN": problem.hidden,
        "INNER": problem.inner,
        "X_STRIDE": problem.x_stride,
        "GATED": problem.gated,
        "INTERLEAVED": problem.interleaved,
        "UP_FIRST": problem.up_first,
        "ACTIVATION": problem.activation,
        "ALPHA": problem.alpha,
        "LIMIT": problem.limit,
        "BIAS_STRIDES": tuple(strides),
    }


def down_spec(problem: MoeProblem, config: GemmConfig, target: str) -> KernelSpec:
    if isinstance(config, CodesConfig):
        return down_codes_spec(down_problem(problem), config, target, problem.id_dtype)
    return grouped_spec(down_problem(problem), config, target)


def up_problem(problem: MoeProblem) -> GroupedProblem:
    """The storage of gate's weight, as that of a grouped GEMM."""
    return replace(
        down_problem(problem),
        rows=problem.inner,
        inner=problem.hidden,
        weight=problem.gate_up,
        scale_strides=problem.scale_strides[0],
    )


def down_problem(problem: MoeProblem) -> GroupedProblem:
    """The second GEMM alone: its rows are the sorted routes, which it stores in their own order."""
    moved = {
        "down_weight_ptr": "weight_ptr", "bias_ptr": "bias_ptr", "down_scale_ptr": "scale_ptr",
        "down_factor_ptr": "factor_ptr",
    }  # fmt: skip
    return GroupedProblem(
        dtype=problem.dtype,
        out_dtype=problem.dtype,
        num_groups=problem.num_experts,
        num_experts=problem.num_experts,
        rows=problem.hidden,
        inner=problem.inner,
        x_stride=problem.inner,
        weight=problem.down,
        format=problem.format,
        scale_block=problem.scale_block,
        scale_dtype=problem.scale_dtype,
        scale_strides=problem.scale_strides[2],
        factor=problem.factors[2],
        bias=problem.biases[2],
        bias_dtype=problem.bias_dtype,
        ordered=True,
        unaligned=tuple(moved[name] for name in problem.unaligned if name in moved),
    )


def combine_spec(problem: MoeProblem, config: CombineConfig, target: str) -> KernelSpec:
    arguments: dict[str, str | None] = {
        "y_ptr": f"*{problem.dtype}",
        "ids_ptr": f"*{problem.id_dtype}",
        "weights_ptr": f"*{problem.weight_dtype}",
        "out_ptr": f"*{problem.dtype}",
        "num_tokens": "i32",
    }
    constants: dict[str, Constant] = {
        "NUM_SLOTS": problem.num_slots,
        "NUM_EXPERTS": problem.num_experts,
        "HIDDEN": problem.hidden,
        "WEIGHT_STRIDES": problem.weight_strides,
        "BLOCK_T": config.block_t,
        "BLOCK_H": config.block_h,
    }
    return _spec(
        "moe.combine", "moe_combine", problem, constants, arguments, config.num_warps, target
    )


def _scale_type(problem: MoeProblem) -> str | None:
    return None if problem.format == "dense" else f"*{problem.scale_dtype}"


def _bias_type(problem: MoeProblem, which: int) -> str | None:
    return None if problem.biases[which] is None else f"*{problem.bias_dtype}"


def _spec(
    template: str,
    kernel: str,
    problem: MoeProblem,
    constants: Mapping[str, Constant],
    arguments: Mapping[str, str | None],
    num_warps: int,
    target: str,
    num_stages: int = 2,
) -> KernelSpec:
    """A static distance becomes a constant, the rest of the arguments is the signature."""
    fixed, given = dict(constants), dict(arguments)
    if problem.distance is not None and "distance" in given:
        fixed["distance"] = problem.distance
        del given["distance"]
    unaligned = problem.unaligned
    return make_spec(
        template, kernel, fixed, given, unaligned, num_warps, num_stages, target, dependent=True
    )


def gemm_obstacle(problem: MoeProblem) -> str | None:
    """Why TMA cannot reach the operands; None where it can. From metadata alone."""
    size = ELEMENT_BYTES[problem.dtype]
    for name, layout in (("gate_weight", problem.gate_up), ("down_weight", problem.down)):
        obstacle = weight_obstacle(name, layout, problem.dtype, problem.format)
        if obstacle is not None:
            return obstacle
    distance = problem.distance or 0
    if distance * (size if problem.format == "dense" else 1) % TMA_BYTES:
        return f"up_weight: {distance} elements from gate_weight are not whole {TMA_BYTES} bytes"
    if not problem.coded_rows and problem.inner * size % TMA_BYTES:
        return f"{problem.inner} inner columns are not whole {TMA_BYTES} bytes"
    return None


def combine_grid(problem: MoeProblem, config: CombineConfig, num_tokens: int) -> tuple[int, int]:
    return (cdiv(num_tokens, config.block_t), cdiv(problem.hidden, config.block_h))
