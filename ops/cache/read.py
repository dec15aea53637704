"""What attention reads of a cache, in bytes: by the tokens present, not by the cache's size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheRead:
    """What a call reads of caches.

    names: the arguments that are caches. token_bytes: of one token of one sequence, in all of them.
    sequences: how many there are. capacity: tokens of a sequence that are read at most, which are
    those it has room for, or those of a window.
    """

    names: tuple[str, ...]
    token_bytes: int
    sequences: int
    capacity: int

    def bytes_of(self, present: int) -> int:
        """What is read where each sequence has so many tokens."""
        return self.token_bytes * self.sequences * min(present, self.capacity)
