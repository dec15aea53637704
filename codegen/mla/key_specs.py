"""MLA's keys as plain data: problems, configs and kernel specs of the `mla_latent` and
`mla_up_projection` templates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.codegen.addressing import NOWHERE, Addressing
from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.mla.query_specs import NO_ROTATION, TMA_BYTES, Rotation
from tilewright.codegen.operand import Operand, first_strides
from tilewright.codegen.spec import KernelSpec, constants_of, operands_of

# Tensors of `mla_latents` beside the tables of the rotation: field of LatentProblem -> dimensions
# whose strides are constants of the kernel.
LATENT_TENSORS: dict[str, tuple[int, ...]] = {
    "latent": (0,), "k_rope": (0,), "norm": (), "latent_cache": (0, 1, 2), "rope_cache": (0, 1, 2),
    "row_offsets": (0,), "lengths": (0,), "token_positions": (0,), "lookup": (1,),
    "key_offsets": (0,), "key_starts": (0,), "key_slots": (0,), "latent_out": (0,), "rope_out": (),
    "scale_out": (),
}  # fmt: skip
LATENT_COUNTS = (
    "num_tokens", "num_rows", "row_programs", "rope_rows", "token_run", "key_run",
    "sequence_tokens", "num_pages", "num_sequences", "lookup_columns", "lookup_stride",
    "scale_stride",
)  # fmt: skip


@dataclass(frozen=True)
class LatentProblem:
    """The static part of one launch of `mla_latents`: it stores new tokens' latents to the cache,
    gathers keys from there, or both in one launch; or it makes keys of the new tokens themselves.

    rank, rope_dim: columns of a latent and of its rope part. norm_eps: of the RMS norm.
    rotation: of the new tokens' rope part. neighbours: the members of a rotated pair lie side by
    side in the cache and the buffers.
    page_size: slots of a page. addressing: how new tokens find their slot.
    search_steps: of a binary search for a token's or a key's sequence.
    keys: where keys are gathered from, as `key_places` has it, "none" where they are not.
    group: columns that share a scale of quantised latents, 0 for none; cap: of a group's largest
    magnitude, 0 for none. rope_scale: divides the rope columns of the buffer.

    latent, k_rope: the new tokens, strides (row,). norm: the norm's weight. latent_cache,
    rope_cache: strides (page, slot, column). row_offsets, lengths, token_positions: the positions
    of new tokens. lookup: the page table of keys, strides (column,). key_offsets, key_starts,
    key_slots: where keys are.
    latent_out [rows, >= rank] strides (row,), rope_out [rows, rope_dim], scale_out [groups, >=
    rows]: the buffers that are filled.
    """

    rank: int
    rope_dim: int
    norm_eps: float = 1e-6
    rotation: Rotation = NO_ROTATION
    neighbours: bool = False
    page_size: int = 1
    addressing: Addressing = NOWHERE
    search_steps: int = 0
    keys: str = "none"
    group: int = 0
    cap: float = 0.0
    rope_scale: float = 1.0
    latent: Operand | None = None
    k_rope: Operand | None = None
    norm: Operand | None = None
    latent_cache: Operand | None = None
    rope_cache: Operand | None = None
    row_offsets: Operand | None = None
    lengths: Operand | None = None
    token_positions: Operand | None = None
    lookup: Operand | None = None
    key_offsets: Operand | None = None
    key_starts: Operand | None = None
    key_slots: Operand | None = None
    latent_out: Operand | None = None
    rope_out: Operand | None = None
    scale_out: Operand | None = None

    @property
    def store(self) -> bool:
        return self.addressing.form != "none"

    @property
    def gather(self) -> bool:
        return self.keys != "none"

    @property
    def keep(self) -> bool:
        """Whether the new tokens themselves are the keys."""
        return not self.gather and (self.latent_out is not None or self.rope_out is not None)

    @property
    def fused(self) -> bool:
        """Whether new tokens are stored and become keys in one program."""
        return self.store and self.gather


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
    (row,) = first_strides(p.latent_out)
    latent_strides = p.latent_cache.strides if p.latent_cache else (0, 0, 0)
    rope_strides = p.rope_cache.strides if p.rope_cache else (0, 0, 0)
    tensors = {f"{name}_ptr": getattr(p, name) for name in LATENT_TENSORS}
    # In the order of the kernel's signature.
    first = {name: tensors.pop(name) for name in ("latent_ptr", "k_rope_ptr", "norm_ptr")}
    caches = {name: tensors.pop(name) for name in ("latent_cache_ptr", "rope_cache_ptr")}
    tensors = first | p.rotation.tensors | caches | p.addressing.pointers() | tensors
    return KernelSpec.of(
        "mla.latent",
        "mla_latents",
        {
            **constants_of(p, "rank", "rope_dim", "norm_eps", "neighbours", "page_size"),
            **constants_of(p, "keys", "store", "keep", "gather", "fused", "cap", "rope_scale"),
            "BLOCK_L": next_power_of_2(max(p.rank, row)),
            "PAIRS": next_power_of_2(p.rope_dim // 2),
            "LATENT_STRIDE": first_strides(p.latent)[0],
            "ROPE_STRIDE": first_strides(p.k_rope)[0],
            **p.rotation.constants,
            "LATENT_STRIDES": latent_strides,
            "ROPE_STRIDES": rope_strides,
            **p.addressing.constants(),
            "SEARCH_STEPS": p.search_steps,
            "BATCH_STRIDES": first_strides(p.row_offsets, p.lengths, p.token_positions),
            "LOOKUP_STRIDE": first_strides(p.lookup)[0],
            "KEY_STRIDES": first_strides(p.key_offsets, p.key_starts, p.key_slots),
            "OUT_STRIDE": row,
            "GROUP": p.group or 1,
            "UNITS": (math.gcd(16, *latent_strides[:2]), math.gcd(16, *rope_strides[:2])),
            "ONE_SOURCE": _one_source(p),
            "BLOCK_T": config.block_t,
            "CHECKED": max(config.checked, config.block_t),
        },
        tensors | dict.fromkeys(LATENT_COUNTS, "i32") | {"scale_stride": "i64"},
        divisible=("scale_stride",),
        num_warps=config.num_warps,
        target=target,
    )


def _one_source(p: LatentProblem) -> bool:
    """Whether a row is loaded in one way, be it of a token or of the cache."""
    if p.latent is None or p.k_rope is None or p.latent_cache is None or p.rope_cache is None:
        return False
    return (
        p.latent.dtype == p.latent_cache.dtype
        and p.k_rope.dtype == p.rope_cache.dtype
        and p.latent_cache.strides[2] == p.rope_cache.strides[2] == 1
        and p.neighbours == (p.rotation.style in ("interleaved", "interleaved_to_half"))
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

    latent, weight: values or codes, strides (row,). scale_block: (rows, columns) of the weight that
    share a scale, None for values; latents share scales by as many columns. latent_scale: strides
    (row,); weight_scale: strides (row, column).
    k: strides (row, head). v: None where a head's values follow its keys; else apart, strides
    (row,): 1 where transposed, [H, V, K]. k_scale, v_scale: divide what is written.
    limited: rows past a limit are left out.
    """

    num_heads: int
    nope: int
    v_dim: int
    rank: int
    latent: Operand
    weight: Operand
    k: Operand
    v: Operand | None = None
    scale_block: tuple[int, int] | None = None
    latent_scale: Operand | None = None
    weight_scale: Operand | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    limited: bool = False

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.num_heads * (self.nope + self.v_dim)

    @property
    def joint(self) -> bool:
        """Whether a head's values follow its keys."""
        return self.v is None

    @property
    def by_head(self) -> bool:
        """Whether heads' keys and values do not follow each other, so that a tile is of one."""
        return not self.joint or self.k.strides[1] != self.nope + self.v_dim


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
    (v_row,) = first_strides(p.v)
    return KernelSpec.of(
        "mla.up_projection",
        "mla_up_projection",
        {
            **constants_of(p, "rank", "num_heads", "nope", "v_dim", "joint", "k_scale", "v_scale"),
            "LATENT_STRIDE": p.latent.strides[0],
            "WEIGHT_STRIDE": p.weight.strides[0],
            "SCALE_BLOCK": p.scale_block or (1, 1),
            "LATENT_SCALE_STRIDE": p.latent_scale.strides[0] if p.latent_scale else 1,
            "WEIGHT_SCALE_STRIDES": p.weight_scale.strides if p.weight_scale else (0, 0),
            "K_STRIDES": p.k.strides,
            "V_ROW_STRIDE": v_row,
            "V_TRANSPOSED": v_row == 1,
            **constants_of(config, "block_m", "block_n", "block_k", "group_m"),
            "FLATTEN": config.flatten and not p.limited,
            "WARP_SPECIALIZE": config.warp_specialize and not p.limited,
        },
        {
            **operands_of(p, "latent", "weight", "latent_scale", "weight_scale", "k", "v"),
            "limit_ptr": Operand("i64") if p.limited else None,  # a scalar: it lies anywhere
            "num_rows": "i32",
            "run": "i32",
            **dict.fromkeys(("scale_stride", "v_head_stride", "v_column_stride"), "i64"),
        },
        divisible=("v_head_stride", "v_column_stride"),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
    )


