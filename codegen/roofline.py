"""A time model for ranking kernels: arithmetic, traffic, waves, bytes in flight, launch.

It knows no kernel in particular. A template that has fitted its own constants on hardware ranks
with those; the floor and the parts here are what every kernel shares.

Method: roofline (Williams, Waterman, Patterson 2009) with wave quantisation, and Little's law for
the memory rate that a number of outstanding bytes can sustain.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.targets import Target


@dataclass(frozen=True)
class Work:
    """What one launch has to do.

    Attributes:
        flops: multiplications and additions, counted apart.
        bytes_moved: of global memory, each byte that must move counted once.
        dtype: of the tensor-core operands, in Triton's names.
        blocks: programs of the grid, all of about the same size.
        blocks_per_sm: how many of them fit an SM at once.
        bytes_in_flight: loads one block can have outstanding; 0 where that is no limit.
    """

    flops: float
    bytes_moved: float
    dtype: str
    blocks: int
    blocks_per_sm: int = 1
    bytes_in_flight: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.blocks_per_sm < 1:
            raise ValueError(
                f"blocks and blocks_per_sm: expected at least 1, "
                f"got {self.blocks} and {self.blocks_per_sm}"
            )
        if min(self.flops, self.bytes_moved, self.bytes_in_flight) < 0:
            raise ValueError("flops, bytes_moved, bytes_in_flight: expected no negative number")


@dataclass(frozen=True)
class Estimate:
    """Seconds of a launch, and what it is made of."""

    seconds: float
    floor: float
    compute: float
    memory: float
    launch: float

    @property
    def bound(self) -> str:
        """What the time goes into: "launch", "compute" or "memory"."""
        parts = {"launch": self.launch, "compute": self.compute, "memory": self.memory}
        return max(parts, key=lambda name: parts[name])


def floor_seconds(flops: float, bytes_moved: float, dtype: str, target: Target) -> float:
    """What no kernel beats: all arithmetic and all traffic at the target's rates, overlapped."""
    _require_rates(target)
    arithmetic = flops / target.flops_per_s(dtype) if flops else 0.0
    return max(arithmetic, bytes_moved / target.hbm_bytes_per_s)


def wave_factor(blocks: int, blocks_per_sm: int, target: Target) -> float:
    """How much longer than perfectly spread work the last, partly filled wave makes it; >= 1."""
    slots = target.num_sms * blocks_per_sm
    waves = -(-blocks // slots)
    # Within the last wave the fullest SM has this many blocks; the others wait for it.
    rest = blocks - (waves - 1) * slots
    rounds = (waves - 1) * blocks_per_sm + -(-rest // target.num_sms)
    return rounds * target.num_sms / blocks


def memory_rate(in_flight_per_sm: float, busy_sms: int, target: Target) -> float:
    """Bytes per second that these outstanding loads sustain (Little's law), at most HBM's."""
    _require_rates(target)
    if in_flight_per_sm <= 0:
        return target.hbm_bytes_per_s
    share = in_flight_per_sm / target.bytes_in_flight_per_sm * busy_sms / target.num_sms
    return target.hbm_bytes_per_s * min(1.0, share)


def estimate(work: Work, target: Target) -> Estimate:
    """Expected time of one launch; ranks alternatives, does not promise."""
    floor = floor_seconds(work.flops, work.bytes_moved, work.dtype, target)
    factor = wave_factor(work.blocks, work.blocks_per_sm, target)
    compute = work.flops / target.flops_per_s(work.dtype) * factor if work.flops else 0.0
    busy = min(work.blocks, target.num_sms)
    resident = min(work.blocks_per_sm, -(-work.blocks // target.num_sms))
    rate = memory_rate(work.bytes_in_flight * resident, busy, target)
    memory = work.bytes_moved / rate
    seconds = target.launch_s + max(compute, memory)
    return Estimate(seconds, floor, compute, memory, target.launch_s)


def _require_rates(target: Target) -> None:
    if not target.is_gpu:
        raise ValueError(f"target: expected one with rates, got {target.name}")
