"""The kernel specs of a mixture of experts: the sort of its routes, its two GEMMs, and the sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.codes_specs import (
    WORD_BYTES,
    CodesConfig,
    as_words,
    codes_constants,
    down_codes_spec,
    row_arguments,
)
from tilewright.codegen.grouped.problem import PER_BYTE
from tilewright.codegen.grouped.specs import (
    Arguments,
    GemmConfig,
    gemm_spec,
    grouped_spec,
    search_steps,
    storage_constants,
)
from tilewright.codegen.moe.problem import INDICES, MoeProblem, down_problem
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant, KernelSpec, constants_of

# Up to here every program of the sort counts all routes itself.
COUNTED_BY_ALL = 2048


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
    """Tokens and columns of a program."""

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
    chunked: dict[str, Constant] = {
        "EXPERTS": problem.experts, "NUM_EXPERTS": problem.num_experts, "CHUNK": config.chunk,
    }  # fmt: skip
    counts = INDICES if config.counted else None

    def spec(kernel: str, constants: dict[str, Constant], arguments: Arguments) -> KernelSpec:
        return KernelSpec.of(
            "moe.order", kernel, constants, arguments, target=target, num_warps=config.num_warps,
            ranges=("num_chunks",), dependent=True,
        )  # fmt: skip

    ids: Arguments = {"ids_ptr": problem.expert_ids}
    counted: Arguments = {"counts_ptr": counts, "total_ptr": counts}
    made = {}
    if config.counted:
        arguments: Arguments = {**ids, "counts_ptr": counts, "num_routes": "i32"}
        made["count"] = spec("moe_count", chunked, arguments)
        scanned: dict[str, Constant] = {
            "EXPERTS": problem.experts,
            "BLOCK_E": min(config.experts_per_scan, problem.experts),
            "CHUNKS_PER_LOAD": config.chunks_per_load,
        }
        made["scan"] = spec("moe_scan", scanned, {**counted, "num_chunks": "i32"})
    loads = constants_of(config, "routes_per_load", "routes_per_step", "row_block")
    arguments = {**ids, **counted, "order_ptr": INDICES, "ends_ptr": INDICES, "num_routes": "i32"}
    return made | {"order": spec("moe_order", chunked | loads, arguments)}


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
    """The first GEMM. order: of the result's columns, see `order_of`."""
    if isinstance(config, CodesConfig):
        return _up_codes_spec(problem, config, target, order)
    constants = {
        **up_constants(problem),
        **storage_constants(problem.gate_up),
        "N_MAJOR": problem.gate_up.n_major,
        "FORMAT": problem.format,
        "PER_BYTE": PER_BYTE[problem.format],
        **constants_of(config, "flatten", "warp_specialize"),
        "SEARCH_STEPS": search_steps(config, problem.num_experts),
    }
    arguments = up_arguments(problem)
    return gemm_spec(
        "moe.gemm", "moe_up", constants, arguments, config, target, divisible=divisible(problem)
    )


def _up_codes_spec(
    problem: MoeProblem, config: CodesConfig, target: str, order: tuple[int, int]
) -> KernelSpec:
    gate = as_words(problem.gate_up, config)
    up = None if problem.up is None else as_words(problem.up, config)
    distance = None if problem.distance is None else problem.distance // WORD_BYTES
    words = replace(problem, gate=gate, up=up, distance=distance)
    rows = row_arguments(config, problem.expert_ids, INDICES, INDICES)
    arguments: Arguments = {"x_ptr": None, **rows} | up_arguments(words) | rows
    arguments["num_routes"] = "i32" if config.by_route else None
    constants = {
        **up_constants(words),
        **codes_constants(gate, config),
        "HIDDEN_STEP": order[0],
        "HIDDEN_RUN": order[1],
    }
    return gemm_spec(
        "grouped.codes", "moe_up_codes", constants, arguments, config, target,
        divisible=divisible(problem),
    )  # fmt: skip


def up_arguments(problem: MoeProblem) -> Arguments:
    """The first GEMM's run-time arguments; a distance that is known beforehand is a constant.

    weight_ptr is gate's or up's weight, whichever lies lower in a tensor of both. It is aligned as
    gate is: `gemm_obstacle` wants whole 16 bytes between them.
    """
    gate, up = problem.gate, problem.up
    up_operands = (None, None, None) if up is None else (up.scale, up.factor, up.bias)
    up_scale, up_factor, up_bias = up_operands
    return {
        "x_ptr": problem.x,
        "order_ptr": INDICES,
        "ends_ptr": INDICES,
        "weight_ptr": gate.data,
        "gate_scale_ptr": gate.scale,
        "up_scale_ptr": up_scale,
        "gate_factor_ptr": gate.factor,
        "up_factor_ptr": up_factor,
        "gate_bias_ptr": gate.bias,
        "up_bias_ptr": up_bias,
        "hidden_ptr": Operand(problem.dtype),
        "distance": "i64" if problem.distance is None else problem.distance,
    }


def divisible(problem: MoeProblem) -> tuple[str, ...]:
    """The number among `up_arguments` that 16 divides."""
    return ("distance",) if problem.distance_divisible else ()


def up_constants(problem: MoeProblem) -> dict[str, Constant]:
    """What is known of the first GEMM's operands, but for the weights' storage."""
    gate, up = problem.gate, problem.up
    return {
        **constants_of(problem, "num_slots", "num_experts", "experts", "hidden", "inner"),
        **constants_of(problem, "interleaved", "up_first", "activation", "alpha", "limit"),
        "X_STRIDE": problem.x.strides[0],
        "GATED": up is not None,
        "GATE_SCALE_STRIDES": gate.scale_strides,
        "UP_SCALE_STRIDES": up.scale_strides if up else (0, 0, 0),
        "BIAS_STRIDES": (*gate.bias_strides, *(up.bias_strides if up else (0, 0))),
    }


def down_spec(problem: MoeProblem, config: GemmConfig, target: str) -> KernelSpec:
    """The second GEMM."""
    if isinstance(config, CodesConfig):
        return down_codes_spec(down_problem(problem), config, target, problem.expert_ids)
    return grouped_spec(down_problem(problem), config, target)


def combine_spec(problem: MoeProblem, config: CombineConfig, target: str) -> KernelSpec:
    """The sum of a token's routes."""
    constants: dict[str, Constant] = {
        **constants_of(problem, "num_slots", "num_experts", "hidden"),
        "WEIGHT_STRIDES": problem.expert_weights.strides,
        **constants_of(config, "block_t", "block_h"),
    }
    arguments: Arguments = {
        "y_ptr": Operand(problem.dtype),
        "ids_ptr": problem.expert_ids,
        "weights_ptr": problem.expert_weights,
        "out_ptr": Operand(problem.dtype),
        "num_tokens": "i32",
    }
    return KernelSpec.of(
        "moe.combine", "moe_combine", constants, arguments, target=target,
        num_warps=config.num_warps, dependent=True,
    )  # fmt: skip


def combine_grid(problem: MoeProblem, config: CombineConfig, num_tokens: int) -> tuple[int, int]:
    return (cdiv(num_tokens, config.block_t), cdiv(problem.hidden, config.block_h))
