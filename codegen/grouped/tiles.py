"""The tile sizes of grouped GEMMs, including the GEMMs of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import next_power_of_2

# The number of columns that share a scale of e4m3 codes. A step of the GEMM has the same number of
# columns.
SCALED_K = 128
# The number of 32-bit registers of a multiprocessor, on all targets.
REGISTERS = 65536
# The largest number of registers of a thread, on all targets.
MAX_REGISTERS = 255
# The number of threads of a warp, on all targets.
WARP_SIZE = 32


@dataclass(frozen=True)
class GemmConfig:
    """The tile sizes of one grouped GEMM.

    Attributes:
        block_m: The number of rows of x in a tile.
        block_n: The number of columns of the result in a tile.
        block_k: The number of columns of the inner dimension in a step.
        num_warps: The number of warps of a program.
        num_stages: The number of pipeline stages.
        programs_per_sm: The number of programs on each multiprocessor.
        swapped: Whether weights are on the tensor core's M side.
        flatten: Whether Triton flattens the loops over tiles and steps into one loop.
        warp_specialize: Whether the warps of a program are specialised.
    """

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
        """Returns the number of steps of the binary search for the expert of a tile. Returns 0 if a
        tile finds its expert without such a search."""
        if not self.warp_specialize:
            return 0
        return next_power_of_2(max(num_experts, 2)).bit_length() - 1


@dataclass(frozen=True)
class CodesConfig(GemmConfig):
    """The tile sizes of a GEMM that reads 4-bit weights as they are stored.

    Attributes:
        swapped: Whether weights are on the M side of the newest tensor-core instruction. If not,
            they are on the N side of the older instruction, which takes less time for 16 rows and
            far more time for 64 rows.
        ordered: Whether the columns of x are stored in the order in which the GEMM needs them
            (`rows_in_order`). If not, the GEMM permutes them itself.
        part_k: The largest number of columns of a part. The columns of a part are unpacked and
            multiplied together, while block_k columns are loaded together.
        split: The number of warps that each multiply their own columns of a step; 1 if all warps
            multiply the same columns.
        by_route: Whether every route (a pair of a token and an expert that it chose) is a block of
            rows of its own. If so, nothing is sorted.
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
    """The tile sizes of a GEMM of quantised rows with quantised weights, in steps of SCALED_K
    columns.

    Attributes:
        parts: The number of parts of a tile's columns, 1 or 2. Gate and up are always separate
            parts.
        codes: Whether the first GEMM of a mixture quantises its result itself, with SCALED_K
            columns in a tile. If not, a separate kernel quantises the result after the GEMM.
    """

    parts: int = 1
    codes: bool = False

    def __str__(self) -> str:
        more = f" in {self.parts}" if self.parts > 1 else ""
        return super().__str__() + more + (" to codes" if self.codes else "")

    @property
    def maxnreg(self) -> int | None:
        """The largest number of registers of a thread with which `programs_per_sm` programs fit a
        multiprocessor; None for no limit."""
        share = REGISTERS // (WARP_SIZE * self.num_warps * self.programs_per_sm)
        return share // 8 * 8 if share < MAX_REGISTERS else None


@dataclass(frozen=True)
class DequantizeConfig:
    """The tile sizes of `dequantize_experts`: the rows and columns of a weight."""

    block_n: int = 32
    block_k: int = 128
    num_warps: int = 4


@dataclass(frozen=True)
class QuantizeConfig:
    """The tile sizes of `quantize_rows`: the rows and columns of x."""

    block_m: int = 4
    block_k: int = 512
    num_warps: int = 4
