"""QKV problems as plain data, and the kernel specs of the `qkv_*` templates for them.

Nothing here touches torch or a GPU: a problem is what is static about one call site (dims,
strides, dtypes, cache geometry), a config is a choice of tiles, and the two give a KernelSpec and
a launch grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.qkv_heads import (
    ELEMENT_BYTES,
    CacheStrides,
    HeadFinish,
    Norm,
    PageTable,
    Rope,
    cdiv,
    next_power_of_2,
)
from tilewright.codegen.quantization import Quantization
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
    "WeightStrides",
    "cdiv",
    "epilogue_grid",
    "epilogue_spec",
    "next_power_of_2",
    "swapped_grid",
    "swapped_obstacle",
    "swapped_spec",
    "tiled_grid",
    "tiled_obstacle",
    "tiled_spec",
    "tiles_per_head",
]


@dataclass(frozen=True)
class WeightStrides:
    """Strides of a weight [H, D, K], or [H / G, G, D, K] where heads lie in groups; in elements.

    column 1: K is the contiguous dim (k-major); else row is 1 (n-major).
    """

    head: int
    row: int
    column: int = 1
    group: int = 0

    @property
    def all(self) -> tuple[int, int, int, int]:
        return self.group, self.head, self.row, self.column


@dataclass(frozen=True)
class QkvProblem:
    """One `fused_qkv_paged` call site.

    num_tokens: T where it is a constant of the graph, with rope_tokens (rows of the tables) and
    sequence_tokens (tokens per page for per-sequence slots); else None, and the counts come at
    run time. weight_strides: of q, k and v, None where there is no v.
    unaligned: names of pointer parameters that are not aligned to 16 bytes.
    one_descriptor: the three weights are near enough for one TMA descriptor (strides below 2**40
    bytes). quantization: of weights that are codes; their strides then count stored words.
    """

    hidden: int
    x_stride: int
    weight_strides: tuple[WeightStrides, WeightStrides, WeightStrides | None]
    finish: HeadFinish
    num_tokens: int | None = None
    rope_tokens: int | None = None
    sequence_tokens: int | None = None
    unaligned: tuple[str, ...] = ()
    one_descriptor: bool = True
    quantization: Quantization | None = None

    @property
    def num_rows(self) -> int:
        """Weight rows of q, k and v together."""
        return self.finish.heads_in_all * self.finish.head_dim

    def bytes_moved(self, num_tokens: int) -> int:
        """Least bytes of global memory: weights and x read once, q and the slots written once."""
        size = ELEMENT_BYTES[self.finish.dtype]
        per_token = self.hidden + self.num_rows
        return size * (self.hidden * self.num_rows + num_tokens * per_token)


@dataclass(frozen=True)
class InputStrides:
    """Strides (token, head, dim) of a [T, H, D] input, in elements; group where heads have one."""

    token: int
    head: int
    dim: int
    group: int = 0

    @property
    def all(self) -> tuple[int, int, int, int]:
        return self.token, self.group, self.head, self.dim


@dataclass(frozen=True)
class EpilogueProblem:
    """Finishing q, k, v that already exist; q None where finish has no q, v likewise."""

    q: InputStrides | None
    k: InputStrides
    v: InputStrides | None
    finish: HeadFinish
    input_dtype: str
    num_tokens: int | None = None
    rope_tokens: int | None = None
    sequence_tokens: int | None = None
    unaligned: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class TiledWeights:
    """How one TMA descriptor reaches the heads of all three weights.

    strides: (unit, row) with heads at multiples of unit, or (column,) of n-major weights, where
    heads begin at any element. steps: (q's group, q's head, k's head, v's head), and extent, how
    far they reach, count those. adjacent: several heads may be loaded together.
    """

    strides: tuple[int, ...]
    steps: tuple[int, int, int, int]
    extent: int
    adjacent: bool


def tiled_weights(problem: QkvProblem) -> TiledWeights:
    """The placement of a problem whose weights agree in row and column strides."""
    finish = problem.finish
    q, k, v = problem.weight_strides
    v = v or k
    n_major, in_group = q.column != 1, finish.group or finish.num_heads
    groups, kv_heads = finish.num_heads // in_group, finish.num_kv_heads
    # The step along an axis of one element has no meaning: any other will do.
    whole = 1 if n_major else q.row * finish.head_dim
    q_head = q.head if in_group > 1 else k.head if kv_heads > 1 else whole
    k_head, v_head = (w.head if kv_heads > 1 else q_head for w in (k, v))
    group = q.group if groups > 1 and finish.group else in_group * q_head
    unit = 1 if n_major else math.gcd(group, q_head, k_head, v_head)
    steps = (group // unit, q_head // unit, k_head // unit, v_head // unit)
    one = finish.head_dim if n_major else 1
    q_last = (groups - 1) * steps[0] + (in_group - 1) * steps[1]
    return TiledWeights(
        (q.column,) if n_major else (unit, q.row),
        steps,
        max(q_last, (kv_heads - 1) * max(steps[2:])) + one,
        set(steps[1:]) == {one},
    )


def tiled_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection` cannot take the problem; None when it can."""
    finish = problem.finish
    size = ELEMENT_BYTES[finish.dtype]
    if (obstacle := fused_obstacle(finish)) is not None:
        return obstacle
    weights = [strides for strides in problem.weight_strides if strides is not None]
    if len({(strides.row, strides.column) for strides in weights}) != 1:
        return "the three weights differ in strides"
    strides = (problem.x_stride, *tiled_weights(problem).strides)
    odd = {"x_ptr", "q_weight_ptr", "k_weight_ptr", "v_weight_ptr"} & set(problem.unaligned)
    if odd or any(stride * size % 16 for stride in strides):
        return "TMA wants addresses and strides in multiples of 16 bytes"
    if not problem.one_descriptor:
        return "the weights lie too far apart for one TMA descriptor"
    if finish.head_dim != next_power_of_2(finish.head_dim):
        return f"head_dim {finish.head_dim} is no power of two"
    pair_half = finish.pair_half
    if not finish.interleaved and pair_half != next_power_of_2(pair_half):
        return f"half of rotary_dim, {pair_half}, is no power of two"
    return None


