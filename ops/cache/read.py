"""The work of a call: the bytes that attention reads of a cache, and the products that it computes.

Both depend on the tokens that are present, not on the cache's size.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheRead:
    """The caches that a call reads.

    names: the arguments that are caches. token_bytes: bytes of one token of one sequence, in all
    caches together. sequences: the number of sequences. capacity: the most tokens that are read of
    a sequence: the tokens that it has room for, or the tokens of a sliding window. whole: whether
    the call always reads `capacity` tokens, however many are present. queries: number of new tokens
    of a sequence, which are among those present. pair_flops: FLOPs of one query, in all heads, with
    one token that it sees.
    """

    names: tuple[str, ...]
    token_bytes: int
    sequences: int
    capacity: int
    whole: bool = False
    queries: int = 1
    pair_flops: int = 0

    def bytes_of(self, present: int) -> int:
        """Returns the bytes that are read if each sequence has `present` tokens."""
        read = self.capacity if self.whole else min(present, self.capacity)
        return self.token_bytes * self.sequences * read

    def flops_of(self, present: int) -> int:
        """Returns the FLOPs of attention if each sequence has `present` tokens. The new tokens come
        last, and a query sees no token after its own."""
        seen = min(present, self.capacity)
        hidden = min(self.queries - 1, seen) / 2
        return int(self.pair_flops * self.sequences * self.queries * (seen - hidden))


@dataclass(frozen=True)
class Work:
    """The work of a call, where it differs from the work of the nodes that the call replaces.

    cache: the reads of caches; None: there are none. flops: FLOPs of products with weights; None:
    the FLOPs of those nodes. scratch: bytes of buffers that the call makes for itself, writes and
    reads.
    """

    cache: CacheRead | None = None
    flops: int | None = None
    scratch: int = 0
