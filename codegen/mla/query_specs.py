"""The kernel spec of `mla_query`: queries rotated, or cast to 8 bits, before attention."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.operand import Operand, first_strides
from tilewright.codegen.spec import Constant, KernelSpec, constants_of, operands_of

# TMA: strides and base addresses in whole 16 bytes.
TMA_BYTES = 16
COUNTS = ("num_rows", "token_run", "rope_rows", "num_sequences")
Q_STRIDES = ("q_sequence_stride", "q_token_stride", "q_head_stride")


@dataclass(frozen=True)
class Rotation:
    """What is static about a rotation (RoPE) of queries or of keys.

    style: of ops/reference/rope.py, "none" for no rotation. cos, sin: tables, strides (row,
    column); no sin: a pair's sine follows its cosine in one table. full_width: they have a column
    for each rotated column, else for each pair. by_position: a row of them is a token's position,
    else its number.
    """

    style: str = "none"
    cos: Operand | None = None
    sin: Operand | None = None
    full_width: bool = False
    by_position: bool = False

    @property
    def constants(self) -> dict[str, Constant]:
        cos = self.cos.strides if self.cos else (0, 0)
        return {
            "ROPE_STYLE": self.style,
            **constants_of(self, "full_width", "by_position"),
            "COS_STRIDES": cos,
            "SIN_STRIDES": self.sin.strides if self.sin else cos,
        }

    @property
    def tensors(self) -> dict[str, Operand | None]:
        """The tables by parameter names."""
        return {"cos_ptr": self.cos, "sin_ptr": self.sin}


NO_ROTATION = Rotation()


@dataclass(frozen=True)
class QueryProblem:
    """The static part of a launch.

    q: all columns of the queries; divisible: names of its run-time strides that 16 divides. out:
    the rotated columns, or, whole, all of them, as where all are cast. scale: of a cast.
    row_offsets, starts, positions: where queries stand, strides (element,); search_steps: of a
    binary search for a row's sequence.
    k_rope, joined: rope keys and the keys that they are written to for all heads, strides (row,);
    None where they are not.
    """

    num_heads: int
    nope: int
    rope_dim: int
    q: Operand
    out: Operand
    rotation: Rotation = NO_ROTATION
    row_offsets: Operand | None = None
    starts: Operand | None = None
    positions: Operand | None = None
    scale: Operand | None = None
    k_rope: Operand | None = None
    joined: Operand | None = None
    search_steps: int = 0
    whole: bool = False
    divisible: tuple[str, ...] = ()

    @property
    def out_width(self) -> int:
        return self.nope + self.rope_dim if self.whole else self.rope_dim


def block_rows(problem: QueryProblem) -> int:
    """Rows of one program: 8 KiB and more of loads, with few enough registers for eight programs on
    a multiprocessor. Of whole queries, not cast, 16 take 2 to 5 % less time than 64 on an H200."""
    return 16 if problem.whole and problem.q.dtype == problem.out.dtype else 64


def query_spec(problem: QueryProblem, target: str) -> KernelSpec:
    p = problem
    return KernelSpec.of(
        "mla.query",
        "mla_query",
        {
            **constants_of(p, "num_heads", "nope", "rope_dim", "search_steps", "whole"),
            "NOPE_BLOCK": next_power_of_2(max(p.nope, 1)),
            "PAIRS": next_power_of_2(max(p.rope_dim // 2, 1)),
            **p.rotation.constants,
            "BATCH_STRIDES": first_strides(p.row_offsets, p.starts, p.positions),
            "KEY_STRIDES": first_strides(p.k_rope, p.joined),
            "BLOCK_R": block_rows(p),
        },
        {
            "q_ptr": p.q,
            **p.rotation.tensors,
            **operands_of(p, "row_offsets", "starts", "positions", "scale", "k_rope", "joined"),
            **operands_of(p, "out"),
            **dict.fromkeys(COUNTS, "i32"),
            **dict.fromkeys(Q_STRIDES, "i64"),
        },
        divisible=p.divisible,
        ranges=("token_run", "rope_rows"),
        target=target,
    )


def query_grid(problem: QueryProblem, num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, block_rows(problem)),)
