"""The kernels that compute MLA's keys, `mla_latents` and `mla_up_projection`, and their tile
sizes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.kernel import Kernel, Statics, strides_of
from tilewright.codegen.mla.query_kernels import TMA_BYTES
from tilewright.codegen.operand import Operand

LATENTS = Kernel(
    "mla.latent",
    "mla_latents",
    {
        "ROPE_STRIDE": ("k_rope", 0),
        "LATENT_STRIDES": tuple(("latent_cache", dim) for dim in range(3)),
        "ROPE_STRIDES": tuple(("rope_cache", dim) for dim in range(3)),
        "ADDRESS_STRIDES": (("slots", -1), ("sequences", 0), ("positions", 0)),
        "BATCH_STRIDES": (("row_offsets", 0), ("lengths", 0), ("token_positions", 0)),
        "LOOKUP_STRIDE": ("lookup", 1),
        "KEY_STRIDES": (("key_offsets", 0), ("key_starts", 0), ("key_slots", 0)),
        "OUT_STRIDE": ("latent_out", 0),
    },
    types={"scale_stride": "i64"},
    divisible=("scale_stride",),
)
UP_PROJECTION = Kernel(
    "mla.up_projection",
    "mla_up_projection",
    {
        "WEIGHT_SCALE_STRIDES": (("weight_scale", 0), ("weight_scale", 1)),
    },
    strides_of("v", head=1, column=2),
    types={"scale_stride": "i64"},
)
# Dequantises a weight [rows, rank] that has a scale for each block.
WEIGHT_NUMBERS = Kernel(
    "mla.up_projection",
    "mla_weight_numbers",
    {
        "WEIGHT_SCALE_STRIDES": (("weight_scale", 0), ("weight_scale", 1)),
    },
)


@dataclass(frozen=True)
class LatentProblem:
    """The static part of one launch of `mla_latents`.

    The kernel stores the latents of new tokens to the cache, gathers keys from the cache, or does
    both in one launch. It can also return the new tokens themselves as keys.

    Attributes:
        rank, rope_dim: The number of columns of a latent and of its rope part.
        row: The number of columns of a row of the buffer for latents; 0 if there is no buffer.
        norm_eps: The epsilon of the RMS norm.
        neighbours: Whether the two members of a rotated pair are adjacent in the cache and in the
            buffers.
        page_size: The number of slots of a page.
        addressing: How the slots of new tokens are given; "none" if no tokens are stored.
        wrap_negative: Whether a negative index counts from the end.
        search_steps: The number of steps of the binary search for the sequence of a token or key.
        keys: How the keys to gather are given, as in `key_places`; "none" if no keys are gathered.
        keep: Whether the new tokens themselves become keys.
        group: The number of columns that share a scale of quantised latents; 1 if latents are not
            quantised.
        cap: An upper bound of a group's largest magnitude; 0 for no bound.
        rope_scale: The divisor of the rope columns of the buffer.
        units: Two numbers that divide the strides (in elements) of pages and slots, for the cache
            of latents and for the cache of rope columns.
        one_source: Whether the kernel uses the same code to load a row of a token and a row of the
            cache.
    """

    rank: int
    rope_dim: int
    row: int
    norm_eps: float
    neighbours: bool
    page_size: int
    addressing: str
    wrap_negative: bool
    search_steps: int
    keys: str
    keep: bool
    group: int
    cap: float
    rope_scale: float
    units: tuple[int, int]
    one_source: bool

    @property
    def store(self) -> bool:
        return self.addressing != "none"

    @property
    def gather(self) -> bool:
        return self.keys != "none"

    @property
    def fused(self) -> bool:
        """Whether the same program stores new tokens and computes their keys."""
        return self.store and self.gather

    @property
    def block_l(self) -> int:
        return next_power_of_2(max(self.rank, self.row))

    @property
    def pairs(self) -> int:
        return next_power_of_2(self.rope_dim // 2)


@dataclass(frozen=True)
class LatentConfig:
    """The tile sizes of `mla_latents`.

    Attributes:
        block_t: The number of rows of a program.
        num_warps: The number of warps of a program.
        checked: In a fused launch, the number of new tokens for which one program finds out whether
            they are keys. If a token is not a key, the program that checked it also stores it,
            block_t tokens at a time. If there are such tokens, a larger `checked` is slower.
    """

    block_t: int
    num_warps: int = 4
    checked: int = 16


def latent_grid(problem: LatentProblem, config: LatentConfig, tokens: int, rows: int) -> int:
    """Returns the number of programs of a launch, for tokens and for keys together."""
    block = max(config.checked, config.block_t) if problem.fused else config.block_t
    own = cdiv(tokens, block) if problem.store or problem.keep else 0
    return row_programs(problem, config, rows) + own


def row_programs(problem: LatentProblem, config: LatentConfig, rows: int) -> int:
    return cdiv(rows, config.block_t) if problem.gather else 0


@dataclass(frozen=True)
class UpProblem:
    """The static part of an up-projection of K keys: kv [K, H, N + V] = latents [K, L] @ weight^T.

    Attributes:
        num_heads: The number of heads, H.
        nope, v_dim: The number of columns of a head's key, N, and of a head's value, V.
        rank: The number of columns of a latent, L.
        latent, weight: The operands, which may be quantised, with strides (row,).
        k: The keys, with strides (row, head).
        joint: Whether the values of a head follow its keys in the same tensor. If not, the values
            are a separate tensor [H, V, K].
        scale_block: How many (rows, columns) of the weight share a scale; None if the weight is not
            quantised. A scale of the latents covers as many columns as a scale of the weight.
        k_scale, v_scale: The numbers by which the keys, and the values, are divided.
        limited: Whether a tensor gives the number of keys to compute in each run of keys. Programs
            skip tiles that have only other keys.
    """

    num_heads: int
    nope: int
    v_dim: int
    rank: int
    latent: Operand
    weight: Operand
    k: Operand
    joint: bool = True
    scale_block: tuple[int, int] | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    limited: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of the weight."""
        return self.num_heads * (self.nope + self.v_dim)

    @property
    def by_head(self) -> bool:
        """Whether a tile has rows of only one head, because heads are not adjacent in memory."""
        return not self.joint or self.k.strides[1] != self.nope + self.v_dim


