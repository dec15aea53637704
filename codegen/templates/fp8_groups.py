"""Quantisation to e4m3 codes, with one fp32 scale for each row and group of columns."""

import triton
import triton.language as tl

from tilewright.codegen.templates.rounding import rounded


@triton.jit
def quantized_groups(
    latent, CAP: tl.constexpr, GROUP: tl.constexpr, BLOCK_L: tl.constexpr
):  # fmt: skip
    """Quantises values [rows, BLOCK_L]. Returns (e4m3 codes [rows, BLOCK_L], scales [rows, BLOCK_L
    / GROUP]).

    CAP: the largest magnitude that a scale covers; 0 for no limit. Codes are zero if the inverse of
    the scale is not finite.
    """
    ROWS: tl.constexpr = latent.shape[0]
    groups = tl.reshape(latent.to(tl.float32), (ROWS, BLOCK_L // GROUP, GROUP))
    largest = tl.max(tl.abs(groups), axis=2)
    bound = largest
    if CAP > 0.0:
        bound = tl.minimum(largest, CAP)
    scale = tl.math.div_rn(bound, tl.full(bound.shape, 448.0, tl.float32))
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    inverse = tl.where((largest == 0.0) | (inverse == float("inf")), 0.0, inverse)
    codes = rounded(groups * inverse[:, :, None], tl.float8e4nv)
    return tl.reshape(codes, (ROWS, BLOCK_L)), scale
