"""Which kernels a mixture of experts runs: by the rows that an expert gets on average.

Few rows per expert: the time is that of streaming the weights of the experts in use, and operands
are swapped so that a token tile may be small. Many: tensor cores bound it, and tiles are as large
as registers and shared memory allow. The bounds in between are where the two took equal time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.codes_kernels import CodesConfig
from tilewright.codegen.grouped.kernels import DequantizeConfig, GemmConfig
from tilewright.codegen.grouped.plan import scaled_gemm_config, token_tile
from tilewright.codegen.grouped.scaled_kernels import scaled_config
from tilewright.codegen.moe.codes_plan import (
    SHORT_INNER,
    STREAMING_TILES,
    WIDE_ROWS,
    codes_configs,
    few_tiles,
    streams_codes,
)
from tilewright.codegen.moe.decode import decodable, decoded_problem
from tilewright.codegen.moe.kernels import CombineConfig, OrderConfig, order_config
from tilewright.codegen.moe.problem import MoeProblem
from tilewright.codegen.targets import Target

# Rows per expert up to which weights stand on the tensor core's M side.
SWAPPED_ROWS = 16
# The first two on chips with tensor memory.
STREAMED_BY_TENSOR_MEMORY = 48
WIDE_BY_TENSOR_MEMORY = 192
# Rows per expert from which weights are dequantised before the GEMMs: on an H200 as fast as in
# them.
DECODED_ROWS = {"fp8": 224, "int4": 224, "nvfp4": 256, "mxfp4": 256}
# Rows of a tile whose warps are specialised.
SPECIALISED_ROWS = 128


@dataclass(frozen=True)
class MoePlan:
    """The configs of one call, and why. decode: of the kernel that dequantises all weights before
    dense GEMMs; None: the GEMMs do."""

    order: OrderConfig
    up: GemmConfig
    down: GemmConfig
    combine: CombineConfig
    reason: str
    decode: DequantizeConfig | None = None

    @property
    def by_route(self) -> bool:
        """Both GEMMs take every route by itself: nothing is sorted."""
        return all(isinstance(c, CodesConfig) and c.by_route for c in (self.up, self.down))


def plan_moe(problem: MoeProblem, num_tokens: int, target: Target) -> MoePlan:
    """The kernels for `num_tokens` tokens on a target."""
    routes = num_tokens * problem.num_slots
    rows = cdiv(routes, problem.num_experts)
    decode = None
    if decodable(problem) and rows >= DECODED_ROWS[problem.format]:
        decode, problem = DequantizeConfig(), decoded_problem(problem)
    if problem.coded_rows:
        up, down = _by_codes(problem, rows, target)
    elif target.tmem_columns:
        up, down = _in_tensor_memory(problem, rows, routes)
    elif streams_codes(problem):
        up, down = codes_configs(problem, rows, routes)
    else:
        up, down = _numbers(problem, rows, routes)
    how = ", weights decoded before them" if decode else ""
    reason = f"{rows} rows per expert: up {up}, down {down}{how}"
    order = order_config(problem, routes)
    if up.warp_specialize or down.warp_specialize:
        order = replace(order, row_block=SPECIALISED_ROWS)
    return MoePlan(order, up, down, _combine(problem, num_tokens), reason, decode)


def _numbers(problem: MoeProblem, rows: int, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """Weights by TMA. Few rows: as many bytes in flight as an SM needs, by two or three programs
    that hide each other's ends. Many: the largest tiles, of codes those that leave registers to
    unpack them."""
    dense = problem.format == "dense"
    if rows <= SWAPPED_ROWS:
        block_m = token_tile(rows)
        if not dense:
            up = GemmConfig(block_m, 64, 128, True, 4, 4, 3)
            return up, GemmConfig(block_m, 128, 128, True, 4, 3, 2)
        if few_tiles(problem, routes):
            return GemmConfig(16, 32, 128, True, 4, 4, 2), GemmConfig(16, 64, 128, True, 4, 3, 2)
        up = GemmConfig(block_m, 64, 128, True, 4, 3, 2)
        if routes * cdiv(problem.hidden, 128) < STREAMING_TILES:
            return up, GemmConfig(block_m, 64, 128, True, 4, 4, 2)
        if problem.inner <= SHORT_INNER:
            return up, GemmConfig(block_m, 64, 128, True, 4, 3, 2 if problem.inner <= 512 else 3)
        return up, GemmConfig(block_m, 128, 128, True, 4, 3, 2)
    if rows < WIDE_ROWS:
        return GemmConfig(64, 64, 64, False, 4, 4, 2), GemmConfig(64, 128, 64, False, 4, 4, 2)
    up = GemmConfig(128, 128, 64, False, 8, 4)
    if not dense:
        return up, GemmConfig(128, 128, 64, False, 8, 3)
    return up, GemmConfig(128, 256, 64, False, 8, 4, flatten=True)


def _by_codes(problem: MoeProblem, rows: int, target: Target) -> tuple[GemmConfig, GemmConfig]:
    """Rows and weights both e4m3."""
    down = scaled_gemm_config(rows, target)
    if rows <= SWAPPED_ROWS:
        return scaled_config(16, 128, 4, 3, 2, swapped=True), down
    if target.tmem_columns:
        # Wider tiles spill: a product has to leave tensor memory before it is scaled.
        return scaled_config(
            64 if rows < WIDE_ROWS else 128, 64, 4 if rows < WIDE_ROWS else 8, 4
        ), down
    if rows < WIDE_ROWS:
        return scaled_config(64, 128, 4, 2, 2, codes=True), down
    return scaled_config(128, 128, 8, 4, codes=True), down


def _in_tensor_memory(problem: MoeProblem, rows: int, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """The largest tiles whose machine code neither spills nor asks for more tensor memory than
    there is, with every compiler release.

    Warps are not specialised where an operand comes by pointers beside one that comes by TMA, as in
    the up kernel (Triton issue 8311: wrong results), nor where codes are unpacked (spills).
    """
    if rows <= STREAMED_BY_TENSOR_MEMORY:
        # A tile of one expert is as long as its rows, within what a token tile may be.
        block_m = min(max(next_power_of_2(rows), 16), 64)
        few = few_tiles(problem, routes)
        # Two programs on a multiprocessor hide each other's ends; narrower tiles where few experts
        # are in use, so that all multiprocessors stream.
        up = GemmConfig(block_m, 32 if few else 64, 128, True, 4, 4 if few else 3, 2)
        if few:
            return up, GemmConfig(block_m, 64, 128, True, 4, 3, 2)
        if problem.format == "dense":
            return up, GemmConfig(block_m, 128, 128, True, 8, 4)
        # Codes fill fewer bytes: more of them in flight, in blocks that fit an SM twice.
        return up, GemmConfig(block_m, 128, 128, True, 4, 6)
    if rows < WIDE_BY_TENSOR_MEMORY:
        return GemmConfig(64, 64, 64, False, 4, 4), GemmConfig(64, 128, 64, False, 4, 4)
    up = GemmConfig(128, 64, 64, False, 8, 4)
    if problem.format != "dense":
        return up, GemmConfig(128, 128, 64, False, 8, 4)
    down = GemmConfig(SPECIALISED_ROWS, 256, 64, False, 8, 3, flatten=True, warp_specialize=True)
    return up, down


def _combine(problem: MoeProblem, num_tokens: int) -> CombineConfig:
    few = num_tokens < 128
    width = min(next_power_of_2(problem.hidden), 1024 if few else 512)
    return CombineConfig(block_t=1 if few else 4, block_h=width)
