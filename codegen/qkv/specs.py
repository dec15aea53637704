"""The kernel specs of the `qkv_*` templates, and their grids: a problem with a choice of tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.qkv.heads import CacheStrides, HeadFinish, Norm, PageTable, Rope
from tilewright.codegen.qkv.problem import (
    EpilogueProblem,
    InputStrides,
    QkvProblem,
    TiledWeights,
    WeightStrides,
    fused_obstacle,
    heads_fit,
    swapped_obstacle,
    tiled_obstacle,
    tiled_weights,
)
from tilewright.codegen.spec import Constant, KernelSpec
from tilewright.codegen.targets import get_target

__all__ = [
    "ELEMENT_BYTES",
    "CacheStrides",
    "EpilogueConfig",
    "EpilogueProblem",
    "HeadFinish",
    "InputStrides",
    "Norm",
    "PageTable",
    "QkvProblem",
    "Rope",
    "SwappedConfig",
    "TiledConfig",
    "TiledWeights",
    "WeightStrides",
    "cdiv",
    "epilogue_grid",
    "epilogue_spec",
    "fused_obstacle",
    "heads_fit",
    "next_power_of_2",
    "slices_of_heads",
    "swapped_grid",
    "swapped_obstacle",
    "swapped_spec",
    "tiled_grid",
    "tiled_obstacle",
    "tiled_spec",
    "tiled_weights",
    "tiles_per_head",
]


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
    """`qkv_projection_swapped` and `qkv_quantized`: 2 * block_p weight rows on the M side, block_t
    tokens on N.

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
    finish = problem.finish
    if finish.norm_after_rope and config.pair_parts != 1:
        raise ValueError(
            f"epilogue_parts: a norm after the rotation needs whole heads, got {config}"
        )
    weights = tiled_weights(problem)
    constants: dict[str, Constant] = {
        **finish.constants(),
        "HIDDEN": problem.hidden,
        "X_STRIDE": problem.x_stride,
        "N_MAJOR": problem.weight_strides[0].column != 1,
        "WEIGHT_EXTENT": weights.extent,
        "WEIGHT_STRIDES": weights.strides,
        "HEAD_STEPS": weights.steps,
        "BLOCK_M": config.block_m,
        "HEADS_PER_TILE": config.heads_per_tile,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "EPILOGUE_PARTS": config.epilogue_parts,
        "FLATTEN": config.flatten,
        "WARP_SPECIALIZE": config.warp_specialize,
        "PAIRS_FIRST": config.pairs_first,
        "LAUNCH_PDL": get_target(target).has("dependent_launch"),
    }
    pointer = f"*{finish.dtype}"
    arguments: dict[str, str | None] = {
        "x_ptr": pointer,
        "weight_ptr": pointer,
        **finish.pointer_types(),
        **finish.count_types(),
        "second_distance": "i64",
        "third_distance": "i64",
        "q_place": "i32",
        "k_place": "i32",
        "v_place": "i32",
    }
    return kernel_spec(
        "qkv.projection", "qkv_projection", problem, constants, arguments, config, target
    )


def tiled_grid(problem: QkvProblem, config: TiledConfig, num_tokens: int, num_sms: int) -> int:
    tiles = cdiv(num_tokens, config.block_m) * (
        problem.finish.heads_in_all // config.heads_per_tile
    )
    return min(tiles, num_sms * config.programs_per_sm) if config.persistent else tiles


def tiles_per_head(problem: QkvProblem, config: SwappedConfig) -> int:
    return cdiv(problem.finish.pairs_per_head, config.block_p)


def slices_of_heads(problem: QkvProblem, config: SwappedConfig) -> int:
    """`tiles_per_head`; a ValueError where a norm would be cut."""
    finish, slices = problem.finish, tiles_per_head(problem, config)
    if finish.has_norm and slices != 1:
        raise ValueError(
            f"block_p: a norm needs whole heads of {finish.pairs_per_head} pairs in a tile, "
            f"got {config.block_p}"
        )
    return slices


