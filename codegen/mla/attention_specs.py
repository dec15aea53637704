"""MLA attention problems as plain data, and the kernel specs of `mla_attention` and `mla_merge`.

Nothing here touches torch or a GPU: a problem is what is static about one call site, a config is a
choice of tiles, and the two give a KernelSpec and a launch grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.mla.query_specs import NO_ROTATION, Rotation
from tilewright.codegen.spec import Constant, KernelSpec

# TMA: addresses in whole 16 bytes.
TMA_BYTES = 16
MASKS = ("none", "causal", "sliding_window", "chunked")
# Sequences whose order by length a program works out itself: it compares each with each.
MAX_SORTED = 64
# Weights of fp8 values are this many powers of two too large: the largest is 256, of at most 448,
# and one part in 2 ** 17 is still a normal number.
FP8_SHIFT = 8.0
INDEX_NAMES = (
    "query_offsets_ptr",
    "key_offsets_ptr",
    "query_starts_ptr",
    "key_starts_ptr",
    "key_lengths_ptr",
    "positions_ptr",
    "block_table_ptr",
)
# Rows of one program of `mla_merge`.
MERGE_ROWS = 16
SCALE_NAMES = ("q_scale_ptr", "k_scale_ptr", "v_scale_ptr")
COUNTS = (
    "num_sequences",
    "num_queries",
    "num_keys",
    "row_tiles",
    "head_group",
    "num_pages",
    "table_rows",
)
STRIDES = (
    "q_sequence_stride",
    "q_head_stride",
    "q_token_stride",
    "q_rope_sequence_stride",
    "q_rope_head_stride",
    "q_rope_token_stride",
    "k_sequence_stride",
    "k_head_stride",
    "v_sequence_stride",
    "v_head_stride",
    "v_stride",
    "rope_sequence_stride",
    "rope_head_stride",
    "positions_sequence_stride",
    "positions_stride",
    "table_stride",
    "mask_sequence_stride",
    "mask_head_stride",
    "mask_row_stride",
    "mask_column_stride",
)


@dataclass(frozen=True)
class AttentionProblem:
    """The static part of an MLA attention call.

    Strides count elements. rope: 0 where keys have one part only. v_by_key: a dim's keys are
    contiguous, not a key's dims. page_size: 0 where rope keys are rows; then page_stride is not
    read. sequences: a power of two not below their number, 1 where not ragged. mask_kind: "none",
    "bool" or "additive". indices: (name, Triton type) of the index tensors there are. scales: names
    of those there are. aligned: names of pointers on 16 bytes and of strides that are multiples of
    16 elements. tma: descriptors can reach q, k and v; rope_tma: the rope keys too. joint: a key's
    values follow it, and both fill their tiles. rotation: of q's rope part, if it is not done.
    """

    dtype: str
    out_dtype: str
    num_heads: int
    nope: int
    rope: int
    v_dim: int
    k_stride: int
    rope_stride: int
    rope_dtype: str
    v_by_key: bool = False
    page_size: int = 0
    page_stride: int = 0
    ragged: bool = False
    sequences: int = 1
    mask: str = "causal"
    window: int = 0
    mask_kind: str = "none"
    mask_dtype: str = "u8"
    lse: bool = False
    indices: tuple[tuple[str, str], ...] = ()
    scales: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()
    tma: bool = False
    rope_tma: bool = False
    joint: bool = False
    rotation: Rotation = NO_ROTATION

    @property
    def is_fp8(self) -> bool:
        return self.dtype.startswith("fp8")

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Tile widths of nope, rope and v: powers of two a tensor core takes."""
        least = 32 if self.is_fp8 else 16
        nope, rope, v = (max(next_power_of_2(n), least) for n in self.dims)
        return nope, rope, v

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.nope, self.rope, self.v_dim

    @property
    def key_bytes(self) -> int:
        """Bytes of one head's key and value."""
        return (self.nope + self.v_dim) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class AttentionConfig:
    """Tiles of block_m queries and block_n keys.

    tma: loads by descriptors. one_loop: masked and whole key blocks in one. chained: both parts of
    a score in one accumulator. promote: the tensor core's sums of each block are added in fp32.
    maxnreg: registers of a thread at most.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = True
    warp_specialize: bool = False
    one_loop: bool = False
    chained: bool = True
    promote: bool = False
    maxnreg: int | None = None

    def __str__(self) -> str:
        flags = ("tma", "one_loop", "chained", "promote")
        words = [name.replace("_", " ") for name in flags if getattr(self, name)]
        words += ["ws"] if self.warp_specialize else []
        words += [f"r{self.maxnreg}"] if self.maxnreg else []
        tile = f"{self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}"
        return " ".join([tile, *words])


def attention_spec(problem: AttentionProblem, config: AttentionConfig, target: str) -> KernelSpec:
    """The `mla_attention` kernel of a problem."""
    nope_block, rope_block, v_block = problem.blocks
    constants: dict[str, Constant] = {
        "NUM_HEADS": problem.num_heads,
        "SEQUENCES": problem.sequences,
        "SORTED": problem.ragged and problem.sequences <= MAX_SORTED,
        "RAGGED": problem.ragged,
        "NOPE": problem.nope,
        "ROPE": problem.rope,
        "V_DIM": problem.v_dim,
        "NOPE_BLOCK": nope_block,
        "ROPE_BLOCK": rope_block,
        "V_BLOCK": v_block,
        "K_STRIDE": problem.k_stride,
        "V_BY_KEY": problem.v_by_key,
        "V_ALIGNMENT": TMA_BYTES // ELEMENT_BYTES[problem.dtype],
        "ROPE_STRIDE": problem.rope_stride,
        "PAGE_SIZE": max(problem.page_size, 1),
        "PAGE_STRIDE": problem.page_stride,
        "MASK": problem.mask,
        "WINDOW": problem.window,
        "MASK_KIND": problem.mask_kind,
        **problem.rotation.constants,
        "SHIFT": FP8_SHIFT if problem.is_fp8 else 0.0,
        "PROMOTE": config.promote,
        "CHAINED": config.chained,
        "ONE_LOOP": config.one_loop,
        "TMA": config.tma,
        "ROPE_TMA": config.tma and problem.rope_tma,
        "JOINT": config.tma and problem.joint,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "WARP_SPECIALIZE": config.warp_specialize,
    }
    arguments = _pointers(problem)
    arguments |= dict.fromkeys(COUNTS, "i32") | {"factor": "fp32"} | dict.fromkeys(STRIDES, "i64")
    ranges = dict.fromkeys(("row_tiles", "head_group", "table_rows"), (1, 2**31 - 1))
    return _spec(
        "mla_attention", constants, arguments, target, config.num_warps, config.num_stages,
        problem.aligned, ranges, config.maxnreg,
    )  # fmt: skip


def _pointers(problem: AttentionProblem) -> dict[str, str | None]:
    own = f"*{problem.dtype}"
    indices = dict(problem.indices)
    return {
        "q_ptr": own,
        "q_rope_ptr": own if problem.rope else None,
        "k_ptr": own,
        "v_ptr": own,
        "rope_ptr": f"*{problem.rope_dtype}" if problem.rope else None,
        "out_ptr": f"*{problem.out_dtype}",
        "lse_ptr": "*fp32" if problem.lse else None,
        **{name: f"*{indices[name]}" if name in indices else None for name in INDEX_NAMES},
        "mask_ptr": None if problem.mask_kind == "none" else f"*{problem.mask_dtype}",
        **{name: "*fp32" if name in problem.scales else None for name in SCALE_NAMES},
        **problem.rotation.pointers,
    }


def merge_spec(
    parts: int, v_dim: int, part_dtype: str, out_dtype: str, lse: bool, target: str
) -> KernelSpec:
    """The `mla_merge` kernel for `parts` partial results."""
    constants: dict[str, Constant] = {
        "PARTS": parts,
        "V_DIM": v_dim,
        "V_BLOCK": next_power_of_2(v_dim),
        "BLOCK_R": MERGE_ROWS,
    }
    arguments: dict[str, str | None] = {
        "parts_ptr": f"*{part_dtype}",
        "lses_ptr": "*fp32",
        "out_ptr": f"*{out_dtype}",
        "lse_ptr": "*fp32" if lse else None,
        "num_rows": "i64",
        "part_stride": "i64",
        "lse_stride": "i64",
    }
    return _spec("mla_merge", constants, arguments, target, 4, 2, ("parts_ptr", "out_ptr"), {})


def _spec(
    kernel: str,
    constants: Mapping[str, Constant],
    arguments: Mapping[str, str | None],
    target: str,
    num_warps: int,
    num_stages: int,
    aligned: tuple[str, ...],
    ranges: Mapping[str, tuple[int, int]],
    maxnreg: int | None = None,
) -> KernelSpec:
    """Absent tensors become constants, the rest is the signature."""
    absent = {name: None for name, type_name in arguments.items() if type_name is None}
    signature = {name: type_name for name, type_name in arguments.items() if type_name is not None}
    return KernelSpec.make(
        f"mla.{kernel.removeprefix('mla_')}",
        kernel,
        {**constants, **absent},
        signature,
        divisible16=[name for name in aligned if name in signature],
        ranges=ranges,
        num_warps=num_warps,
        num_stages=num_stages,
        target=target,
        maxnreg=maxnreg,
    )


def merge_grid(num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, MERGE_ROWS),)


@dataclass(frozen=True)
class AttentionSizes:
    """What a launch knows of the extents without reading the device.

    num_queries, num_keys: of each sequence where dense, of all together where ragged. longest: a
    bound on the queries of one sequence.
    """

    num_sequences: int
    num_queries: int
    num_keys: int
    longest: int


def row_tiles(problem: AttentionProblem, config: AttentionConfig, sizes: AttentionSizes) -> int:
    """Row tiles of one dense sequence, or at most of all ragged ones; at least 1."""
    if not problem.ragged:
        return max(cdiv(sizes.num_queries, config.block_m), 1)
    # Each sequence has at most one tile that is not full.
    together = cdiv(sizes.num_queries, config.block_m) + sizes.num_sequences - 1
    apart = sizes.num_sequences * cdiv(sizes.longest, config.block_m)
    return max(min(together, apart), 1)


def attention_grid(
    problem: AttentionProblem, sizes: AttentionSizes, tiles: int, head_group: int
) -> tuple[int]:
    """One program per tile; those of a last group that is not full have nothing to do."""
    pairs = problem.num_heads * (1 if problem.ragged else sizes.num_sequences)
    return (cdiv(pairs, head_group) * head_group * tiles,)
