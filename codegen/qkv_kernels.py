"""QKV problems as plain data, and the kernel specs of the `qkv_*` templates for them.

Nothing here touches torch or a GPU: a problem is what is static about one call site (dims,
strides, dtypes, cache geometry), a config is a choice of tiles, and the two give a KernelSpec and
a launch grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.spec import Constant, KernelSpec

# Bytes of one element, by Triton dtype name.
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "i64": 8}

POINTER_NAMES = (
    "q_out_ptr", "k_cache_ptr", "v_cache_ptr", "slots_ptr", "q_bias_ptr", "k_bias_ptr",
    "v_bias_ptr", "q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr",
)  # fmt: skip
COUNT_NAMES = ("num_tokens", "sequence_tokens", "rope_tokens", "num_pages")


@dataclass(frozen=True)
class CacheStrides:
    """Geometry of a cache window that is static for a kernel; strides in elements."""

    page_size: int
    page_stride: int
    slot_stride: int
    head_stride: int
    dim_stride: int


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: style "half" or "interleaved"; strides of the table rows in elements.

    full_width: the tables have `rotary_dim` columns, else half as many.
    """

    style: str
    rotary_dim: int
    full_width: bool
    table_dtype: str
    cos_stride: int
    sin_stride: int


@dataclass(frozen=True)
class HeadFinish:
    """What becomes of projected heads: bias, norm, rotation, and where they are stored.

    num_heads 0: there is no q. v_cache None: there is no v. Biases are (head stride, dtype) or
    None for q, k, v; norms are the weight's dtype or None for q, k.
    """

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    k_cache: CacheStrides
    v_cache: CacheStrides | None
    cache_dtype: str
    slot_dtype: str = "i64"
    slots_stride: int = 1
    per_sequence: bool = False
    wrap_negative: bool = False
    rope: Rope | None = None
    biases: tuple[tuple[int, str] | None, ...] = (None, None, None)
    norms: tuple[str | None, ...] = (None, None)
    norm_eps: float = 1e-6

    @property
    def interleaved(self) -> bool:
        return self.rope is not None and self.rope.style == "interleaved"

    @property
    def pair_half(self) -> int:
        """Distance between the partners of a pair that are not neighbours."""
        if self.rope is not None and self.rope.style == "half":
            return self.rope.rotary_dim // 2
        return (self.head_dim + 1) // 2

    @property
    def pairs_per_head(self) -> int:
        """Pairs that cover a head; the last ones may reach past it."""
        if self.interleaved:
            return (self.head_dim + 1) // 2
        return -(-self.head_dim // (2 * self.pair_half)) * self.pair_half

    @property
    def has_norm(self) -> bool:
        return any(norm is not None for norm in self.norms)

    @property
    def heads_in_all(self) -> int:
        return self.num_heads + self.num_kv_heads * (1 if self.v_cache is None else 2)

    def constants(self) -> dict[str, Constant]:
        """The constexpr parameters that every kernel of the family takes."""
        rope = self.rope
        v_cache = self.v_cache or self.k_cache
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "PAIR_HALF": self.pair_half,
            "INTERLEAVED": self.interleaved,
            "ROTARY_DIM": rope.rotary_dim if rope else 0,
            "ROPE_FULL_WIDTH": rope.full_width if rope else False,
            "COS_STRIDE": rope.cos_stride if rope else 0,
            "SIN_STRIDE": rope.sin_stride if rope else 0,
            **{
                f"{letter}_BIAS_STRIDE": bias[0] if bias else 0
                for letter, bias in zip("QKV", self.biases, strict=True)
            },
            "NORM_EPS": self.norm_eps,
            "PAGE_SIZE": self.k_cache.page_size,
            "SLOTS_STRIDE": self.slots_stride,
            "PER_SEQUENCE": self.per_sequence,
            "WRAP_NEGATIVE": self.wrap_negative,
            **_cache_constants("K", self.k_cache),
            **_cache_constants("V", v_cache),
            "ROW_UNIT": self.row_unit,
        }

    @property
    def row_unit(self) -> int:
        """Elements that divide every row's offset; 1 where a cache of one slot has no strides."""
        caches = (self.k_cache, self.v_cache or self.k_cache)
        strides = [stride for c in caches for stride in (c.page_stride, c.slot_stride)]
        return math.gcd(self.num_heads * self.head_dim, *strides) or 1

    def pointer_types(self) -> dict[str, str | None]:
        """Triton types of the pointers in POINTER_NAMES; None where there is no such tensor."""
        table = f"*{self.rope.table_dtype}" if self.rope else None
        cache = f"*{self.cache_dtype}"
        types: dict[str, str | None] = {
            "q_out_ptr": f"*{self.dtype}" if self.num_heads else None,
            "k_cache_ptr": cache,
            "v_cache_ptr": cache if self.v_cache else None,
            "slots_ptr": f"*{self.slot_dtype}",
            "cos_ptr": table,
            "sin_ptr": table,
        }
        for letter, bias in zip("qkv", self.biases, strict=True):
            types[f"{letter}_bias_ptr"] = f"*{bias[1]}" if bias else None
        for letter, norm in zip("qk", self.norms, strict=True):
            types[f"{letter}_norm_ptr"] = f"*{norm}" if norm else None
        return {name: types[name] for name in POINTER_NAMES}


