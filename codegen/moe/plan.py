"""Plans of a mixture of experts: the kernels for the average number of rows of an expert.

The plan depends on the average number of rows of an expert. With few rows, the GEMMs take as long
as reading the weights of the chosen experts takes. Operands are then swapped, so that tiles of
tokens can be small. With many rows, the tensor cores limit the GEMMs, and tiles are as large as
registers and shared memory allow. Each limit below is the number of rows at which the two choices
that it separates took equal time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.codes import codes_obstacle
from tilewright.codegen.grouped.plan import STREAMED_K, scaled_gemm_config, token_tile
from tilewright.codegen.grouped.tiles import (
    SCALED_K,
    CodesConfig,
    DequantizeConfig,
    GemmConfig,
    ScaledConfig,
)
from tilewright.codegen.moe.kernels import CombineConfig, OrderConfig, order_config
from tilewright.codegen.moe.problem import (
    MoeProblem,
    decodable,
    decoded_problem,
    down_problem,
    up_problem,
)
from tilewright.codegen.targets import Target

# With at most this many rows per expert, weights are on the tensor core's M side.
SWAPPED_ROWS = 16
# For chips with tensor memory: the largest number of rows per expert for which operands are
# swapped.
STREAMED_BY_TENSOR_MEMORY = 48
# For chips with tensor memory: the smallest number of rows per expert for tiles of 128 rows.
WIDE_BY_TENSOR_MEMORY = 192
# Maps a format to the number of rows per expert from which weights are dequantised before the
# GEMMs. At these numbers, dequantising before the GEMMs and inside the GEMMs took equal time on an
# H200.
DECODED_ROWS = {"fp8": 224, "int4": 224, "nvfp4": 256, "mxfp4": 256}
# The smallest number of rows per expert for tiles of 128 rows.
WIDE_ROWS = 96
# The number of tiles of 64 columns that keep a GPU's memory busy.
STREAMING_TILES = 128
# The largest number of inner columns for which the down kernel has so few steps that shorter tiles
# are faster.
SHORT_INNER = 768
# The largest number of rows per expert for which each warp multiplies its own columns, in tiles of
# eight tokens.
SPLIT_ROWS = 4
# The number of rows of a tile if warps are specialised.
SPECIALISED_ROWS = 128
# The tiles with which `_fit` checks whether both GEMMs can read their weights as words.
WORDS = CodesConfig(16, 64, STREAMED_K, 4, 4)
_swapped = partial(GemmConfig, swapped=True)


@dataclass(frozen=True)
class MoePlan:
    """The tiles of all kernels of one call.

    Attributes:
        order: The tiles of the sort.
        up, down: The tiles of the two GEMMs.
        combine: The tiles of the kernel that adds the rows of each token.
        reason: A description for reports.
        decode: The tiles of the kernel that dequantises all weights before dense GEMMs; None if the
            GEMMs dequantise them.
    """

    order: OrderConfig
    up: GemmConfig
    down: GemmConfig
    combine: CombineConfig
    reason: str
    decode: DequantizeConfig | None = None

    @property
    def by_route(self) -> bool:
        """Whether both GEMMs use every route (a pair of a token and an expert that it chose) as a
        row block of its own. Nothing is sorted in this case."""
        return all(isinstance(c, CodesConfig) and c.by_route for c in (self.up, self.down))


def plan_moe(problem: MoeProblem, num_tokens: int, target: Target) -> MoePlan:
    """Returns the kernels for `num_tokens` tokens on a target."""
    routes = num_tokens * problem.num_slots
    rows = cdiv(routes, problem.num_experts)
    decode = None
    if decodable(problem) and rows >= DECODED_ROWS[problem.format]:
        decode, problem = DequantizeConfig(), decoded_problem(problem)
    if problem.coded_rows:
        up, down = _by_codes(problem, rows, target)
    elif target.tmem_columns:
        up, down = _in_tensor_memory(problem, rows, routes)
    elif _fit(problem, WORDS, WORDS):
        up, down = _by_words(problem, rows, routes)
    else:
        up, down = _numbers(problem, rows, routes)
    how = ", weights decoded first" if decode else ""
    reason = f"{rows} rows per expert: up {up}, down {down}{how}"
    order = order_config(problem, routes)
    if up.warp_specialize or down.warp_specialize:
        order = replace(order, row_block=SPECIALISED_ROWS)
    return MoePlan(order, up, down, _combine(problem, num_tokens), reason, decode)


def _numbers(problem: MoeProblem, rows: int, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """Returns the tiles of GEMMs that load weights by TMA.

    For few rows, two or three programs on an SM have enough bytes in flight, and each hides the
    epilogues of the others. For many rows, tiles are as large as possible. If weights are
    quantised, tiles are smaller, so that there are registers left to unpack the codes. Tiles are
    smaller still if x is fp16 and the weights need the range of bf16, because each number of x then
    takes two columns (`add_decoded`).
    """
    dense = problem.format == "dense"
    if rows <= SWAPPED_ROWS:
        block_m = token_tile(rows)
        if not dense:
            up = _swapped(block_m, 64, 128, 4, 4, 3)
            return up, _swapped(block_m, 128, 128, 4, 3, 2)
        if _few_tiles(problem, routes):
            return _swapped(16, 32, 128, 4, 4, 2), _swapped(16, 64, 128, 4, 3, 2)
        up = _swapped(block_m, 64, 128, 4, 3, 2)
        if routes * cdiv(problem.hidden, 128) < STREAMING_TILES:
            return up, _swapped(block_m, 64, 128, 4, 4, 2)
        if problem.inner <= SHORT_INNER:
            return up, _swapped(block_m, 64, 128, 4, 3, 2 if problem.inner <= 512 else 3)
        return up, _swapped(block_m, 128, 128, 4, 3, 2)
    if rows < WIDE_ROWS or not problem.gate.fits(problem.dtype):
        return GemmConfig(64, 64, 64, 4, 4, 2), GemmConfig(64, 128, 64, 4, 4, 2)
    up = GemmConfig(128, 128, 64, 8, 4)
    if not dense:
        return up, GemmConfig(128, 128, 64, 8, 3)
    return up, GemmConfig(128, 256, 64, 8, 4, flatten=True)


def _by_words(problem: MoeProblem, rows: int, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """Returns the tiles of GEMMs that read 4-bit codes as words. In these GEMMs, unpacking the
    codes takes longer than reading them."""
    block_m = token_tile(rows)
    if rows <= SPLIT_ROWS and problem.format != "mxfp4":
        up, down = _split_codes(problem, routes)
        whole = problem.hidden % up.block_k == 0 and problem.inner % down.block_k == 0
        if whole and _fit(problem, up, down):
            return up, down
    if block_m == 16:
        return _codes_of_few(problem, routes)
    if rows < WIDE_ROWS:
        up = CodesConfig(block_m, 64, STREAMED_K, 4, 3, 2)
        return up, CodesConfig(block_m, 128, STREAMED_K, 4, 3, 2)
    if problem.format == "nvfp4":
        return CodesConfig(128, 128, 64, 8, 3), CodesConfig(128, 256, 64, 8, 3)
    return CodesConfig(128, 64, STREAMED_K, 8, 3), CodesConfig(128, 128, STREAMED_K, 8, 3)


def _split_codes(problem: MoeProblem, routes: int) -> tuple[CodesConfig, CodesConfig]:
    """Returns tiles for the older tensor-core instruction (mma.sync), in which each warp multiplies
    its own columns. The registers limit how many weights are in flight, and small programs use
    registers best. With one token, every route is a row block of its own."""
    up = CodesConfig(8, 32, 256, 2, 3, 6, split=2)
    if routes == problem.num_slots:
        if problem.inner <= 2 * SHORT_INNER:
            up = CodesConfig(8, 16, 256, 2, 4, 8, split=2, by_route=True)
            return up, CodesConfig(8, 16, 256, 2, 2, 8, split=2, by_route=True)
        return replace(up, by_route=True), CodesConfig(8, 32, 1024, 8, 3, 2, split=8, by_route=True)
    if problem.inner <= 2 * SHORT_INNER:
        ordered = problem.inner % STREAMED_K == 0
        return up, CodesConfig(8, 64, 256, 2, 3, 6, split=2, ordered=ordered)
    return up, CodesConfig(8, 32, 512, 4, 4, 4, split=4)


def _codes_of_few(problem: MoeProblem, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """Returns the tiles of quantised weights for few rows. With `ordered`, the first GEMM stores
    the columns of hidden rows in the order in which the second GEMM needs them. For longer tiles,
    this order takes more time than permuting the columns later."""
    ordered = problem.inner % STREAMED_K == 0
    few = CodesConfig(16, 32, 256, 4, 4, 2, part_k=256)
    few_down = CodesConfig(16, 64, 256, 4, 4, 2, part_k=256, ordered=True)
    if ordered and _few_tiles(problem, routes) and _fit(problem, few, few_down):
        return few, few_down
    # If `ordered` is False, the rows of the weights may begin anywhere in a sector of memory.
    up = CodesConfig(16, 64, STREAMED_K, 4, 4, 3, swapped=False)
    down = CodesConfig(16, 64, 256, 4, 3, 3, swapped=False, part_k=256)
    if not ordered and problem.format != "int4" and _fit(problem, up, down):
        return up, down
    up = CodesConfig(16, 64, STREAMED_K, 4, 4, 3)
    if problem.inner > 2 * SHORT_INNER:
        return up, CodesConfig(16, 64, STREAMED_K, 4, 4, 4, ordered=ordered)
    return up, CodesConfig(16, 128, STREAMED_K, 4, 4, 3, ordered=ordered)


def _fit(problem: MoeProblem, up: CodesConfig, down: CodesConfig) -> bool:
    """Whether GEMMs with these tiles can read the codes as they are stored."""
    if problem.format == "int4" and up.part_k != STREAMED_K:
        return False  # a part of int4 has the columns of one scale, whatever the tiles are
    gate_up = [problem.gate, problem.up] if problem.up else [problem.gate]
    weights = [replace(problem.gate_up, scale=weight.scale) for weight in gate_up]
    gemms = [(up_problem(problem, weight), up) for weight in weights]
    gemms.append((down_problem(problem), down))
    return all(codes_obstacle(*gemm) is None for gemm in gemms)


def _few_tiles(problem: MoeProblem, routes: int) -> bool:
    """Whether some multiprocessors would have no work if tiles had 64 columns."""
    return routes * cdiv(problem.inner, 64) < 2 * STREAMING_TILES


def _by_codes(problem: MoeProblem, rows: int, target: Target) -> tuple[GemmConfig, GemmConfig]:
    """Returns the tiles for e4m3 rows and e4m3 weights."""
    down = scaled_gemm_config(rows, target)
    if rows <= SWAPPED_ROWS:
        return ScaledConfig(16, 128, SCALED_K, 4, 3, 2, swapped=True), down
    if target.tmem_columns:
        # Wider tiles spill registers, because a product has to be copied from tensor memory before
        # it is scaled.
        wide = rows >= WIDE_ROWS
        return ScaledConfig(128 if wide else 64, 64, SCALED_K, 8 if wide else 4, 4), down
    if rows < WIDE_ROWS:
        return ScaledConfig(64, 128, SCALED_K, 4, 2, 2, codes=True), down
    return ScaledConfig(128, 128, SCALED_K, 8, 4, codes=True), down


def _in_tensor_memory(problem: MoeProblem, rows: int, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """Returns the largest tiles for which all supported releases of Triton make code that does not
    spill registers and that fits tensor memory.

    Warps are not specialised in two cases. If one operand is loaded by pointers and another by TMA,
    as in the up kernel, the results would be wrong (Triton issue 8311). If codes are unpacked,
    registers would be spilled.
    """
    if rows <= STREAMED_BY_TENSOR_MEMORY:
        # A tile covers all rows of an expert, within the limits of a tile of tokens.
        block_m = min(max(next_power_of_2(rows), 16), 64)
        few = _few_tiles(problem, routes)
        # Two programs on a multiprocessor hide each other's epilogues. If few experts are chosen,
        # tiles are narrower, so that all multiprocessors read weights.
        up = _swapped(block_m, 32 if few else 64, 128, 4, 4 if few else 3, 2)
        if few:
            return up, _swapped(block_m, 64, 128, 4, 3, 2)
        if problem.format == "dense":
            return up, _swapped(block_m, 128, 128, 8, 4)
        # Codes take fewer bytes, so more stages are in flight. Two of these tiles fit an SM.
        return up, _swapped(block_m, 128, 128, 4, 6)
    if rows < WIDE_BY_TENSOR_MEMORY:
        return GemmConfig(64, 64, 64, 4, 4), GemmConfig(64, 128, 64, 4, 4)
    up = GemmConfig(128, 64, 64, 8, 4)
    if problem.format != "dense":
        return up, GemmConfig(128, 128, 64, 8, 4)
    down = GemmConfig(SPECIALISED_ROWS, 256, 64, 8, 3, flatten=True, warp_specialize=True)
    return up, down


def _combine(problem: MoeProblem, num_tokens: int) -> CombineConfig:
    few = num_tokens < 128
    width = min(next_power_of_2(problem.hidden), 1024 if few else 512)
    return CombineConfig(block_t=1 if few else 4, block_h=width)
