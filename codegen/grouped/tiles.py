"""The tiles of grouped GEMMs, including those of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import next_power_of_2

# Number of columns that share a scale of e4m3 codes. A step of the GEMM has as many columns.
SCALED_K = 128
# Facts that are equal on all targets: the 32-bit registers of a multiprocessor, the most registers
# of a thread, and the threads of a warp.
REGISTERS, MAX_REGISTERS, WARP_SIZE = 65536, 255, 32


@dataclass(frozen=True)
class GemmConfig:
    """Tiles of one grouped GEMM: block_m rows of x, block_n columns, steps of block_k of the inner
    dimension. swapped: weights are on the tensor core's M side."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    swapped: bool = False
    flatten: bool = False
    warp_specialize: bool = False

    def __str__(self) -> str:
        kind = "swapped " if self.swapped else ""
        more = f" p{self.programs_per_sm}" + ("f" if self.flatten else "")
        more += " ws" if self.warp_specialize else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{kind}{tile} w{self.num_warps} s{self.num_stages}{more}"

    def grid(self, num_sms: int) -> tuple[int]:
        """Returns the launch grid. The kernel is persistent, because only the device knows the
        number of tiles."""
        return (num_sms * self.programs_per_sm,)

    def search_steps(self, num_experts: int) -> int:
        """Returns the steps of the binary search by which a tile finds its expert; 0 if it finds
        the expert without a search."""
        if not self.warp_specialize:
            return 0
        return next_power_of_2(max(num_experts, 2)).bit_length() - 1


@dataclass(frozen=True)
class CodesConfig(GemmConfig):
    """Tiles of a GEMM that streams weights of 4-bit codes.

    swapped: weights are on the M side of the newest tensor-core instruction. If not, they are on
    the N side of the older one, which takes less time than the newest for 16 rows and far more for
    64. ordered: the columns of x are stored in the order in which the GEMM needs them
    (`rows_in_order`); if not, the GEMM permutes them itself. part_k: most columns of a part, which
    are unpacked and multiplied together; block_k columns are loaded together. split: number of
    warps that each take their own columns of a step; 1 if all warps take the same columns.
    by_route: every route counts as a block of rows of its own, and nothing is sorted.
    """

    swapped: bool = True
    ordered: bool = False
    part_k: int = 128
    split: int = 1
    by_route: bool = False

    def __str__(self) -> str:
        words = [" codes", " split" if self.split > 1 else "", " ordered" if self.ordered else ""]
        words += [" by route" if self.by_route else ""]
        return super().__str__() + "".join(words)


@dataclass(frozen=True)
class ScaledConfig(GemmConfig):
    """Tiles of a GEMM of codes by codes, in steps of SCALED_K columns. parts: number of parts of a
    tile's columns, 1 or 2; gate and up are always separate parts. codes: the first GEMM of a
    mixture quantises its result itself, with SCALED_K columns per tile; if not, a kernel after it
    does."""

    parts: int = 1
    codes: bool = False

    def __str__(self) -> str:
        more = f" in {self.parts}" if self.parts > 1 else ""
        return super().__str__() + more + (" to codes" if self.codes else "")

    @property
    def maxnreg(self) -> int | None:
        """Most registers of a thread with which `programs_per_sm` programs fit; None for no
        limit."""
        share = REGISTERS // (WARP_SIZE * self.num_warps * self.programs_per_sm)
        return share // 8 * 8 if share < MAX_REGISTERS else None


@dataclass(frozen=True)
class DequantizeConfig:
    """Tiles of `dequantize_experts`: rows and columns of a weight."""

    block_n: int = 32
    block_k: int = 128
    num_warps: int = 4


@dataclass(frozen=True)
class QuantizeConfig:
    """Tiles of `quantize_rows`."""

    block_m: int = 4
    block_k: int = 512
    num_warps: int = 4
