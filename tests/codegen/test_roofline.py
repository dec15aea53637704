"""The time model's parts on cases whose answer is known."""

import dataclasses

import pytest

from tilewright.codegen.roofline import Work, estimate, floor_seconds, memory_rate, wave_factor
from tilewright.codegen.targets import INTERPRET, SM90, SM100

# One bf16 GEMM of 8192 cubed, 128 x 256 tiles.
GEMM = Work(2 * 8192**3, 3 * 2 * 8192**2, "bf16", blocks=64 * 32, bytes_in_flight=144 * 1024)
# A decode step: 50 MB of weights read once by two blocks per SM.
DECODE = Work(2 * 16 * 25e6, 50e6, "bf16", blocks=264, blocks_per_sm=2, bytes_in_flight=64 * 1024)


def test_floor_is_the_larger_of_arithmetic_and_traffic():
    assert floor_seconds(0.79e15, 0, "bf16", SM90) == pytest.approx(1.0)
    assert floor_seconds(0, 4.3e12, "bf16", SM90) == pytest.approx(1.0)
    assert floor_seconds(1.58e15, 4.3e12, "bf16", SM90) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("blocks", "per_sm", "factor"),
    [(132, 1, 1.0), (66, 1, 2.0), (133, 1, 264 / 133), (264, 2, 1.0), (1320, 1, 1.0)],
)
def test_waves(blocks, per_sm, factor):
    assert wave_factor(blocks, per_sm, SM90) == pytest.approx(factor)


def test_too_few_bytes_in_flight_lower_the_memory_rate():
    enough = SM100.bytes_in_flight_per_sm
    assert memory_rate(enough, SM100.num_sms, SM100) == SM100.hbm_bytes_per_s
    assert memory_rate(enough / 2, SM100.num_sms, SM100) == SM100.hbm_bytes_per_s / 2
    assert memory_rate(enough, SM100.num_sms // 2, SM100) == SM100.hbm_bytes_per_s / 2
    assert memory_rate(10 * enough, SM100.num_sms, SM100) == SM100.hbm_bytes_per_s


@pytest.mark.parametrize("target", [SM90, SM100])
def test_estimates_stay_above_the_floor_and_name_their_bound(target):
    gemm, decode = estimate(GEMM, target), estimate(DECODE, target)
    assert gemm.bound == "compute"
    assert decode.bound == "memory"
    for result in (gemm, decode):
        assert result.floor < result.seconds < 1.6 * result.floor + target.launch_s
    assert estimate(Work(1.0, 1.0, "bf16", 1), target).bound == "launch"
    starved = dataclasses.replace(DECODE, bytes_in_flight=1024)
    assert estimate(starved, target).seconds > 3 * decode.seconds


def test_bad_input():
    with pytest.raises(ValueError, match="expected one with rates, got interpret"):
        estimate(GEMM, INTERPRET)
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        Work(1, 1, "bf16", 0)
    with pytest.raises(ValueError, match="no negative number"):
        Work(-1, 1, "bf16", 1)
