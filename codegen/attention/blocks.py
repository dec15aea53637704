"""Blocks of queries and keys that attention visits or skips as a whole.

A list of blocks describes, for each tile of QUERIES queries, the blocks of KEYS keys that at least
one query of the tile attends to. The list is int32 [B, H, query tiles, 1 + key blocks]. The first
number of a row is the count of these blocks. The blocks follow in ascending order, each as 2 *
block + whole. Here, whole is 1 if every query of the tile attends to all KEYS keys of the block.
Zeros fill the rest of the row. FlexAttention's BlockMask (Dong et al. 2024) is similar.

In an additive mask, -inf hides a key. The lowest finite number of the dtype hides a key only if
another key of the same query has an ordinary number: if all keys of a query have the lowest number,
the query attends to all of them. Kernels distinguish lowest numbers from ordinary numbers as
follows. Let E be the largest power of two of the mask's dtype, so that all numbers of the dtype lie
between -2 E and 2 E. Assume that the magnitude of no logit exceeds LOGIT * E. If the mask has
LOWEST * E or less at one key, the sum of logit and mask is at most -1.25 E. If the mask has
ORDINARY * E or more at another key, the sum of that key is at least -0.625 E. Kernels work in the
base-2 domain, and add no number below -1.76 E there (LOWEST in templates/softmax.py). Therefore the
first sum becomes at most -1.04 E, and the second sum at least -0.9 E. E is at least 2 ** 15, so
these sums differ by more than 150. exp2(-150) is zero in fp32, so the softmax weight of the first
key is exactly zero.
"""

from __future__ import annotations

from tilewright.codegen.kernel import strides_of

QUERIES = 128
KEYS = 64

# In units of E, which the module's docstring explains: the largest finite number that hides a key.
LOWEST = -1.75
# In units of E: the smallest ordinary number of a mask.
ORDINARY = -0.125
# In units of E: the largest magnitude that a logit may have.
LOGIT = 0.5

# The strides of a mask tensor [B, H, S, K], which are known at the launch.
MASK_STRIDES = strides_of("mask", sequence=0, head=1, row=2, column=3)
# The strides of the list of a mask's blocks, which are known at the launch.
LIST_STRIDES = strides_of("mask_blocks", "blocks", sequence=0, head=1, tile=2)


def mask_kind(mask: str) -> str:
    """Returns the kind of a mask tensor of this dtype: "bool" for "u8", "additive" for floats, and
    "none" for "" (there is no mask tensor)."""
    return "none" if not mask else "bool" if mask == "u8" else "additive"
