"""Bytes that attention reads of a cache and products that it computes: they depend on the tokens
present, not on the cache's size. And the work of a call beside that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheRead:
    """The caches that a call reads.

    names: the arguments that are caches. token_bytes: bytes of one token of one sequence, in all
    caches together. sequences: the number of sequences. capacity: the most tokens read of a
    sequence: the tokens it has room for, or those of a sliding window. whole: whether all of these
    are read, however many are present. queries: new tokens of a sequence, which are among those
    present. pair_flops: FLOPs of one query, in all heads, with one token that it sees.
    """

    names: tuple[str, ...]
    token_bytes: int
    sequences: int
    capacity: int
    whole: bool = False
    queries: int = 1
    pair_flops: int = 0

    def bytes_of(self, present: int) -> int:
        """Returns the bytes read where each sequence has `present` tokens."""
        read = self.capacity if self.whole else min(present, self.capacity)
        return self.token_bytes * self.sequences * read

    def flops_of(self, present: int) -> int:
        """Returns the FLOPs of attention where each sequence has `present` tokens, the new ones
        last, and a query sees none behind its own."""
        seen = min(present, self.capacity)
        hidden = min(self.queries - 1, seen) / 2
        return int(self.pair_flops * self.sequences * self.queries * (seen - hidden))


@dataclass(frozen=True)
class Work:
    """The work of a call, where it differs from that of the nodes that the call replaces.

    cache: the reads of caches; None: there are none. flops: of products with weights; None: those
    of the nodes. scratch: bytes of buffers that the call makes for itself, written and read.
    """

    cache: CacheRead | None = None
    flops: int | None = None
    scratch: int = 0
