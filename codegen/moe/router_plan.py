"""Plans of a router, by the number of tokens.

For few tokens, the weight is read once. There are as many programs as multiprocessors, and each
program reads a part of the rows and columns. For many tokens, tiles of tokens are as large as
possible while all multiprocessors still have work. The choice is then a separate launch, because
programs that also choose would end later than other programs.
"""

from __future__ import annotations

from functools import cache

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.moe.router_kernels import RouterConfig, RouterProblem
from tilewright.codegen.targets import Target

# The smallest tile of a tensor core.
LEAST_TILE = 16
# The largest number of tokens for which tiles have LEAST_TILE tokens and the last program of a tile
# chooses the experts.
FEW_TOKENS = 128
# The smallest number of tokens for the largest tiles of tokens.
MANY_TOKENS = 1024
# The largest number of tokens for which tilewright's kernel multiplies fp32 numbers. With more
# tokens, the library multiplies them.
LIBRARY_TOKENS = 64
# The largest number of experts of a program if there are many tokens.
WIDE_EXPERTS = 128
# The largest number of parts that the sum over columns is split into.
MOST_SPLITS = 32
# The number of fp32 logits from which one warp chooses.
CHOSEN_BY_WARP = 256
# The smallest weight, in bytes, for which two programs share a multiprocessor.
LARGE_WEIGHT = 1 << 20


@cache
def router_config(problem: RouterProblem, num_tokens: int, target: Target) -> RouterConfig:
    """Returns the tile sizes for up to `num_tokens` tokens."""
    if not problem.weight or uses_library(problem, num_tokens):
        rows, warps = _choice(problem, num_tokens)
        return RouterConfig(1, 1, 1, 1, rows, 1, 1, chooses=False, choose_warps=warps)
    few = num_tokens <= FEW_TOKENS
    block_t = LEAST_TILE if few else 64 if num_tokens >= MANY_TOKENS else 32
    block_e = _expert_tile(problem, num_tokens)
    block_k = 64 if problem.widened or not few else 128
    tiles = cdiv(num_tokens, block_t) * cdiv(problem.num_experts, block_e)
    wanted = target.num_sms * (2 if few and _weight_bytes(problem) >= LARGE_WEIGHT else 1)
    blocks = cdiv(problem.hidden, block_k)
    splits = max(min(wanted // tiles, blocks, MOST_SPLITS), 1)
    splits = cdiv(blocks, cdiv(blocks, splits))  # so that each part has a block
    rows, warps = _choice(problem, min(num_tokens, block_t) if few else num_tokens)
    if few:
        return RouterConfig(block_t, block_e, block_k, splits, rows, max(warps, 2), 3)
    return RouterConfig(
        block_t, block_e, block_k, splits, rows, 4, 3, chooses=False, choose_warps=warps
    )


def uses_library(problem: RouterProblem, num_tokens: int) -> bool:
    """Whether the library computes the product, which it does for fp32 products of many tokens."""
    return problem.widened and num_tokens > LIBRARY_TOKENS


def _expert_tile(problem: RouterProblem, num_tokens: int) -> int:
    covered = max(next_power_of_2(problem.num_experts), LEAST_TILE)
    if num_tokens <= LEAST_TILE or problem.widened:
        return LEAST_TILE
    return min(covered, 32 if num_tokens <= FEW_TOKENS else WIDE_EXPERTS)


def _choice(problem: RouterProblem, num_tokens: int) -> tuple[int, int]:
    """Returns (number of tokens that a program chooses for at the same time, number of its
    warps)."""
    rows = min(next_power_of_2(num_tokens), 4)
    warps = next_power_of_2(cdiv(rows * problem.columns, CHOSEN_BY_WARP))
    return rows, min(max(warps, 1), 8)


def _weight_bytes(problem: RouterProblem) -> int:
    return problem.num_experts * problem.hidden * ELEMENT_BYTES[problem.weight]
