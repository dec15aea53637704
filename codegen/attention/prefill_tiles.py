"""Tiles of the attention kernels for many queries: how many there are and in which order they
run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.attention.problem import AttentionSizes
from tilewright.codegen.targets import Target

# The fraction of the L2 cache that the keys and values of one group of heads may take.
L2_SHARE = 0.6
# The shared memory that is kept free for barriers and reductions, in bytes.
SPARE_BYTES = 4096


@dataclass(frozen=True)
class PrefillConfig:
    """The tile sizes of an attention kernel for many queries.

    Attributes:
        block_m: The number of queries in a tile.
        block_n: The number of keys that a program reads in one step.
        num_warps: The number of warps of a program.
        num_stages: The number of pipeline stages.
        tma: Whether loads use tensor descriptors.
        warp_specialize: Whether the warps of a program are specialised. This requires `tma`.
        one_loop: Whether the same loop handles whole blocks of keys and blocks in which some keys
            are masked.
        chained: Whether one accumulator sums the products of both parts of a key: the rope columns,
            and the other columns.
        promote: Whether the tensor core's sums of each block are added in fp32.
        maxnreg: The largest number of registers of a thread; None for no limit.
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
        """Whether shared memory holds the tiles of a program."""
        return self.shared_bytes(q_bytes, key_bytes, mask) <= target.max_shared_bytes

    def shared_bytes(self, q_bytes: int, key_bytes: int, mask: str) -> int:
        """Returns the number of bytes of the tile of q and of the pipeline stages of keys, values
        and mask.

        q_bytes: the bytes of a row of q. key_bytes: the bytes of a row of keys plus a row of
        values. mask: the dtype of the mask tensor; "" if there is none.
        """
        held = self.block_m * q_bytes + self.num_stages * self.block_n * key_bytes + SPARE_BYTES
        if mask:
            tile = self.block_m * self.block_n * ELEMENT_BYTES[mask]
            held += max(self.num_stages - 1, 1) * tile
        return held


def _head_group(pairs: int, kept_bytes: int, target: Target) -> int:
    """Returns how many of the `pairs` heads run at the same time. For a dense batch, `pairs` counts
    the pairs of sequence and head.

    The result is the number of heads whose keys and values fit the L2 cache. The keys and values of
    one head take `kept_bytes` bytes. With this number, keys and values are read from memory once,
    and the longest tiles of all these heads run first.
    """
    fitting = max(int(L2_SHARE * target.l2_bytes / max(kept_bytes, 1)), 1)
    # Make all groups about equally large: a small last group would leave multiprocessors idle.
    return cdiv(pairs, cdiv(pairs, fitting))


class Schedule(NamedTuple):
    """The order of the tiles of a launch.

    Attributes:
        row_tiles: The number of row tiles of one head of a dense sequence. If sequences are ragged,
            an upper bound for all sequences together.
        head_group: The number of heads whose tiles run at the same time. For a dense batch, it
            counts pairs of sequence and head.
        grid: The launch grid, with one program for each tile. If the last group has fewer heads,
            some programs have no work.
    """

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
    """Returns the tiles of a launch and their order.

    heads: the number of heads of keys, each of which `sharing` heads of q share. key_bytes: the
    bytes of a key and its value. head_group: if given, replaces the group size that follows from
    the size of the L2 cache.
    """
    sequences, tiles = sizes.num_sequences, cdiv(sizes.num_queries, config.block_m)
    if ragged:
        # Each sequence has at most one tile that is not full. No sequence has more tiles than one
        # that has all queries.
        tiles, sequences = min(tiles + sequences - 1, sequences * tiles), 1
    pairs = heads * sequences
    if head_group is None:
        head_group = _head_group(max(pairs, 1), sizes.num_keys * key_bytes, target) * sharing
    tiles = max(tiles, 1)
    return Schedule(tiles, head_group, (cdiv(pairs * sharing, head_group) * head_group * tiles,))
