"""Tiles of the attention kernels for many queries: their number and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.attention.problem import AttentionSizes
from tilewright.codegen.targets import Target

# Fraction of the L2 cache that the keys and values of one group of heads may take.
L2_SHARE = 0.6
# Shared memory for barriers and reductions.
SPARE_BYTES = 4096


@dataclass(frozen=True)
class PrefillConfig:
    """Tiles of block_m queries and block_n keys.

    tma: loads go through descriptors; warps can be specialised only with these. one_loop: one loop
    takes masked and whole blocks of keys. chained: both parts of a score share an accumulator.
    promote: the tensor core's sums of each block are added in fp32. maxnreg: most registers of a
    thread, or None.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    warp_specialize: bool = False
    one_loop: bool = False
    chained: bool = True
    promote: bool = False
    maxnreg: int | None = None

    def __str__(self) -> str:
        flags = ("tma", "one_loop", "promote")
        words = [name.replace("_", " ") for name in flags if getattr(self, name)]
        words += [] if self.chained else ["apart"]
        words += ["ws"] if self.warp_specialize else []
        words += [f"r{self.maxnreg}"] if self.maxnreg else []
        tile = f"{self.block_m} queries x {self.block_n} keys w{self.num_warps} s{self.num_stages}"
        return " ".join([tile, *words])

    def fits(self, q_bytes: int, key_bytes: int, mask: str, target: Target) -> bool:
        """Whether shared memory holds the tile of q and the stages of keys, values and mask.
        q_bytes: bytes of a row of q's tile. key_bytes: bytes of a row of keys and one of values.
        mask: dtype of the mask tensor, "" without one."""
        held = self.block_m * q_bytes + self.num_stages * self.block_n * key_bytes + SPARE_BYTES
        if mask:
            tile = self.block_m * self.block_n * ELEMENT_BYTES[mask]
            held += max(self.num_stages - 1, 1) * tile
        return held <= target.max_shared_bytes


def _head_group(pairs: int, kept_bytes: int, target: Target) -> int:
    """Returns how many of `pairs` heads (for a dense batch, pairs of sequence and head) run side by
    side.

    These are as many as the L2 cache can hold keys and values of, kept_bytes for each. So keys and
    values are read from memory once, and the longest tiles of the whole group come first.
    """
    fitting = max(int(L2_SHARE * target.l2_bytes / max(kept_bytes, 1)), 1)
    # All groups have about equal size: a small last one would leave multiprocessors idle.
    return cdiv(pairs, cdiv(pairs, fitting))


class Schedule(NamedTuple):
    """The order of the tiles of a launch.

    row_tiles: row tiles of one head of a dense sequence, or an upper bound for all ragged sequences
    together. head_group: number of heads (for a dense batch, of pairs of sequence and head) whose
    tiles run side by side. grid: one program per tile; in a last group that is not full, some
    programs have no work."""

    row_tiles: int
    head_group: int
    grid: tuple[int]


def schedule(
    config: PrefillConfig,
    sizes: AttentionSizes,
    target: Target,
    *,
    heads: int,
    key_bytes: int,
    ragged: bool,
    sharing: int = 1,
    head_group: int | None = None,
) -> Schedule:
    """Returns the tiles of a launch and their order. heads: number of heads of keys, each shared by
    `sharing` heads of q. key_bytes: bytes of a key and its value. head_group: replaces the number
    that follows from the size of the L2 cache."""
    sequences, tiles = sizes.num_sequences, cdiv(sizes.num_queries, config.block_m)
    if ragged:
        # Each sequence has at most one tile that is not full, and one sequence may have all
        # queries.
        tiles, sequences = min(tiles + sequences - 1, sequences * tiles), 1
    pairs = heads * sequences
    if head_group is None:
        head_group = _head_group(max(pairs, 1), sizes.num_keys * key_bytes, target) * sharing
    tiles = max(tiles, 1)
    return Schedule(tiles, head_group, (cdiv(pairs * sharing, head_group) * head_group * tiles,))
