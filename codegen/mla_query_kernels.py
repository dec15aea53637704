"""The kernel spec of `mla_query`: queries rotated, or cast to 8 bits, before attention."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.qkv_heads import cdiv, next_power_of_2
from tilewright.codegen.spec import Constant, KernelSpec

POINTERS = (
    "q_ptr",
    "cos_ptr",
    "sin_ptr",
    "row_offsets_ptr",
    "starts_ptr",
    "positions_ptr",
    "scale_ptr",
    "out_ptr",
)
COUNTS = ("num_rows", "token_run", "rope_rows", "num_sequences")
Q_STRIDES = ("q_sequence_stride", "q_token_stride", "q_head_stride")


@dataclass(frozen=True)
class QueryProblem:
    """The static part of a launch.

    types: Triton's element type of every tensor of POINTERS, None for absent ones. rope_style
    "none": no rotation. full_width: cos and sin have rope_dim columns, else half; table strides
    (row, column). batch_strides: of row_offsets, starts and positions; search_steps: of a binary
    search for a row's sequence. whole: the other columns too, as where all are cast. aligned:
    names of pointers on 16 bytes and of strides of whole 16 elements.
    """

    types: tuple[tuple[str, str | None], ...]
    num_heads: int
    nope: int
    rope_dim: int
    rope_style: str = "none"
    full_width: bool = False
    cos_strides: tuple[int, int] = (0, 0)
    sin_strides: tuple[int, int] = (0, 0)
    by_position: bool = False
    batch_strides: tuple[int, int, int] = (0, 0, 0)
    search_steps: int = 0
    whole: bool = False
    aligned: tuple[str, ...] = ()

    @property
    def out_width(self) -> int:
        return self.nope + self.rope_dim if self.whole else self.rope_dim


# Rows of one program: 8 KiB and more of loads, with few enough registers for eight programs an SM.
BLOCK_R = 64


def query_spec(problem: QueryProblem, target: str) -> KernelSpec:
    constants: dict[str, Constant] = {
        "NUM_HEADS": problem.num_heads,
        "NOPE": problem.nope,
        "NOPE_BLOCK": next_power_of_2(max(problem.nope, 1)),
        "ROPE_DIM": problem.rope_dim,
        "PAIRS": next_power_of_2(max(problem.rope_dim // 2, 1)),
        "ROPE_STYLE": problem.rope_style,
        "FULL_WIDTH": problem.full_width,
        "COS_STRIDES": problem.cos_strides,
        "SIN_STRIDES": problem.sin_strides,
        "BY_POSITION": problem.by_position,
        "BATCH_STRIDES": problem.batch_strides,
        "SEARCH_STEPS": problem.search_steps,
        "WHOLE": problem.whole,
        "BLOCK_R": BLOCK_R,
    }
    types = dict(problem.types)
    absent = {name: None for name in POINTERS if types[name] is None}
    signature = {name: f"*{types[name]}" for name in POINTERS if types[name] is not None}
    signature |= dict.fromkeys(COUNTS, "i32") | dict.fromkeys(Q_STRIDES, "i64")
    return KernelSpec.make(
        "mla_query",
        "mla_query",
        {**constants, **absent},
        signature,
        divisible16=[name for name in problem.aligned if name in signature],
        ranges={"token_run": (1, 2**31 - 1), "rope_rows": (1, 2**31 - 1)},
        num_warps=4,
        target=target,
    )


def query_grid(num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, BLOCK_R),)
