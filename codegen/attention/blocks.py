"""Blocks of queries and keys that attention takes or leaves out as a whole.

A list of blocks says, for each tile of QUERIES queries, which blocks of KEYS keys some query of it
sees: int32 [B, H, query tiles, 1 + key blocks]. The first number is how many there are; then come
the blocks in ascending order, each as 2 * block + whole, where whole is 1 if every query of the
tile sees all KEYS keys of it; then zeros. The idea is FlexAttention's BlockMask (Dong et al. 2024).

Of a mask whose numbers are added -inf hides a key. The least finite number does not: a query that
has no other attends to all its keys. Beside an ordinary number it does. Let E be the largest power
of two of the mask's dtype, which reaches from -2 E to 2 E, and no logit beyond LOGIT * E. Then a
key of LOWEST * E or less has a sum of at most -1.25 E, one of ORDINARY * E or more has at least
-0.625 E; and in the base-2 domain, where kernels add no number below -1.76 E (LOWEST of
templates/softmax.py), at most -1.04 E and at least -0.9 E. E is 2 ** 15 or more, so they are more
than 150 apart, and exp2(-150) is zero in fp32: the lower one's weight is zero, exactly.
"""

from __future__ import annotations

from tilewright.codegen.kernel import strides_of

QUERIES = 128
KEYS = 64

# In units of E.
LOWEST = -1.75
ORDINARY = -0.125
LOGIT = 0.5

# Strides of a mask tensor [B, H, S, K] and of its list, which are known at the launch.
MASK_STRIDES = strides_of("mask", sequence=0, head=1, row=2, column=3)
LIST_STRIDES = strides_of("mask_blocks", "blocks", sequence=0, head=1, tile=2)


def mask_kind(mask: str) -> str:
    """What kernels are told of a mask tensor of this dtype, "" without one: u8 is of booleans, a
    float is added."""
    return "none" if not mask else "bool" if mask == "u8" else "additive"
