"""The kernel specs of the `qkv_*` templates, and their grids: a problem with a choice of tiles."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.operand import Operand, first_strides
from tilewright.codegen.qkv.problem import EpilogueProblem, QkvProblem, tiled_weights
from tilewright.codegen.row_norm import squares_a_row
from tilewright.codegen.spec import Constant, KernelSpec, constants_of

# Counts that kernels build on: each is at least 1.
COUNTS = ("sequence_tokens", "rope_tokens")


@dataclass(frozen=True)
class TiledConfig:
    """`qkv_projection`: tokens on the M side.

    epilogue_parts: 2 finishes a tile in two goes, which halves the registers it takes. The parts
    are heads, then slices of the pairs; with pairs_first slices of the pairs of all heads, which
    reads each part of the rope table once.
    persistent: programs_per_sm programs per SM walk all tiles, else there is one per tile.
    flatten: the loads of the next tile start before the epilogue of the last.
    """

    block_m: int
    heads_per_tile: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    epilogue_parts: int = 1
    persistent: bool = False
    programs_per_sm: int = 1
    flatten: bool = False
    warp_specialize: bool = False
    pairs_first: bool = False

    @property
    def pair_parts(self) -> int:
        """Into how many slices the pairs of a head fall."""
        heads = 1 if self.pairs_first else min(self.epilogue_parts, self.heads_per_tile)
        return self.epilogue_parts // heads

    def __str__(self) -> str:
        marks = (
            (f"p{self.programs_per_sm}" if self.persistent else "")
            + ("f" * self.flatten)
            + ("w" * self.warp_specialize)
            + ("q" * self.pairs_first)
        )
        return (
            f"tiled {self.block_m}x{self.heads_per_tile}h x{self.block_k} "
            f"w{self.num_warps} s{self.num_stages} g{self.group_m} e{self.epilogue_parts}"
            f"{' ' + marks if marks else ''}"
        )


@dataclass(frozen=True)
class SwappedConfig:
    """`qkv_projection_swapped`: 2 * block_p weight rows on the M side, block_t tokens on N.

    ordered_x: x is put into the order of the weight's codes by a kernel of its own, before.
    """

    block_p: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    ordered_x: bool = False

    def __str__(self) -> str:
        return (
            f"swapped {2 * self.block_p}x{self.block_t}x{self.block_k} /{self.split_k} "
            f"w{self.num_warps} s{self.num_stages}{' ordered' if self.ordered_x else ''}"
        )


@dataclass(frozen=True)
class EpilogueConfig:
    """`qkv_epilogue`: block_t tokens by heads_per_tile heads per program.

    Where a norm spans a row, a program has all heads of q, k or v: heads_per_tile covers them.
    """

    block_t: int
    heads_per_tile: int
    num_warps: int = 4

    def __str__(self) -> str:
        return f"epilogue {self.block_t}x{self.heads_per_tile}h w{self.num_warps}"


def tiled_spec(problem: QkvProblem, config: TiledConfig, target: str) -> KernelSpec:
    heads, weights = problem.epilogue, tiled_weights(problem)
    if heads.norm_after_rope and config.pair_parts != 1:
        raise ValueError(
            f"epilogue_parts: a norm after the rotation needs whole heads, got {config}"
        )
    return KernelSpec.of(
        "qkv.projection",
        "qkv_projection",
        {
            **heads.constants(),
            "HIDDEN": problem.hidden,
            "X_STRIDE": problem.x.strides[0],
            "N_MAJOR": not problem.k_major,
            "WEIGHT_EXTENT": weights.extent,
            "WEIGHT_STRIDES": weights.strides,
            "HEAD_STEPS": weights.steps,
            **constants_of(config, "block_m", "heads_per_tile", "block_k", "group_m"),
            **constants_of(config, "epilogue_parts", "flatten", "warp_specialize", "pairs_first"),
        },
        {
            "x_ptr": problem.x,
            "weight_ptr": problem.weights[0],
            **heads.pointers(),
            **heads.counts(),
            "second_distance": "i64",
            "third_distance": "i64",
            **dict.fromkeys(("q_place", "k_place", "v_place"), "i32"),
            **heads.last_pointers(),
        },
        ranges=COUNTS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
        dependent=True,
    )


def tiled_grid(problem: QkvProblem, config: TiledConfig, num_tokens: int, num_sms: int) -> int:
    tiles = cdiv(num_tokens, config.block_m) * (
        problem.epilogue.heads_in_all // config.heads_per_tile
    )
    return min(tiles, num_sms * config.programs_per_sm) if config.persistent else tiles


def tiles_per_head(problem: QkvProblem, config: SwappedConfig) -> int:
    return cdiv(problem.epilogue.pairs_per_head, config.block_p)


def slices_of_heads(problem: QkvProblem, config: SwappedConfig) -> int:
    """`tiles_per_head`; a ValueError where a norm would be cut."""
    heads, slices = problem.epilogue, tiles_per_head(problem, config)
    if heads.has_norm and slices != 1:
        raise ValueError(
            f"block_p: a norm needs whole heads of {heads.pairs_per_head} pairs in a tile, "
            f"got {config.block_p}"
        )
    return slices


WEIGHT_NAMES = ("q_weight_ptr", "k_weight_ptr", "v_weight_ptr")
# Columns of a weight row that are asked for while the kernel before this one ends: where x is
# normed here, that is one of ours.
PREFETCHED = 256


def _input_norm_constants(problem: QkvProblem) -> dict[str, Constant]:
    norm = problem.input_norm
    if norm is None:
        return {}
    layer: dict[str, Constant] = {
        "INPUT_LAYER_ROW": norm.layer_row(problem.hidden),
        "INPUT_NORM_BIAS_STRIDE": first_strides(norm.bias)[0],
    }
    return {
        **({"INPUT_NORM": True} if norm.follows else layer),
        "INPUT_NORM_EPS": norm.eps,
        "INPUT_NORM_OFFSET": norm.offset,
        "INPUT_NORM_STRIDE": first_strides(norm.weight)[0],
        "PREFETCH": PREFETCHED if problem.k_major else 0,
        "LETS_IN": True,
    }


def _swapped_constants(problem: QkvProblem, config: SwappedConfig) -> dict[str, Constant]:
    q, k, v = problem.weights
    return {
        **problem.epilogue.constants(),
        "HIDDEN": problem.hidden,
        "X_STRIDE": problem.x.strides[0],
        "Q_WEIGHT_STRIDES": q.strides,
        "K_WEIGHT_STRIDES": k.strides,
        "V_WEIGHT_STRIDES": (v or k).strides,
        **constants_of(config, "block_p", "block_t", "block_k", "split_k"),
        "TILES_PER_HEAD": slices_of_heads(problem, config),
    }


def swapped_spec(
    problem: QkvProblem,
    config: SwappedConfig,
    target: str,
    codes: dict[str, Constant] | None = None,
) -> KernelSpec:
    """`qkv_projection_swapped`; codes: more constants, of weights of codes. A norm over slices of a
    head is a ValueError."""
    q, norm, split = problem.quantization, problem.input_norm, config.split_k > 1
    scales, zeros = (q.scales, q.zeros) if q else ((None,) * 3, (None,) * 3)
    return KernelSpec.of(
        "qkv.projection",
        "qkv_projection_swapped",
        {
            **_swapped_constants(problem, config),
            **_input_norm_constants(problem),
            **(codes or {}),
        },
        {
            "x_ptr": problem.x,
            "x_scale_ptr": q.x_scale if q else None,
            **dict(zip(WEIGHT_NAMES, problem.weights, strict=True)),
            **{f"{x}_scale_ptr": scale for x, scale in zip("qkv", scales, strict=True)},
            **{f"{x}_zero_ptr": zero for x, zero in zip("qkv", zeros, strict=True)},
            **problem.epilogue.pointers(),
            "workspace_ptr": Operand("fp32") if split else None,
            "counters_ptr": Operand("i32") if split else None,
            **problem.epilogue.counts(),
            **({"input_norm_weight_ptr": norm.weight} if norm else {}),
            **problem.epilogue.last_pointers(),
            **({"input_norm_bias_ptr": norm.bias} if norm and norm.bias else {}),
        },
        ranges=COUNTS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
        dependent=q is None,
    )


def workspace_elements(problem: QkvProblem, config: SwappedConfig) -> int:
    """Numbers that the parts of one tile take."""
    sums = 2 * config.block_p + squares_a_row(problem.input_norm)
    return config.split_k * sums * config.block_t


def swapped_grid(problem: QkvProblem, config: SwappedConfig, num_tokens: int) -> tuple[int, int]:
    row_tiles = problem.epilogue.heads_in_all * tiles_per_head(problem, config)
    return row_tiles * config.split_k, cdiv(num_tokens, config.block_t)


def epilogue_spec(problem: EpilogueProblem, config: EpilogueConfig, target: str) -> KernelSpec:
    heads = problem.epilogue
    inputs = {"q": problem.q, "k": problem.k, "v": problem.v}
    return KernelSpec.of(
        "qkv.epilogue",
        "qkv_epilogue",
        {
            **heads.constants(),
            **{f"{x.upper()}_IN_STRIDES": (t or problem.k).strides for x, t in inputs.items()},
            **constants_of(config, "block_t", "heads_per_tile"),
            "BLOCK_P": next_power_of_2(heads.pairs_per_head),
            "WHOLE_ROWS": heads.row_norm,
        },
        {
            **{f"{x}_ptr": t for x, t in inputs.items()},
            **heads.pointers(),
            **heads.counts(),
            **heads.last_pointers(),
        },
        ranges=COUNTS,
        num_warps=config.num_warps,
        num_stages=1,
        target=target,
    )


def epilogue_grid(
    problem: EpilogueProblem, config: EpilogueConfig, num_tokens: int
) -> tuple[int, int]:
    heads = problem.epilogue
    programs = heads.kinds if heads.row_norm else heads.heads_in_all // config.heads_per_tile
    return cdiv(num_tokens, config.block_t), programs