@dataclass(frozen=True)
class UpConfig:
    """The tile sizes of the up-projection: block_m keys, and block_n rows and block_k columns of
    the weight."""

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


def up_statics(problem: UpProblem, config: UpConfig) -> Statics:
    """Returns the constants of the GEMM of a problem. If the problem is limited, there is one
    program for each tile."""
    return Statics(
        problem,
        config,
        scale_block=problem.scale_block or (1, 1),
        k_strides=problem.k.strides,
        flatten=config.flatten and not problem.limited,
        warp_specialize=config.warp_specialize and not problem.limited,
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
    """Returns why the kernel cannot compute a problem, because TMA cannot load an operand or no
    tile fits. Returns None if the kernel can compute the problem."""
    operands = {"latent": problem.latent, "kv_b_weight": problem.weight}
    if problem.joint:
        operands["the result"] = problem.k
    for name, operand in operands.items():
        size = operand.strides[0] * ELEMENT_BYTES[operand.dtype]
        if size % TMA_BYTES:
            return f"{name}: rows of {size} bytes are not multiples of {TMA_BYTES} bytes"
        if not operand.aligned:
            return f"{name} does not start at a multiple of {TMA_BYTES} bytes"
    if problem.joint and problem.by_head and (problem.nope + problem.v_dim) % 16:
        return f"{problem.nope + problem.v_dim} rows of a head are not whole tiles of 16"
    return None


DEQUANTIZE_TILE = (32, 128)


def dequantize_grid(rows: int, rank: int) -> tuple[int, int]:
    return cdiv(rows, DEQUANTIZE_TILE[0]), cdiv(rank, DEQUANTIZE_TILE[1])