def up_grid(problem: UpProblem, config: UpConfig, rows: int, num_sms: int) -> tuple[int]:
    if problem.joint:
        columns = cdiv(problem.rows, config.block_n)
    else:
        parts = cdiv(problem.nope, config.block_n) + cdiv(problem.v_dim, config.block_n)
        columns = problem.num_heads * parts
    tiles = cdiv(rows, config.block_m) * columns
    return (tiles if problem.limited else min(tiles, num_sms * config.programs_per_sm),)


def up_obstacle(problem: UpProblem) -> str | None:
    """Why TMA cannot reach the operands, or no tile fits; None where it is neither."""
    operands = {"latent": problem.latent, "kv_b_weight": problem.weight}
    if problem.joint:
        operands["the result"] = problem.k
    for name, operand in operands.items():
        size = operand.strides[0] * ELEMENT_BYTES[operand.dtype]
        if size % TMA_BYTES:
            return f"{name}: rows of {size} bytes are not whole {TMA_BYTES} bytes"
        if not operand.aligned:
            return f"{name} does not start at a multiple of {TMA_BYTES} bytes"
    if problem.joint and problem.by_head and (problem.nope + problem.v_dim) % 16:
        return f"{problem.nope + problem.v_dim} rows of a head are not whole tiles of 16"
    return None


