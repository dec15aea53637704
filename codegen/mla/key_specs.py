"""MLA problems as plain data, and the kernel specs of the `mla_latent` and `mla_up_projection`
templates.

Nothing here touches torch or a GPU: a problem is what is static about one call site, a config is a
choice of tiles, and the two give a KernelSpec and a launch grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.spec import Constant, KernelSpec

# TMA: strides and base addresses in whole 16 bytes.
TMA_BYTES = 16
LATENT_POINTERS = (
    "latent_ptr", "k_rope_ptr", "norm_ptr", "cos_ptr", "sin_ptr", "latent_cache_ptr",
    "rope_cache_ptr", "slots_ptr", "sequences_ptr", "positions_ptr", "row_offsets_ptr",
    "lengths_ptr", "token_positions_ptr", "lookup_ptr", "key_offsets_ptr", "key_starts_ptr",
    "key_slots_ptr", "latent_out_ptr", "rope_out_ptr", "scale_out_ptr",
)  # fmt: skip
LATENT_COUNTS = (
    "num_tokens", "num_rows", "row_programs", "rope_rows", "token_run", "key_run",
    "sequence_tokens", "num_pages", "num_sequences", "table_rows", "table_width", "table_stride",
    "lookup_columns", "lookup_stride", "scale_stride",
)  # fmt: skip

Types = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class LatentProblem:
    """The static part of one launch of `mla_latents`.

    types: Triton's element type of every tensor of LATENT_POINTERS, None for absent ones; absent is
    sin_ptr too where each sine follows its cosine in one table.
    rank, rope_dim: columns of a latent and of its rope part. latent_stride, rope_stride: from one
    new token to the next. rope_style "none": no rotation. full_width: cos and sin have rope_dim
    columns, else half; table strides (row, column). neighbours: how the members of a pair lie in
    the cache and the buffers.
    page_size, latent_strides, rope_strides: the cache's windows, strides (page, slot, column).
    addressing, address_strides, search_steps, wrap_negative: as for `places.cache_places`.
    batch_strides: of row_offsets, lengths and token_positions; key_strides: of key_offsets,
    key_starts and key_slots. keys: as for `key_places`.
    store, keep, gather, fused: what the kernel does. out_stride: columns of a row of the latents'
    buffer. group: columns that share a scale of quantised latents, 0 for none; cap of their
    largest number, 0 for none. rope_scale: divides the rope columns of the buffer.
    """

    types: Types
    rank: int
    rope_dim: int
    latent_stride: int = 0
    rope_stride: int = 0
    norm_eps: float = 1e-6
    rope_style: str = "none"
    full_width: bool = False
    cos_strides: tuple[int, int] = (0, 0)
    sin_strides: tuple[int, int] = (0, 0)
    by_position: bool = False
    neighbours: bool = False
    page_size: int = 1
    latent_strides: tuple[int, int, int] = (0, 0, 0)
    rope_strides: tuple[int, int, int] = (0, 0, 0)
    addressing: str = "none"
    wrap_negative: bool = False
    address_strides: tuple[int, int, int] = (0, 0, 0)
    search_steps: int = 0
    batch_strides: tuple[int, int, int] = (0, 0, 0)
    keys: str = "none"
    lookup_stride: int = 0
    key_strides: tuple[int, int, int] = (0, 0, 0)
    store: bool = False
    keep: bool = False
    gather: bool = False
    fused: bool = False
    out_stride: int = 0
    group: int = 0
    cap: float = 0.0
    rope_scale: float = 1.0
    unaligned: tuple[str, ...] = ()


@dataclass(frozen=True)
class LatentConfig:
    """Rows of one program, and the warps that share them.

    checked: tokens that a program of a fused launch looks at for those that are no keys. It takes
    these one block_t after the other, so that more are slower where there are such tokens.
    """

    block_t: int
    num_warps: int = 4
    checked: int = 16


def latent_spec(problem: LatentProblem, config: LatentConfig, target: str) -> KernelSpec:
    """The kernel of a problem."""
    p = problem
    constants: dict[str, Constant] = {
        "RANK": p.rank,
        "BLOCK_L": next_power_of_2(max(p.rank, p.out_stride)),
        "ROPE_DIM": p.rope_dim,
        "PAIRS": next_power_of_2(p.rope_dim // 2),
        "LATENT_STRIDE": p.latent_stride,
        "ROPE_STRIDE": p.rope_stride,
        "NORM_EPS": p.norm_eps,
        "ROPE_STYLE": p.rope_style,
        "FULL_WIDTH": p.full_width,
        "COS_STRIDES": p.cos_strides,
        "SIN_STRIDES": p.sin_strides,
        "BY_POSITION": p.by_position,
        "NEIGHBOURS": p.neighbours,
        "PAGE_SIZE": p.page_size,
        "LATENT_STRIDES": p.latent_strides,
        "ROPE_STRIDES": p.rope_strides,
        "ADDRESSING": p.addressing,
        "WRAP_NEGATIVE": p.wrap_negative,
        "ADDRESS_STRIDES": p.address_strides,
        "SEARCH_STEPS": p.search_steps,
        "BATCH_STRIDES": p.batch_strides,
        "KEYS": p.keys,
        "LOOKUP_STRIDE": p.lookup_stride,
        "KEY_STRIDES": p.key_strides,
        "STORE": p.store,
        "KEEP": p.keep,
        "GATHER": p.gather,
        "FUSED": p.fused,
        "OUT_STRIDE": p.out_stride,
        "CAP": p.cap,
        "GROUP": p.group or 1,
        "ROPE_SCALE": p.rope_scale,
        "UNITS": (math.gcd(16, *p.latent_strides[:2]), math.gcd(16, *p.rope_strides[:2])),
        "ONE_SOURCE": _one_source(p),
        "BLOCK_T": config.block_t,
        "CHECKED": max(config.checked, config.block_t),
    }
    counts = dict.fromkeys(LATENT_COUNTS, "i32") | {"scale_stride": "i64"}
    types = {name: type_name and f"*{type_name}" for name, type_name in p.types}
    pointers = {name: types[name] for name in LATENT_POINTERS}
    return make_spec(
        "mla.latent", "mla_latents", constants, pointers | counts, p.unaligned, target,
        num_warps=config.num_warps, divisible=("scale_stride",),
    )  # fmt: skip


def _one_source(problem: LatentProblem) -> bool:
    """Whether a row is loaded in one way, be it of a token or of the cache."""
    p, types = problem, dict(problem.types)
    return (
        types["latent_ptr"] == types["latent_cache_ptr"]
        and types["k_rope_ptr"] == types["rope_cache_ptr"]
        and p.latent_strides[2] == p.rope_strides[2] == 1
        and p.neighbours == (p.rope_style in ("interleaved", "interleaved_to_half"))
    )


def latent_grid(problem: LatentProblem, config: LatentConfig, tokens: int, rows: int) -> int:
    """Programs of a launch: those of tokens, then those of keys."""
    block = max(config.checked, config.block_t) if problem.fused else config.block_t
    own = cdiv(tokens, block) if problem.store or problem.keep else 0
    return row_programs(problem, config, rows) + own


def row_programs(problem: LatentProblem, config: LatentConfig, rows: int) -> int:
    return cdiv(rows, config.block_t) if problem.gather else 0


@dataclass(frozen=True)
class UpProblem:
    """The static part of an up-projection: kv [K, H, N + V] = latents [K, L] @ weight^T.

    latent_type, weight_type: of the operands, values or codes. scale_block: (rows, columns) of the
    weight that share a scale, None for values; latents share scales by as many columns.
    scale_types: of the latents' and the weight's scales.
    joint: a head's values follow its keys. k_strides: (row, head); values that are apart have rows
    apart by v_row_stride (1: transposed, [H, V, K]). limited: rows past a limit are left out.
    """

    latent_type: str
    weight_type: str
    out_type: str
    rank: int
    latent_stride: int
    weight_stride: int
    num_heads: int
    nope: int
    v_dim: int
    scale_block: tuple[int, int] | None = None
    scale_types: tuple[str, str] = ("fp32", "fp32")
    latent_scale_stride: int = 1
    weight_scale_strides: tuple[int, int] = (0, 0)
    joint: bool = True
    k_strides: tuple[int, int] = (0, 0)
    v_row_stride: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0
    limited: bool = False
    unaligned: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.num_heads * (self.nope + self.v_dim)

    @property
    def by_head(self) -> bool:
        """Whether heads' keys and values do not follow each other, so that a tile is of one."""
        return not self.joint or self.k_strides[1] != self.nope + self.v_dim

    @property
    def transposed(self) -> bool:
        return not self.joint and self.v_row_stride == 1


