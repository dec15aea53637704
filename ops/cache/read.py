"""The work of a call: the bytes of a cache that attention reads, and the products that it computes.

Both depend on the number of tokens that are present, and not on the size of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheRead:
    """The caches that a call reads.

    Attributes:
        names: The names of the arguments that are caches.
        token_bytes: The bytes of one token of one sequence, in all caches together.
        sequences: The number of sequences.
        capacity: The largest number of tokens that are read for a sequence: the tokens that the
            cache has room for, or the tokens of a sliding window.
        whole: Whether the call always reads `capacity` tokens, however many are present.
        queries: The number of new tokens of a sequence. They are included in the tokens that are
            present.
        pair_flops: The FLOPs of one query with one token that it attends to, in all heads.
    """

    names: tuple[str, ...]
    token_bytes: int
    sequences: int
    capacity: int
    whole: bool = False
    queries: int = 1
    pair_flops: int = 0

    def bytes_of(self, present: int) -> int:
        """Returns the number of bytes that are read if each sequence has `present` tokens."""
        read = self.capacity if self.whole else min(present, self.capacity)
        return self.token_bytes * self.sequences * read

    def flops_of(self, present: int) -> int:
        """Returns the FLOPs of attention if each sequence has `present` tokens. The new tokens are
        the last tokens, and a query attends to no token after its own."""
        seen = min(present, self.capacity)
        hidden = min(self.queries - 1, seen) / 2
        return int(self.pair_flops * self.sequences * self.queries * (seen - hidden))


@dataclass(frozen=True)
class Work:
    """The work of a call, where it differs from the work of the graph nodes that the call replaces.

    Attributes:
        cache: The caches that the call reads; None if there are none.
        flops: The FLOPs of products with weights. If it is None, they are the FLOPs of the replaced
            nodes.
        scratch: The bytes of buffers that the call allocates, writes and reads.
    """

    cache: CacheRead | None = None
    flops: int | None = None
    scratch: int = 0