@dataclass(frozen=True)
class WeightProblem:
    """Dequantising the weight [rows, rank], which has codes with a scale for each scale_block.
    weight: strides (row,). scale: strides (row, column). out: contiguous."""

    rows: int
    rank: int
    scale_block: tuple[int, int]
    weight: Operand
    scale: Operand
    out: Operand


DEQUANTIZE_TILE = (32, 128)


def dequantize_spec(problem: WeightProblem, target: str) -> KernelSpec:
    """The kernel that dequantises a weight."""
    return KernelSpec.of(
        "mla.up_projection",
        "mla_weight_numbers",
        {
            **constants_of(problem, "rows", "rank", "scale_block"),
            "WEIGHT_STRIDE": problem.weight.strides[0],
            "WEIGHT_SCALE_STRIDES": problem.scale.strides,
            "BLOCK_N": DEQUANTIZE_TILE[0],
            "BLOCK_K": DEQUANTIZE_TILE[1],
        },
        {"weight_ptr": problem.weight, "weight_scale_ptr": problem.scale, "out_ptr": problem.out},
        target=target,
    )


def dequantize_grid(problem: WeightProblem) -> tuple[int, int]:
    return cdiv(problem.rows, DEQUANTIZE_TILE[0]), cdiv(problem.rank, DEQUANTIZE_TILE[1])
