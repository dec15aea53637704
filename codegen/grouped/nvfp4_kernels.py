"""The NVFP4 kernels `grouped_nvfp4` and `quantize_nvfp4`, and their tile sizes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.tiles import GemmConfig
from tilewright.codegen.kernel import Kernel, Statics
from tilewright.codegen.targets import Target

GROUPED_NVFP4 = Kernel(
    "grouped.nvfp4",
    "grouped_nvfp4",
    {"B_EXPERT_STRIDE": ("b", 0), "B_STRIDE": ("b", 1)},
    unaligned=("offsets", "deltas", "expert_ids", "expert_scales"),
)
QUANTIZE_NVFP4 = Kernel("grouped.quantize_nvfp4", "quantize_nvfp4", num_stages=1)


# With at most this many rows in a group, the weights are on the tensor core's M side.
SWAPPED_ROWS = 64


def nvfp4_config(max_groups: int, num_rows: int, target: Target) -> GemmConfig:
    """Returns the tile sizes for the average number of rows of a group."""
    rows = cdiv(num_rows, max_groups)
    scaled = "block_scaled_mma" in target.features
    wide = 256 if scaled else 128
    if rows <= SWAPPED_ROWS:
        block_m = min(max(next_power_of_2(rows), 16), 64)
        return GemmConfig(block_m, 128, wide, 4, 4, swapped=True)
    if scaled:
        return GemmConfig(128, 128, wide, 8, 5, flatten=True, warp_specialize=True)
    return GemmConfig(128, 128, wide, 8, 3)


def nvfp4_statics(max_groups: int, config: GemmConfig, *, block_scaled: bool) -> Statics:
    """Returns the constants of the NVFP4 GEMM. block_scaled: whether the target's tensor core
    multiplies NVFP4 directly."""
    groups, steps = next_power_of_2(max_groups), config.search_steps(max_groups)
    return Statics(config, groups=groups, block_scaled=block_scaled, search_steps=steps)


@dataclass(frozen=True)
class QuantizeConfig:
    """The tile sizes of `quantize_nvfp4`.

    Attributes:
        block_r: The number of rows that a program quantises at a time, out of a block of 128 rows.
        block_c: The number of columns that a program quantises, a multiple of 64.
        num_warps: The number of warps of a program.
    """

    block_r: int = 32
    block_c: int = 256
    num_warps: int = 4


def quantize_grid(inner: int, config: QuantizeConfig, num_blocks: int) -> tuple[int, int]:
    """Returns the launch grid. num_blocks: the number of blocks of scales; each block has the
    scales of 128 rows."""
    return (num_blocks, cdiv(inner, config.block_c))
