"""Blocks of queries and keys that attention takes or leaves out as a whole.

A list of blocks says, for each tile of QUERIES queries, which blocks of KEYS keys some query of it
sees: int32 [B, H, query tiles, 1 + key blocks]. The first number is how many there are; then come
the blocks in ascending order, each as 2 * block + whole, where whole is 1 if every query of the
tile sees all KEYS keys of it; then zeros. The idea is FlexAttention's BlockMask (Dong et al. 2024).
"""

QUERIES = 128
KEYS = 64