def _cache_constants(letter: str, cache: CacheStrides) -> dict[str, Constant]:
    return {
        f"{letter}_PAGE_STRIDE": cache.page_stride,
        f"{letter}_SLOT_STRIDE": cache.slot_stride,
        f"{letter}_HEAD_STRIDE": cache.head_stride,
        f"{letter}_DIM_STRIDE": cache.dim_stride,
    }


@dataclass(frozen=True)
class QkvProblem:
    """One `fused_qkv_paged` call site.

    num_tokens: T where it is a constant of the graph, with rope_tokens (rows of the tables) and
    sequence_tokens (tokens per page for per-sequence slots); else None, and the counts come at
    run time. weight_strides: (head stride, row stride) of q, k, v in elements.
    unaligned: names of pointer parameters that are not aligned to 16 bytes.
    one_descriptor: the three weights are near enough for one TMA descriptor (strides below 2**40
    bytes).
    """

    hidden: int
    x_stride: int
    weight_strides: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    finish: HeadFinish
    num_tokens: int | None = None
    rope_tokens: int | None = None
    sequence_tokens: int | None = None
    unaligned: tuple[str, ...] = ()
    one_descriptor: bool = True

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
    """Strides (token, head, dim) of a [T, H, D] input, in elements."""

    token: int
    head: int
    dim: int


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

    epilogue_parts: 2 finishes a tile in two goes, which halves the registers it takes.
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

    def __str__(self) -> str:
        marks = (
            (f"p{self.programs_per_sm}" if self.persistent else "")
            + ("f" * self.flatten)
            + ("w" * self.warp_specialize)
        )
        return (
            f"tiled {self.block_m}x{self.heads_per_tile}h x{self.block_k} "
            f"w{self.num_warps} s{self.num_stages} g{self.group_m} e{self.epilogue_parts}"
            f"{' ' + marks if marks else ''}"
        )


@dataclass(frozen=True)
class SwappedConfig:
    """`qkv_projection_swapped`: 2 * block_p weight rows on the M side, block_t tokens on N."""

    block_p: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1

    def __str__(self) -> str:
        return (
            f"swapped {2 * self.block_p}x{self.block_t}x{self.block_k} /{self.split_k} "
            f"w{self.num_warps} s{self.num_stages}"
        )


