"""Bytes that attention reads of a cache: they depend on the tokens present, not on the cache's
size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheRead:
    """The caches that a call reads.

    names: the arguments that are caches. token_bytes: bytes of one token of one sequence, in all
    caches together. sequences: the number of sequences. capacity: the most tokens read of a
    sequence: the tokens it has room for, or those of a sliding window.
    """

    names: tuple[str, ...]
    token_bytes: int
    sequences: int
    capacity: int

    def bytes_of(self, present: int) -> int:
        """Returns the bytes read where each sequence has `present` tokens."""
        return self.token_bytes * self.sequences * min(present, self.capacity)
