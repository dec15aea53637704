"""Tiles of the kernels of many queries: how they are chosen, counted and ordered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.attention.problem import AttentionSizes
from tilewright.codegen.targets import Target

# Share of the L2 cache that the keys and values of one group of heads may take.
L2_SHARE = 0.6
# Shared memory for barriers and reductions.
SPARE_BYTES = 4096


@dataclass(frozen=True)
class PrefillConfig:
    """Tiles of block_m queries and block_n keys.

    tma: loads by descriptors, and only so may warps be specialised. one_loop: masked and whole
    blocks of keys in one. chained: both parts of a score in one accumulator. promote: the tensor
    core's sums of each block are added in fp32. maxnreg: registers of a thread at most.
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
        """Whether shared memory holds q's tile and the stages of keys, values and mask; q_bytes:
        of a query's row of its tile, key_bytes: of a key's and its value's. mask: its dtype, ""
        without one."""
        held = self.block_m * q_bytes + self.num_stages * self.block_n * key_bytes + SPARE_BYTES
        if mask:
            tile = self.block_m * self.block_n * ELEMENT_BYTES[mask]
            held += max(self.num_stages - 1, 1) * tile
        return held <= target.max_shared_bytes


def _head_group(pairs: int, kept_bytes: int, target: Target) -> int:
    """How many of `pairs` heads (of a dense batch: of sequence and head) run side by side.

    As many as the L2 cache holds keys and values of, kept_bytes each: then each is read from memory
    once, and the heaviest tiles of all of them come first.
    """
    fitting = max(int(L2_SHARE * target.l2_bytes / max(kept_bytes, 1)), 1)
    # Groups of one size: a small last one would leave multiprocessors idle.
    return cdiv(pairs, cdiv(pairs, fitting))


class Schedule(NamedTuple):
    """row_tiles: of one head of a dense sequence, or at most of all ragged ones. head_group: heads
    (of a dense batch: pairs of sequence and head) whose tiles run side by side. grid: a program for
    each tile; those of a last group that is not full have nothing to do."""

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
    """The tiles of a launch and their order. heads: of keys, each of which `sharing` heads of q
    share. key_bytes: of a key and its value. head_group: in place of what the L2 cache holds."""
    sequences, tiles = sizes.num_sequences, cdiv(sizes.num_queries, config.block_m)
    if ragged:
        # Each sequence has at most one tile that is not full; any may have all the queries.
        tiles, sequences = min(tiles + sequences - 1, sequences * tiles), 1
    pairs = heads * sequences
    if head_group is None:
        head_group = _head_group(max(pairs, 1), sizes.num_keys * key_bytes, target) * sharing
    tiles = max(tiles, 1)
    return Schedule(tiles, head_group, (cdiv(pairs * sharing, head_group) * head_group * tiles,))
