"""The kernel spec that puts both parts of MLA's keys side by side, for a library's attention."""

from __future__ import annotations

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.mla.attention_specs import AttentionProblem
from tilewright.codegen.spec import Constant, KernelSpec

# Rows of one program.
JOIN_ROWS = 32


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
        "mla.join",
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
