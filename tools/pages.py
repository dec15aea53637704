"""Assigns pages of a pool to the sequences of a batch with a block table.

    key j of sequence b lies in page block_table[b, j // page_size], at j % page_size

The host assigns pages between forward passes. Sequences may share full pages. The page that a
sequence writes next belongs to this sequence alone (copy on write). Page 0 belongs to no sequence.
The entries of the block table that have no page yet are 0, and the mask hides the keys of page 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

# A pool that is too small grows by at least 1 / GROWTH of its size, so that its tokens are rarely
# copied.
GROWTH = 4


class Pages:
    """The pages of a batch. All sequences of the batch have the same number of tokens.

    page_size: the number of tokens in a page.
    max_length: the maximum number of tokens of a sequence, which fixes the width of the block
        table. If it is None, the width is a power of two and doubles when it is too small.
    max_pages: the maximum number of pages of a pool, without page 0.
    num_pages: the number of pages that a pool needs, including page 0.
    length: the number of tokens present in each sequence, as int64 [] on the device, where forward
        passes count it.
    """

    def __init__(self, page_size: int, max_length: int | None, max_pages: int | None) -> None:
        self.page_size, self.max_length, self.max_pages = page_size, max_length, max_pages
        self.rows: list[list[int]] = []
        self.free: list[int] = []
        self.num_pages = 1
        # `columns` is the number of pages of each sequence. `width` is the number of columns of the
        # block table.
        self.columns = 0
        self.width = 1 if max_length is None else self._pages_for(max_length)
        self.length = torch.zeros((), dtype=torch.int64)
        self.block_table = torch.zeros((0, self.width), dtype=torch.int32)
        # Whether the caller reserves the pages for compiled calls.
        self.ahead = False
        # An upper bound of the number of tokens present. It counts all reserved tokens, because
        # forward passes may have used all of them.
        self._most = 0

    @property
    def batch(self) -> int:
        """Returns the number of sequences, or 0 if it is not known yet."""
        return len(self.rows)

    def begin(self, batch: int, device: torch.device) -> None:
        """Gives each of `batch` sequences its pages. Raises ValueError if another number of
        sequences already holds tokens."""
        if batch == self.batch:
            return
        if self.batch and self.present():
            raise ValueError(
                f"PagedCache: the cache holds {self.present()} tokens of {self.batch} sequences, "
                f"but got keys of {batch} sequences; call reset(), or make another cache"
            )
        if self.length.device != device:
            self.length = torch.zeros((), dtype=torch.int64, device=device)
        mark_address(self.length)
        self.block_table = self.block_table.new_zeros((0, self.width), device=device)
        columns, most, ahead = self.columns, self._most, self.ahead
        self._keep([[] for _ in range(batch)])
        self._extend(columns)
        self._most, self.ahead = most, ahead

    def reserve(self, tokens: int) -> bool:
        """Makes room for `tokens` more tokens of each sequence. Returns whether the reservation
        took pages.

        Waits for the device only if the exact number of present tokens is needed. Raises ValueError
        if the tokens would exceed `max_length`, and RuntimeError if they would exceed `max_pages`.
        """
        taken, room = False, self.columns * self.page_size
        if self.max_length is not None:
            room = min(room, self.max_length)
        if self._most + tokens > room:
            self._most = self.present()
            if self.max_length is not None and self._most + tokens > self.max_length:
                raise ValueError(
                    f"PagedCache: a sequence has {self._most} tokens and needs room for {tokens} "
                    f"more, but max_cache_len is {self.max_length}"
                )
            taken = self._extend(max(self.columns, self._pages_for(self._most + tokens)))
        self._most += tokens
        return taken

    def present(self) -> int:
        """Returns the number of tokens of each sequence. Waits for the device. Raises RuntimeError
        if a forward pass wrote more tokens than there was room for."""
        if not self.batch or self.length.is_meta:  # meta tensors have no values
            return 0
        length, room = int(self.length), self.columns * self.page_size
        if length > room:
            raise RuntimeError(
                f"PagedCache: a compiled forward pass wrote token {length} of a sequence, but its "
                f"pages had room for only {room}, and the other tokens are lost: call "
                "reserve(tokens) before a compiled call that generate() does not make"
            )
        return length

    def crop(self, length: int) -> list[tuple[int, int]]:
        """Keeps the first `length` tokens of each sequence. Returns the pages to be copied, as
        pairs (from, to)."""
        return self._keep(self.rows, length)

    def rearrange(self, sources: Sequence[int]) -> list[tuple[int, int]]:
        """Replaces sequence b by sequence sources[b]. Returns the pages to be copied, as pairs
        (from, to)."""
        length = self.present()
        return self._keep([self.rows[source] for source in sources], length)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _extend(self, columns: int) -> bool:
        """Gives each sequence `columns` pages. Returns whether any of them are new."""
        if columns == self.columns:
            return False
        more = columns - self.columns
        pages = iter(self._take(more * self.batch, self.batch))
        for row in self.rows:
            row.extend(next(pages) for _ in range(more))
        self.columns = columns
        if columns > self.width:
            self.width = 1 << (columns - 1).bit_length()
        self._write_table()
        return True

    def _keep(self, rows: Sequence[Sequence[int]], length: int = 0) -> list[tuple[int, int]]:
        """Gives each sequence the first `length` tokens of its row in `rows`, and frees all other
        pages. Returns the pages to be copied, as pairs (from, to)."""
        columns = self._pages_for(length)
        kept = [list(row[:columns]) for row in rows]
        users = Counter(page for row in kept for page in row)
        free, self.free = self.free, [p for p in range(self.num_pages - 1, 0, -1) if p not in users]
        copies = []
        if length % self.page_size:
            shared = []
            for row in kept:
                if users[row[-1]] > 1:
                    users[row[-1]] -= 1
                    shared.append(row)
            try:
                own = self._take(len(shared), len(kept))
            except RuntimeError:
                self.free = free
                raise
            for row, page in zip(shared, own, strict=True):
                copies.append((row[-1], page))
                row[-1] = page
        self.rows, self.columns, self._most, self.ahead = kept, columns, length, False
        self.length.fill_(length)
        self._write_table()
        return copies

    def _take(self, count: int, sequences: int) -> list[int]:
        """Takes free pages. If there are too few, enlarges the pool."""
        missing = count - len(self.free)
        if missing > 0:
            more = max(missing, self.num_pages // GROWTH)
            if self.max_pages is not None:
                more = min(more, self.max_pages + 1 - self.num_pages)
                if more < missing:
                    used = self.num_pages - 1 - len(self.free)
                    raise RuntimeError(
                        f"PagedCache: {sequences} sequences need {used + count} pages of "
                        f"{self.page_size} tokens, but max_pages is {self.max_pages}"
                    )
            self.free[:0] = range(self.num_pages + more - 1, self.num_pages - 1, -1)
            self.num_pages += more
        return [self.free.pop() for _ in range(count)]

    def _write_table(self) -> None:
        """Writes the block table from the rows. The tensor is reused if the shape is the same."""
        padding = [0] * (self.width - self.columns)
        rows = [row + padding for row in self.rows]
        table = torch.tensor(rows, dtype=torch.int32, device=self.block_table.device)
        if self.block_table.shape == table.shape:
            self.block_table.copy_(table)
        else:
            self.block_table = table
            mark_address(table)


def mark_address(tensor: torch.Tensor) -> None:
    """Marks a tensor's address as static. CUDA graphs then read the tensor in place, and are
    recorded again if its address changes."""
    torch._dynamo.mark_static_address(tensor)
