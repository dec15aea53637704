"""Tiles of the kernels of many queries: how they are chosen, counted and ordered."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
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


def mask_kind(mask: str) -> str:
    """What kernels are told of a mask tensor of this dtype, "" without one: u8 is of booleans, a
    float is added."""
    return "none" if not mask else "bool" if mask == "u8" else "additive"


def num_tiles(block_m: int, sequences: int, queries: int, longest: int, *, ragged: bool) -> int:
    """Tiles of one head: of a dense sequence of so many queries, or at most of all ragged ones,
    which have them together, none more than `longest`; at least 1."""
    if not ragged:
        return max(cdiv(queries, block_m), 1)
    # Each sequence has at most one tile that is not full.
    together = cdiv(queries, block_m) + sequences - 1
    return max(min(together, sequences * cdiv(longest, block_m)), 1)


def head_group(pairs: int, kept_bytes: int, target: Target) -> int:
    """How many of `pairs` heads (of a dense batch: of sequence and head) run side by side.

    As many as the L2 cache holds keys and values of, kept_bytes each: then each is read from memory
    once, and the heaviest tiles of all of them come first.
    """
    fitting = max(int(L2_SHARE * target.l2_bytes / max(kept_bytes, 1)), 1)
    # Groups of one size: a small last one would leave multiprocessors idle.
    return cdiv(pairs, cdiv(pairs, fitting))


def tile_grid(pairs: int, tiles: int, head_group: int) -> tuple[int]:
    """One program per tile; those of a last group that is not full have nothing to do."""
    return (cdiv(pairs, head_group) * head_group * tiles,)