def swapped_spec(problem: QkvProblem, config: SwappedConfig, target: str) -> KernelSpec:
    finish = problem.finish
    slices = slices_of_heads(problem, config)
    constants: dict[str, Constant] = {
        **finish.constants(),
        "HIDDEN": problem.hidden,
        "X_STRIDE": problem.x_stride,
        "BLOCK_P": config.block_p,
        "TILES_PER_HEAD": slices,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        "LAUNCH_PDL": get_target(target).has("dependent_launch"),
    }
    for letter, strides in zip("QKV", problem.weight_strides, strict=True):
        constants[f"{letter}_WEIGHT_STRIDES"] = (strides or problem.weight_strides[1]).all
    pointer = f"*{finish.dtype}"
    arguments: dict[str, str | None] = {
        "x_ptr": pointer,
        "q_weight_ptr": pointer,
        "k_weight_ptr": pointer,
        "v_weight_ptr": pointer if problem.weight_strides[2] else None,
        **finish.pointer_types(),
        "workspace_ptr": "*fp32" if config.split_k > 1 else None,
        "counters_ptr": "*i32" if config.split_k > 1 else None,
        **finish.count_types(),
    }
    return kernel_spec(
        "qkv.projection", "qkv_projection_swapped", problem, constants, arguments, config, target
    )


def swapped_grid(problem: QkvProblem, config: SwappedConfig, num_tokens: int) -> tuple[int, int]:
    row_tiles = problem.finish.heads_in_all * tiles_per_head(problem, config)
    return row_tiles * config.split_k, cdiv(num_tokens, config.block_t)


def epilogue_spec(problem: EpilogueProblem, config: EpilogueConfig, target: str) -> KernelSpec:
    finish = problem.finish
    constants: dict[str, Constant] = {
        **finish.constants(),
        "BLOCK_T": config.block_t,
        "HEADS_PER_TILE": config.heads_per_tile,
        "BLOCK_P": next_power_of_2(finish.pairs_per_head),
        "WHOLE_ROWS": finish.row_norm,
    }
    inputs = {"Q": problem.q, "K": problem.k, "V": problem.v}
    arguments: dict[str, str | None] = {}
    for letter, strides in inputs.items():
        arguments[f"{letter.lower()}_ptr"] = f"*{problem.input_dtype}" if strides else None
        constants[f"{letter}_IN_STRIDES"] = (strides or problem.k).all
    arguments |= {**finish.pointer_types(), **finish.count_types()}
    return kernel_spec(
        "qkv.epilogue", "qkv_epilogue", problem, constants, arguments, config, target
    )


def epilogue_grid(
    problem: EpilogueProblem, config: EpilogueConfig, num_tokens: int
) -> tuple[int, int]:
    finish = problem.finish
    programs = finish.kinds if finish.row_norm else finish.heads_in_all // config.heads_per_tile
    return cdiv(num_tokens, config.block_t), programs


def kernel_spec(
    template: str,
    kernel: str,
    problem: QkvProblem | EpilogueProblem,
    constants: Mapping[str, Constant],
    arguments: Mapping[str, str | None],
    config: TiledConfig | SwappedConfig | EpilogueConfig,
    target: str,
) -> KernelSpec:
    """Absent tensors and static counts become constants, the rest is the signature."""
    fixed = dict(constants)
    known = {
        "num_tokens": problem.num_tokens,
        "rope_tokens": problem.rope_tokens,
        "sequence_tokens": problem.sequence_tokens,
    }
    signature: dict[str, str] = {}
    for name, type_name in arguments.items():
        if type_name is None:
            fixed[name] = None
        elif known.get(name) is not None:
            fixed[name] = known[name]
        else:
            signature[name] = type_name
    pointers = [name for name, type_name in signature.items() if type_name.startswith("*")]
    return KernelSpec.make(
        template,
        kernel,
        fixed,
        signature,
        divisible16=[name for name in pointers if name not in problem.unaligned],
        ranges={
            name: (1, 2**31 - 1) for name in ("sequence_tokens", "rope_tokens") if name in signature
        },
        num_warps=config.num_warps,
        num_stages=getattr(config, "num_stages", 1),
        target=target,
        launch_pdl=bool(constants.get("LAUNCH_PDL", False)),
    )