@dataclass(frozen=True)
class UpConfig:
    """Tiles of the up-projection: block_m keys, block_n rows and block_k columns of the weight."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    group_m: int = 8
    flatten: bool = False
    warp_specialize: bool = False

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        more = f" p{self.programs_per_sm}" if self.programs_per_sm > 1 else ""
        more += " f" if self.flatten else ""
        more += " ws" if self.warp_specialize else ""
        return f"{tile} w{self.num_warps} s{self.num_stages} g{self.group_m}{more}"


def up_spec(problem: UpProblem, config: UpConfig, target: str) -> KernelSpec:
    """The GEMM of a problem. A limited one is launched with one program for each tile."""
    p = problem
    scaled = p.scale_block is not None
    arguments: dict[str, str | None] = {
        "latent_ptr": f"*{p.latent_type}",
        "weight_ptr": f"*{p.weight_type}",
        "latent_scale_ptr": f"*{p.scale_types[0]}" if scaled else None,
        "weight_scale_ptr": f"*{p.scale_types[1]}" if scaled else None,
        "k_ptr": f"*{p.out_type}",
        "v_ptr": None if p.joint else f"*{p.out_type}",
        "limit_ptr": "*i64" if p.limited else None,
        "num_rows": "i32",
        "run": "i32",
        "scale_stride": "i64",
        "v_head_stride": "i64",
        "v_column_stride": "i64",
    }
    constants: dict[str, Constant] = {
        "RANK": p.rank,
        "LATENT_STRIDE": p.latent_stride,
        "WEIGHT_STRIDE": p.weight_stride,
        "NUM_HEADS": p.num_heads,
        "NOPE": p.nope,
        "V_DIM": p.v_dim,
        "SCALE_BLOCK": p.scale_block or (1, 1),
        "LATENT_SCALE_STRIDE": p.latent_scale_stride,
        "WEIGHT_SCALE_STRIDES": p.weight_scale_strides,
        "K_STRIDES": p.k_strides,
        "V_ROW_STRIDE": p.v_row_stride,
        "JOINT": p.joint,
        "K_SCALE": p.k_scale,
        "V_SCALE": p.v_scale,
        "V_TRANSPOSED": p.transposed,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "FLATTEN": config.flatten and not p.limited,
        "WARP_SPECIALIZE": config.warp_specialize and not p.limited,
    }
    return make_spec(
        "mla.up_projection", "mla_up_projection", constants, arguments, p.unaligned, target,
        num_warps=config.num_warps, num_stages=config.num_stages,
        divisible=("v_head_stride", "v_column_stride"),
    )  # fmt: skip


def up_tiles(problem: UpProblem, config: UpConfig, rows: int) -> int:
    if problem.joint:
        columns = cdiv(problem.rows, config.block_n)
    else:
        parts = cdiv(problem.nope, config.block_n) + cdiv(problem.v_dim, config.block_n)
        columns = problem.num_heads * parts
    return cdiv(rows, config.block_m) * columns


def up_grid(problem: UpProblem, config: UpConfig, rows: int, num_sms: int) -> tuple[int]:
    tiles = up_tiles(problem, config, rows)
    return (tiles if problem.limited else min(tiles, num_sms * config.programs_per_sm),)


def up_obstacle(problem: UpProblem) -> str | None:
    """Why TMA cannot reach the operands, or no tile fits; None where it is neither."""
    sizes = {
        "latent": problem.latent_stride * ELEMENT_BYTES[problem.latent_type],
        "kv_b_weight": problem.weight_stride * ELEMENT_BYTES[problem.weight_type],
    }
    if problem.joint:
        sizes["the result"] = problem.k_strides[0] * ELEMENT_BYTES[problem.out_type]
    for name, size in sizes.items():
        if size % TMA_BYTES:
            return f"{name}: rows of {size} bytes are not whole {TMA_BYTES} bytes"
    if problem.joint and problem.by_head and (problem.nope + problem.v_dim) % 16:
        return f"{problem.nope + problem.v_dim} rows of a head are not whole tiles of 16"
    unaligned = {"latent_ptr": "latent", "weight_ptr": "kv_b_weight"}
    for name, argument in unaligned.items():
        if name in problem.unaligned:
            return f"{argument} does not start at a multiple of {TMA_BYTES} bytes"
    return None


def weight_numbers_spec(problem: UpProblem, out_type: str, target: str) -> KernelSpec:
    """The kernel that makes numbers of a weight's codes; `problem` has their scale_block."""
    constants: dict[str, Constant] = {
        "ROWS": problem.rows,
        "RANK": problem.rank,
        "WEIGHT_STRIDE": problem.weight_stride,
        "SCALE_BLOCK": problem.scale_block or (1, 1),
        "WEIGHT_SCALE_STRIDES": problem.weight_scale_strides,
        "BLOCK_N": NUMBERS_TILE[0],
        "BLOCK_K": NUMBERS_TILE[1],
    }
    arguments: dict[str, str | None] = {
        "weight_ptr": f"*{problem.weight_type}",
        "weight_scale_ptr": f"*{problem.scale_types[1]}",
        "out_ptr": f"*{out_type}",
    }
    template = ("mla.up_projection", "mla_weight_numbers")
    return make_spec(*template, constants, arguments, problem.unaligned, target, num_warps=4)


NUMBERS_TILE = (32, 128)


def weight_numbers_grid(problem: UpProblem) -> tuple[int, int]:
    return cdiv(problem.rows, NUMBERS_TILE[0]), cdiv(problem.rank, NUMBERS_TILE[1])


def make_spec(
    template: str,
    kernel: str,
    constants: Mapping[str, Constant],
    arguments: Mapping[str, str | None],
    unaligned: Iterable[str],
    target: str,
    *,
    num_warps: int,
    num_stages: int = 2,
    divisible: Iterable[str] = (),
) -> KernelSpec:
    """Absent tensors become constants, the rest is the signature; pointers are 16-byte aligned but
    for `unaligned`, and the integers `divisible` are multiples of 16."""
    signature = {name: t for name, t in arguments.items() if t is not None}
    absent = dict.fromkeys(name for name, t in arguments.items() if t is None)
    away = set(unaligned)
    known = {n for n, t in signature.items() if t.startswith("*")} | set(divisible)
    return KernelSpec.make(
        template,
        kernel,
        {**constants, **absent},
        signature,
        divisible16=sorted(known - away),
        num_warps=num_warps,
        num_stages=num_stages,
        target=target,
    )