@dataclass(frozen=True)
class EpilogueConfig:
    """`qkv_epilogue`: block_t tokens by heads_per_tile heads per program."""

    block_t: int
    heads_per_tile: int
    num_warps: int = 4

    def __str__(self) -> str:
        return f"epilogue {self.block_t}x{self.heads_per_tile}h w{self.num_warps}"


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def tiled_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection` cannot take the problem; None when it can."""
    finish = problem.finish
    size = ELEMENT_BYTES[finish.dtype]
    if finish.dtype not in ("bf16", "fp16"):
        return f"tensor cores take bf16 and fp16 here, not {finish.dtype}"
    if len(set(problem.weight_strides)) != 1:
        return "the three weights differ in strides"
    head_stride, row_stride = problem.weight_strides[0]
    strides = (problem.x_stride, head_stride, row_stride)
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


def swapped_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection_swapped` cannot take the problem; None when it can."""
    finish = problem.finish
    if finish.dtype not in ("bf16", "fp16"):
        return f"tensor cores take bf16 and fp16 here, not {finish.dtype}"
    return None


def tiled_spec(problem: QkvProblem, config: TiledConfig, target: str) -> KernelSpec:
    finish = problem.finish
    head_stride, row_stride = problem.weight_strides[0]
    constants: dict[str, Constant] = {
        **finish.constants(),
        "HIDDEN": problem.hidden,
        "X_STRIDE": problem.x_stride,
        "WEIGHT_HEAD_STRIDE": head_stride,
        "WEIGHT_ROW_STRIDE": row_stride,
        "BLOCK_M": config.block_m,
        "HEADS_PER_TILE": config.heads_per_tile,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "EPILOGUE_PARTS": config.epilogue_parts,
        "FLATTEN": config.flatten,
        "WARP_SPECIALIZE": config.warp_specialize,
    }
    pointer = f"*{finish.dtype}"
    arguments: dict[str, str | None] = {
        "x_ptr": pointer,
        "weight_ptr": pointer,
        **finish.pointer_types(),
        **dict.fromkeys(COUNT_NAMES, "i32"),
        "second_distance": "i64",
        "third_distance": "i64",
        "q_place": "i32",
        "k_place": "i32",
        "v_place": "i32",
    }
    return _spec("qkv_projection", "qkv_projection", problem, constants, arguments, config, target)


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
    }
    for letter, (head_stride, row_stride) in zip("QKV", problem.weight_strides, strict=True):
        constants[f"{letter}_WEIGHT_HEAD_STRIDE"] = head_stride
        constants[f"{letter}_WEIGHT_ROW_STRIDE"] = row_stride
    pointer = f"*{finish.dtype}"
    arguments: dict[str, str | None] = {
        "x_ptr": pointer,
        "q_weight_ptr": pointer,
        "k_weight_ptr": pointer,
        "v_weight_ptr": pointer,
        **finish.pointer_types(),
        "workspace_ptr": "*fp32" if config.split_k > 1 else None,
        "counters_ptr": "*i32" if config.split_k > 1 else None,
        **dict.fromkeys(COUNT_NAMES, "i32"),
    }
    return _spec(
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
    }
    inputs = {"Q": problem.q, "K": problem.k, "V": problem.v}
    arguments: dict[str, str | None] = {}
    for letter, strides in inputs.items():
        arguments[f"{letter.lower()}_ptr"] = f"*{problem.input_dtype}" if strides else None
        constants[f"{letter}_TOKEN_STRIDE"] = strides.token if strides else 0
        constants[f"{letter}_IN_HEAD_STRIDE"] = strides.head if strides else 0
        constants[f"{letter}_IN_DIM_STRIDE"] = strides.dim if strides else 0
    arguments |= {**finish.pointer_types(), **dict.fromkeys(COUNT_NAMES, "i32")}
    return _spec("qkv_epilogue", "qkv_epilogue", problem, constants, arguments, config, target)


def epilogue_grid(
    problem: EpilogueProblem, config: EpilogueConfig, num_tokens: int
) -> tuple[int, int]:
    return (
        cdiv(num_tokens, config.block_t),
        problem.finish.heads_in_all // config.heads_per_tile,
    )


def _spec(
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
    )
