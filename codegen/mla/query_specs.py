"""The kernel spec of `mla_query`: queries rotated, or cast to 8 bits, before attention."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.spec import Constant, KernelSpec

POINTERS = (
    "q_ptr",
    "cos_ptr",
    "sin_ptr",
    "row_offsets_ptr",
    "starts_ptr",
    "positions_ptr",
    "scale_ptr",
    "k_rope_ptr",
    "joined_ptr",
    "out_ptr",
)
COUNTS = ("num_rows", "token_run", "rope_rows", "num_sequences")
Q_STRIDES = ("q_sequence_stride", "q_token_stride", "q_head_stride")


@dataclass(frozen=True)
class Rotation:
    """What is static about a rotation of queries.

    style: of ops/reference/rope.py, "none" for no rotation. cos_type, sin_type: Triton's element
    types; no sin_type: a pair's sine follows its cosine in one table. full_width: cos and sin
    have a column for each of q's rope columns, else for each pair; table strides (row, column).
    by_position: a row of them is a token's position, else its number.
    """

    style: str = "none"
    cos_type: str | None = None
    sin_type: str | None = None
    full_width: bool = False
    cos_strides: tuple[int, int] = (0, 0)
    sin_strides: tuple[int, int] = (0, 0)
    by_position: bool = False

    @property
    def constants(self) -> dict[str, Constant]:
        return {
            "ROPE_STYLE": self.style,
            "FULL_WIDTH": self.full_width,
            "COS_STRIDES": self.cos_strides,
            "SIN_STRIDES": self.sin_strides,
            "BY_POSITION": self.by_position,
        }

    @property
    def pointers(self) -> dict[str, str | None]:
        """Types of the tables by parameter names, None for absent ones."""
        types = {"cos_ptr": self.cos_type, "sin_ptr": self.sin_type}
        return {name: found and f"*{found}" for name, found in types.items()}


NO_ROTATION = Rotation()


@dataclass(frozen=True)
class QueryProblem:
    """The static part of a launch.

    types: Triton's element type of every other tensor of POINTERS, None for absent ones.
    batch_strides: of row_offsets, starts and positions; search_steps: of a binary search for a
    row's sequence. whole: the other columns too, as where all are cast. key_strides: of rows
    of rope keys and of joined keys, where those are written too. aligned: names of pointers on 16
    bytes and of strides of whole 16 elements.
    """

    types: tuple[tuple[str, str | None], ...]
    num_heads: int
    nope: int
    rope_dim: int
    rotation: Rotation = NO_ROTATION
    batch_strides: tuple[int, int, int] = (0, 0, 0)
    search_steps: int = 0
    whole: bool = False
    key_strides: tuple[int, int] = (0, 0)
    aligned: tuple[str, ...] = ()

    @property
    def out_width(self) -> int:
        return self.nope + self.rope_dim if self.whole else self.rope_dim


def block_rows(problem: QueryProblem) -> int:
    """Rows of one program: 8 KiB and more of loads, with few enough registers for eight programs on
    a multiprocessor. Of whole queries, not cast, 16 take 2 to 5 % less time than 64 on an H200."""
    types = dict(problem.types)
    return 16 if problem.whole and types["q_ptr"] == types["out_ptr"] else 64


def query_spec(problem: QueryProblem, target: str) -> KernelSpec:
    constants: dict[str, Constant] = {
        "NUM_HEADS": problem.num_heads,
        "NOPE": problem.nope,
        "NOPE_BLOCK": next_power_of_2(max(problem.nope, 1)),
        "ROPE_DIM": problem.rope_dim,
        "PAIRS": next_power_of_2(max(problem.rope_dim // 2, 1)),
        **problem.rotation.constants,
        "BATCH_STRIDES": problem.batch_strides,
        "SEARCH_STEPS": problem.search_steps,
        "WHOLE": problem.whole,
        "KEY_STRIDES": problem.key_strides,
        "BLOCK_R": block_rows(problem),
    }
    types = {name: found and f"*{found}" for name, found in problem.types}
    types |= problem.rotation.pointers
    absent = {name: None for name in POINTERS if types[name] is None}
    signature = {name: found for name in POINTERS if (found := types[name]) is not None}
    signature |= dict.fromkeys(COUNTS, "i32") | dict.fromkeys(Q_STRIDES, "i64")
    return KernelSpec.make(
        "mla.query",
        "mla_query",
        {**constants, **absent},
        signature,
        divisible16=[name for name in problem.aligned if name in signature],
        ranges={"token_run": (1, 2**31 - 1), "rope_rows": (1, 2**31 - 1)},
        num_warps=4,
        target=target,
    )


def query_grid(problem: QueryProblem, num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, block_rows(problem)),)
