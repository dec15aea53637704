"""The kernels that multiply each head of x by the head's own weight."""

from __future__ import annotations

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.dequantize import tile_constants
from tilewright.codegen.formats import Quantization
from tilewright.codegen.kernel import Kernel
from tilewright.codegen.spec import Constant

# The largest number of tokens for the kernels of this module. For more tokens, a library's GEMM is
# faster, because it uses the tensor cores better than a kernel that streams weights.
MOST_TOKENS = 64
# The number of columns of the result in a tile.
BLOCK_WIDTH = 64
# The largest number of columns of a step over K.
BLOCK_K = 64
# The largest number of columns of a step over K for a weight of 4- or 8-bit codes whose columns K
# counts. A row of codes takes fewer bytes than a row of 16-bit numbers, so the step is longer than
# BLOCK_K.
CODED_BLOCK_K = 128

HEAD_PRODUCTS = Kernel(
    "mla.heads",
    "head_products",
    {
        "X_STRIDES": (("x", 0), ("x", 1)),
        "WEIGHT_STRIDES": (("weights", 0), ("weights", 1), ("weights", 2)),
        "SCALE_STRIDES": (("scale", 0), ("scale", 1)),
    },
    ranges=("num_tokens",),
    num_stages=3,
)
# The same products with a weight of codes, whose tiles the kernel decodes.
CODED_PRODUCTS = Kernel(
    "mla.heads",
    "coded_head_products",
    {
        "X_STRIDES": (("x", 0), ("x", 1)),
        "WEIGHT_STRIDES": (("weight", 0), ("weight", 1)),
    },
    ranges=("num_tokens",),
    unaligned=("factor",),
    num_stages=3,
)


def scaled_step(block: int, *starts: int) -> int | None:
    """Returns the length of a step over K, such that all codes that a column of the weight has in
    the step share a scale. Returns None if no step of at least 16 is possible.

    block: how many indices of K share a scale. starts: distances from multiples of `block` to
    indices at which heads begin. Every step must divide all of these distances.
    """
    steps = (BLOCK_K, BLOCK_K // 2, BLOCK_K // 4)
    return next((n for n in steps if all(size % n == 0 for size in (block, *starts))), None)


def coded_constants(q: Quantization, k: int, width: int, *, k_is_row: bool) -> dict[str, Constant]:
    """Returns the tile sizes of `coded_head_products`, except BLOCK_T, and the constants with which
    it decodes tiles.

    k, width: the shape of a head's weight. k_is_row: whether K counts rows of the coded weight.
    """
    block_k = BLOCK_K if k_is_row or k <= BLOCK_K else CODED_BLOCK_K
    hidden, columns = (width, BLOCK_WIDTH) if k_is_row else (k, block_k)
    tile = tile_constants(q, 0, hidden, columns)
    return {"K_IS_ROW": k_is_row, "BLOCK_W": BLOCK_WIDTH, "BLOCK_K": block_k, **tile}


def block_tokens(num_tokens: int) -> int:
    return min(max(next_power_of_2(num_tokens), 16), MOST_TOKENS)


def head_grid(num_heads: int, width: int, num_tokens: int) -> tuple[int, int]:
    tiles = num_heads * cdiv(width, BLOCK_WIDTH)
    return tiles, cdiv(num_tokens, block_tokens(num_tokens))
