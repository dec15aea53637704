"""The kernel spec of `head_products`: a product of each head with a weight of its own."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec, constants_of, operands_of

# Above, a library's GEMM takes more of the tensor core than a kernel that streams weights.
MOST_TOKENS = 64
BLOCK_WIDTH = 64
BLOCK_K = 64


@dataclass(frozen=True)
class HeadProblem:
    """out [T, H, width] = x [T, H, k] @ weights[h] [k, width].

    x: rows of k contiguous numbers, strides (token, head). weights: strides (head, k, column).
    """

    num_heads: int
    k: int
    width: int
    x: Operand
    weights: Operand


def head_spec(problem: HeadProblem, num_tokens: int, target: str) -> KernelSpec:
    """For up to so many tokens in one tile."""
    return KernelSpec.of(
        "mla.heads",
        "head_products",
        {
            **constants_of(problem, "num_heads", "k", "width"),
            "X_STRIDES": problem.x.strides,
            "WEIGHT_STRIDES": problem.weights.strides,
            "BLOCK_T": block_tokens(num_tokens),
            "BLOCK_W": BLOCK_WIDTH,
            "BLOCK_K": BLOCK_K,
        },
        {
            **operands_of(problem, "x", "weights"),
            "out_ptr": Operand(problem.x.dtype),
            "num_tokens": "i32",
        },
        ranges=("num_tokens",),
        dependent=True,
        num_warps=4,
        num_stages=3,
        target=target,
    )


def block_tokens(num_tokens: int) -> int:
    return min(max(next_power_of_2(num_tokens), 16), MOST_TOKENS)


def head_grid(problem: HeadProblem, num_tokens: int) -> tuple[int, int]:
    tiles = problem.num_heads * cdiv(problem.width, BLOCK_WIDTH)
    return tiles, cdiv(num_tokens, block_tokens(num_tokens))
