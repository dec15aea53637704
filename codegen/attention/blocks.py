"""Blocks of queries and keys that attention visits or skips as a whole.

A list of blocks has, for each tile of QUERIES queries, the blocks of KEYS keys that some query of
the tile sees: int32 [B, H, query tiles, 1 + key blocks]. The first number is the count of these
blocks. Then come the blocks in ascending order, each as 2 * block + whole, where whole is 1 if
every query of the tile sees all KEYS keys of the block. Zeros fill the rest. The idea is
FlexAttention's BlockMask (Dong et al. 2024).

In an additive mask, -inf hides a key. The lowest finite number alone does not: a query whose keys
all have it attends to all of them. Beside a key with an ordinary number, it does hide its key. Let
E be the largest power of two of the mask's dtype, whose numbers lie between -2 E and 2 E, and let
no logit exceed LOGIT * E. Then a key with LOWEST * E or less has a sum of at most -1.25 E, and a
key with ORDINARY * E or more has a sum of at least -0.625 E. In the base-2 domain, where kernels
add no number below -1.76 E (LOWEST of templates/softmax.py), the sums are at most -1.04 E and at
least -0.9 E. E is at least 2 ** 15, so these sums differ by more than 150, and exp2(-150) is zero
in fp32: the weight of the lower one is exactly zero.
"""

from __future__ import annotations

from tilewright.codegen.kernel import strides_of

QUERIES = 128
KEYS = 64

# In units of E.
LOWEST = -1.75
ORDINARY = -0.125
LOGIT = 0.5

# Strides of a mask tensor [B, H, S, K] and of its list of blocks, known at the launch.
MASK_STRIDES = strides_of("mask", sequence=0, head=1, row=2, column=3)
LIST_STRIDES = strides_of("mask_blocks", "blocks", sequence=0, head=1, tile=2)


def mask_kind(mask: str) -> str:
    """Returns the kind of a mask tensor: "bool" for the dtype u8, "additive" for a float dtype,
    "none" for "" (no mask tensor)."""
    return "none" if not mask else "bool" if mask == "u8" else "additive"
