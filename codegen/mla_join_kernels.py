"""Kernel specs that put both parts of MLA's keys side by side, for a library's attention."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.mla_attention_kernels import AttentionProblem
from tilewright.codegen.qkv_heads import cdiv, next_power_of_2
from tilewright.codegen.spec import Constant, KernelSpec

# Rows of one program: of `mla_join`, and of `mla_rope_keys`.
JOIN_ROWS = 32
ROPE_ROWS = 128


@dataclass(frozen=True)
class RopeKeysProblem:
    """The static part of writing rope keys [K, R] to the first columns of every head's row.

    dtype: of both. head_stride: of the rows that are written, H of them to a key. aligned: whether
    tensors and strides are in whole 16 bytes.
    """

    dtype: str
    num_heads: int
    rope: int
    rope_stride: int
    head_stride: int
    aligned: bool


def rope_keys_spec(problem: RopeKeysProblem, target: str) -> KernelSpec:
    constants: dict[str, Constant] = {
        "NUM_HEADS": problem.num_heads,
        "ROPE": problem.rope,
        "ROPE_BLOCK": next_power_of_2(problem.rope),
        "ROPE_STRIDE": problem.rope_stride,
        "HEAD_STRIDE": problem.head_stride,
        "BLOCK_R": ROPE_ROWS,
    }
    signature = {"rope_ptr": f"*{problem.dtype}", "out_ptr": f"*{problem.dtype}", "num_rows": "i32"}
    return KernelSpec.make(
        "mla_join",
        "mla_rope_keys",
        constants,
        signature,
        divisible16=["rope_ptr", "out_ptr"] if problem.aligned else [],
        num_warps=4,
        target=target,
    )


def rope_keys_grid(num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, ROPE_ROWS),)


def join_spec(problem: AttentionProblem, target: str) -> KernelSpec:
    """The `mla_join` kernel that puts both parts of a problem's keys side by side."""
    nope_block, rope_block, _ = problem.blocks
    constants: dict[str, Constant] = {
        "NUM_HEADS": problem.num_heads,
        "NOPE": problem.nope,
        "ROPE": problem.rope,
        "NOPE_BLOCK": nope_block,
        "ROPE_BLOCK": rope_block,
        "K_STRIDE": problem.k_stride,
        "ROPE_STRIDE": problem.rope_stride,
        "BLOCK_R": JOIN_ROWS,
    }
    signature = {
        "k_ptr": f"*{problem.dtype}",
        "rope_ptr": f"*{problem.dtype}",
        "out_ptr": f"*{problem.dtype}",
        "num_rows": "i32",
        "run": "i32",
        "k_sequence_stride": "i64",
        "k_head_stride": "i64",
        "rope_sequence_stride": "i64",
    }
    return KernelSpec.make(
        "mla_join",
        "mla_join",
        constants,
        signature,
        divisible16=[name for name in problem.aligned if name in signature],
        ranges={"run": (1, 2**31 - 1)},
        num_warps=4,
        target=target,
    )


def join_grid(num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, JOIN_ROWS),)
