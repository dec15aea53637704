"""Compares the time of a part with its bytes and products, and the error bars with stored
measurements."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tilewright.codegen.targets import get_target, gpu_targets
from tilewright.compiler.report import bars, times
from tilewright.compiler.report.bars import bar_of, class_of, held_percent, percent_of
from tilewright.compiler.report.step import SPENT, Amounts
from tilewright.compiler.report.times import Spent, spent_of
from tilewright.compiler.report.traffic import Unit
from tilewright.ops.cache.read import CacheRead

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
H200, B200 = get_target("sm90"), get_target("sm100")
BF16 = H200.flops_per_s("bf16")
EMPTY = Unit("", "library", "", "", 1, 1, 0, 0, 0, (), 0, BF16, 0, (), (), ())
START = 1e6 * (H200.launch_s + times.FILL_S)


def us(unit, present=None, caches=0):
    return spent_of(unit, caches, present, H200).us


def read(queries=1, sequences=2, pair=1000):
    return CacheRead(("k", "v"), 64, sequences, 4096, queries=queries, pair_flops=pair)


def test_a_part_without_work_takes_its_starts():
    assert us(EMPTY) == pytest.approx(START)
    assert us(replace(EMPTY, launches=3)) == pytest.approx(3 * START)


def test_bytes_take_their_share_of_the_memory_rate():
    moved = 10**9
    alone = 1e6 * moved / (times.MEMORY_SHARE * H200.hbm_bytes_per_s)
    assert us(replace(EMPTY, weights=moved)) == pytest.approx(START + alone)
    assert us(EMPTY, caches=moved) == pytest.approx(START + alone)


def test_bytes_between_parts_come_from_the_l2_cache_as_far_as_they_fit():
    fits, beyond = H200.l2_bytes, 10**9
    weights, near, far = (
        us(replace(EMPTY, **moved)) - START
        for moved in ({"weights": fits}, {"activations": fits}, {"scratch": fits + beyond})
    )
    assert near == pytest.approx(weights / times.L2_SPEED)
    assert far == pytest.approx(near + us(replace(EMPTY, weights=beyond)) - START)


def test_bytes_and_products_overlap_but_not_wholly():
    """Reading and multiplying overlap in part: the time lies between the longer of the two times
    and their sum, and is the sum of its parts."""
    both = replace(EMPTY, weights=10**9, flops=10**11)
    bytes_us, products_us = (
        us(replace(EMPTY, **one)) - START for one in ({"weights": 10**9}, {"flops": 10**11})
    )
    whole = us(both) - START
    assert max(bytes_us, products_us) < whole < bytes_us + products_us
    assert whole == pytest.approx((bytes_us**2 + products_us**2) ** 0.5)
    spent = spent_of(both, 0, None, H200)
    assert spent.weights_us + spent.products_us + spent.starts_us == pytest.approx(spent.us)


def test_attention_counts_the_tokens_present():
    attended = replace(EMPTY, kind="fused", cache_reads=(read(),))
    short, long = (spent_of(attended, 0, present, H200).attention_us for present in (100, 1000))
    assert long == pytest.approx(10 * short)
    nobody_said = spent_of(attended, 0, None, H200).attention_us
    assert nobody_said == pytest.approx(short / 100)


def test_many_queries_reach_another_share_than_few():
    few, many = (
        replace(EMPTY, cache_reads=(read(queries, pair=10**6 // queries),)) for queries in (1, 64)
    )
    one, other = (spent_of(unit, 0, 4096, H200).attention_us for unit in (few, many))
    shares = times.DECODE_ATTENTION_SHARE / times.PROMPT_ATTENTION_SHARE
    assert other / one == pytest.approx(shares, rel=0.02)  # 63 tokens see a little less


def coded(tokens, **changed):
    """Returns a linear of 4-bit codes that multiplies `tokens` tokens."""
    numbers = 2 * 10**7
    unit = replace(EMPTY, kind="fused", codes="nvfp4", flops=2 * tokens * numbers)
    return replace(unit, weights=int(times.FOUR_BIT_BYTES * numbers), **changed)


def test_codes_that_stand_for_floats_take_longer_to_decode():
    int4, nvfp4, mxfp4 = (us(coded(16, codes=name)) for name in ("int4_k", "nvfp4", "mxfp4"))
    assert us(coded(16, codes="")) < int4 < nvfp4 < mxfp4
    # Other kernels multiply a single token.
    numbers, (_, alone) = 2 * 10**7, times.DECODED_PER_SM_S["nvfp4"]
    decoding = 1e6 * numbers / (alone * H200.num_sms)
    spent = spent_of(coded(1), 0, None, H200)
    assert spent.us - START < spent.weights_us + decoding * 1.1


def test_a_weight_is_decoded_again_for_each_tile_of_tokens():
    one, same, two = (times._decoding_s(coded(n), H200) for n in (2, 64, 128))
    assert one == same > 0
    assert two == pytest.approx(2 * one)
    assert times._decoding_s(coded(64, codes="fp8"), H200) == 0.0


def test_experts_of_few_tokens_are_decoded_too():
    dense = times._decoding_s(coded(3), H200)
    assert times._decoding_s(coded(3, family="moe"), H200) == dense > 0


def test_the_kernel_of_many_tokens_decodes_while_it_multiplies():
    kernels = ("mixed_linear_0123456789ab",)
    for name in ("int4_k", "mxfp4"):
        mixed, plain = coded(1024, codes=name, kernels=kernels), coded(1024, codes="")
        assert us(mixed) == pytest.approx(us(plain))
        assert us(mixed) < us(coded(1024, codes=name))
    assert us(coded(1024, kernels=kernels)) > us(coded(1024, codes=""))


def test_an_amount_has_a_field_for_all_that_time_is_spent_on():
    names = {one.name for one in fields(Spent)}
    assert names == set(SPENT) <= {one.name for one in fields(Amounts)}


# --- bars -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "kind"),
    [
        ([EMPTY], "decode, dense"),
        ([EMPTY, replace(EMPTY, family="moe")], "decode, mixture"),
        ([replace(EMPTY, family="moe"), replace(EMPTY, family="mla")], "decode, latent attention"),
        ([replace(EMPTY, family="lora")], "decode, adapters"),
        (
            [replace(EMPTY, family="moe"), replace(EMPTY, stores_codes=True)],
            "decode, weights as codes",
        ),
        ([replace(EMPTY, cache_reads=(read(queries=64),))], "prompt, dense"),
        ([replace(EMPTY, cache_reads=(read(queries=4),))], "decode, dense"),
    ],
)
def test_the_class_of_a_step(units, kind):
    assert class_of(units) == kind


def test_nine_of_ten_are_within():
    assert percent_of([1.0, 0.9]) == 10
    assert percent_of([1.0] * 9 + [2.0]) == 0
    assert percent_of([1.0] * 8 + [1.5, 2.0]) == 50
    assert percent_of([1.011]) == 2
    # An error bar is narrow only if it rests on many rows.
    assert (held_percent([1.02] * 9), held_percent([1.02] * 10)) == (10, 2)


def test_bars_are_those_of_the_held_out_rows():
    kept = json.loads((RESULTS / "predictions.json").read_text("utf-8"))["rows"]
    held = [row for row in kept if row["held_out"]]
    by_class = {row["class"]: [] for row in held}
    for row in held:
        by_class[row["class"]].append(row["ratio"])
    assert {name: held_percent(ratios) for name, ratios in by_class.items()} == bars.BARS
    assert max(bars.BARS.values()) <= bars.UNHELD
    published = json.loads((RESULTS / "published_b200.json").read_text("utf-8"))["rows"]
    ratios = [row["ratio"] for row in published if row["kind"] != "attention"]
    assert percent_of(ratios) == bars.PUBLISHED["sm100"]


def test_constants_were_fitted_to_rows_that_are_not_held_out():
    """Nine of ten rows to which the constants were fitted are modelled within 15 %."""
    kept = json.loads((RESULTS / "predictions.json").read_text("utf-8"))["rows"]
    fitted = [row["ratio"] for row in kept if not row["held_out"]]
    assert len(fitted) > 20
    assert percent_of(fitted) <= 15


def test_a_chip_that_was_not_measured_has_a_wider_bar_and_says_why():
    own = bar_of("decode, dense", H200)
    assert own.percent == bars.BARS["decode, dense"]
    assert "held-out" in own.why
    assert own.around(100.0) == pytest.approx((100 - own.percent, 100 + own.percent))
    other = bar_of("decode, dense", B200)
    assert other.percent > own.percent
    assert "no kernel of tilewright ran on sm100" in other.why
    for target in gpu_targets():
        bar = bar_of("decode, dense", target)
        assert bar.percent >= (own.percent if target.measured else bars.PUBLISHED["sm100"])


def test_a_class_without_a_row_has_no_narrow_bar():
    bar = bar_of("decode, another kind of weights", H200)
    assert bar.percent == bars.UNHELD
    assert "no step of" in bar.why