def heads_fit(problem: QkvProblem, heads_per_tile: int) -> bool:
    """Whether tiles of so many heads lie wholly in q, k or v, and can be loaded at once."""
    finish = problem.finish
    if finish.num_heads % heads_per_tile or finish.num_kv_heads % heads_per_tile:
        return False
    if heads_per_tile == 1:
        return True
    weights = tiled_weights(problem)
    in_row = not finish.group or weights.steps[0] == finish.group * weights.steps[1]
    return weights.adjacent and (in_row or finish.group % heads_per_tile == 0)


def swapped_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection_swapped` cannot take the problem; None when it can."""
    if (obstacle := fused_obstacle(problem.finish)) is not None:
        return obstacle
    if len({strides.column == 1 for strides in problem.weight_strides if strides}) != 1:
        return "k-major and n-major weights together"
    return None


def fused_obstacle(finish: HeadFinish) -> str | None:
    """Why no kernel that multiplies tiles can finish the heads; None when they can."""
    if finish.dtype not in ("bf16", "fp16"):
        return f"tensor cores take bf16 and fp16 here, not {finish.dtype}"
    if finish.row_norm:
        return "a norm over all heads of a projection needs more than a tile"
    return None


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
        "qkv_projection", "qkv_projection", problem, constants, arguments, config, target
    )


def tiled_grid(problem: QkvProblem, config: TiledConfig, num_tokens: int, num_sms: int) -> int:
    tiles = cdiv(num_tokens, config.block_m) * (
        problem.finish.heads_in_all // config.heads_per_tile
    )
    return min(tiles, num_sms * config.programs_per_sm) if config.persistent else tiles


def tiles_per_head(problem: QkvProblem, config: SwappedConfig) -> int:
    return cdiv(problem.finish.pairs_per_head, config.block_p)


def swapped_spec(problem: QkvProblem, config: SwappedConfig, target: str) -> KernelSpec:
    finish = problem.finish
    slices = tiles_per_head(problem, config)
    if finish.has_norm and slices != 1:
        raise ValueError(
            f"block_p: a norm needs whole heads of {finish.pairs_per_head} pairs in a tile, "
            f"got {config.block_p}"
        )
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
        "qkv_projection", "qkv_projection_swapped", problem, constants, arguments, config, target
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
        "qkv_epilogue", "qkv_epilogue", problem, constants, arguments, config, target
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
