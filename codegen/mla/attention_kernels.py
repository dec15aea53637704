"""The kernels of MLA attention: `mla_attention`, `mla_merge`, and `mla_join`, which runs before a
library's attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS, LIST_STRIDES, MASK_STRIDES, QUERIES, mask_kind
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.kernel import Kernel, Statics, strides_of
from tilewright.codegen.mla.query_kernels import Q_STRIDES, TMA_BYTES

# The most sequences for which a program itself sorts the sequences by length, comparing all pairs.
MAX_SORTED = 64
# If values are fp8, kernels multiply the softmax weights by 2 ** FP8_SHIFT before they round them
# to fp8. The largest weight, 1, becomes 256, which is below fp8's maximum of 448. The weight
# 2 ** -17 becomes 2 ** -9, the smallest number of fp8 above zero.
FP8_SHIFT = 8.0
# The number of rows of one program of `mla_merge`.
MERGE_ROWS = 16
# The number of rows of one program of `mla_join`.
JOIN_ROWS = 32
_KEY_STRIDES = strides_of("k", sequence=-4, head=-2) | strides_of("rope", sequence=-3)

ATTENTION = Kernel(
    "mla.attention",
    "mla_attention",
    {"K_STRIDE": ("k", -3), "ROPE_STRIDE": ("rope", -2)},
    {
        **Q_STRIDES,
        **strides_of("q_rope", sequence=-4, token=-3, head=-2),
        **_KEY_STRIDES,
        **strides_of("v", sequence=-4, head=-2),
        **strides_of("positions", sequence=-2),
        "positions_stride": ("positions", -1),
        **MASK_STRIDES,
        **LIST_STRIDES,
    },
    ("mask", "mask_blocks"),
    types={"factor": "fp32", "v_stride": "i64"},
    ranges=("row_tiles", "head_group", "table_rows"),
    divisible=("v_stride",),
    unaligned=("lse",),
)
# Merges the results of several chunks of keys.
MERGE = Kernel(
    "mla.merge",
    "mla_merge",
    types=dict.fromkeys(("num_rows", "part_stride", "lse_stride"), "i64"),
    unaligned=("lses",),
)
# Copies the unrotated and the rotated part of each key side by side.
JOIN = Kernel(
    "mla.join",
    "mla_join",
    {"K_STRIDE": ("k", -3), "ROPE_STRIDE": ("rope", -2)},
    _KEY_STRIDES,
    ranges=("run",),
)


@dataclass(frozen=True)
class AttentionProblem:
    """The static part of an MLA attention call.

    Attributes:
        nope, rope, v_dim: The number of columns of a head's unrotated part, of its rotated part,
            and of its values.
        dtype: The dtype of queries, keys and values.
        out: The dtype of the result.
        has_lse: Whether the call returns the log-sum-exp.
        ragged: Whether sequences have different lengths.
        positioned: Whether a tensor gives the positions of queries.
        attn_mask: The dtype of the mask tensor: "u8" for booleans, a float dtype for a mask that is
            added, and "" if there is no mask tensor.
        v_by_key: Whether v is contiguous along the keys. If not, v is contiguous along the columns
            of a head.
        sequences: The number of sequences, rounded up to a power of two; 1 if they are not ragged.
        tma: Whether descriptors can load q, k and v.
        rope_tma: Whether a descriptor can load the rope columns of keys.
        joint: Whether each value follows its key in memory, and keys and values fill their tiles.
    """

    num_heads: int
    nope: int
    rope: int
    v_dim: int
    dtype: str
    out: str
    has_lse: bool = False
    ragged: bool = False
    positioned: bool = False
    attn_mask: str = ""
    v_by_key: bool = False
    sequences: int = 1
    mask: str = "causal"
    window: int = 0
    tma: bool = False
    rope_tma: bool = False
    joint: bool = False

    @property
    def is_fp8(self) -> bool:
        return self.dtype.startswith("fp8")

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The widths of the tiles of nope, rope and v: powers of two that tensor cores support."""
        least = 32 if self.is_fp8 else 16
        dims = (self.nope, self.rope, self.v_dim)
        nope, rope, v = (max(next_power_of_2(n), least) for n in dims)
        return nope, rope, v

    @property
    def key_bytes(self) -> int:
        """The number of bytes of a key (without its rope columns) and its value, for one head."""
        return (self.nope + self.v_dim) * ELEMENT_BYTES[self.dtype]


def attention_statics(problem: AttentionProblem, config: PrefillConfig) -> Statics:
    """Returns the constants of `mla_attention`, except for those of a rotation."""
    p = problem
    nope_block, rope_block, v_block = p.blocks
    return Statics(
        config,
        problem,
        sorted=p.ragged and p.sequences <= MAX_SORTED,
        nope_block=nope_block,
        rope_block=rope_block,
        v_block=v_block,
        v_alignment=TMA_BYTES // ELEMENT_BYTES[p.dtype],
        mask_kind=mask_kind(p.attn_mask),
        queries=QUERIES,
        keys=KEYS,
        shift=FP8_SHIFT if p.is_fp8 else 0.0,
        rope_tma=config.tma and p.rope_tma,
        joint=config.tma and p.joint,
    )


def merge_statics(parts: int, v_dim: int) -> Statics:
    """Returns the constants of `mla_merge` for a number of partial results."""
    return Statics(parts=parts, v_dim=v_dim, v_block=next_power_of_2(v_dim), block_r=MERGE_ROWS)


def join_statics(problem: AttentionProblem) -> Statics:
    """Returns the constants of `mla_join`."""
    nope_block, rope_block, _ = problem.blocks
    return Statics(problem, nope_block=nope_block, rope_block=rope_block, block_r=JOIN_ROWS)


def join_grid(num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, JOIN_ROWS),)


def merge_grid(num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, MERGE_ROWS),)
