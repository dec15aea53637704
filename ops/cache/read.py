"""What attention reads of a cache and multiplies with it, by the tokens present and not by the
cache's size; and what else a call moves and multiplies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheRead:
    """What a call reads of caches.

    names: the arguments that are caches. token_bytes: of one token of one sequence, in all of them.
    sequences: how many there are. capacity: tokens of a sequence that are read at most, which are
    those it has room for, or those of a window. whole: whether it reads all of these, however many
    are present. queries: new tokens of a sequence, which are among those present. pair_flops: FLOPs
    of one query, in all heads, with one token that it sees.
    """

    names: tuple[str, ...]
    token_bytes: int
    sequences: int
    capacity: int
    whole: bool = False
    queries: int = 1
    pair_flops: int = 0

    def bytes_of(self, present: int) -> int:
        """What is read where each sequence has so many tokens."""
        read = self.capacity if self.whole else min(present, self.capacity)
        return self.token_bytes * self.sequences * read

    def flops_of(self, present: int) -> int:
        """The FLOPs of the attention where each sequence has so many tokens, the new ones last, and
        a query sees none behind its own."""
        seen = min(present, self.capacity)
        hidden = min(self.queries - 1, seen) / 2
        return int(self.pair_flops * self.sequences * self.queries * (seen - hidden))


@dataclass(frozen=True)
class Work:
    """What a call reads of caches, and what it multiplies and moves where the nodes that it
    replaces do otherwise.

    cache: None where it reads none. flops: of products with weights; None: those of the nodes.
    scratch: bytes of what the call makes for itself, written and read.
    """

    cache: CacheRead | None = None
    flops: int | None = None
    scratch: int = 0
