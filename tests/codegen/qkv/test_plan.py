"""Tests which lowering a QKV problem takes: from the measured table, from the cost model, or by
exclusion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright.codegen.operand import Operand
from tilewright.codegen.qkv import measured
from tilewright.codegen.qkv.candidates import candidates, fits
from tilewright.codegen.qkv.kernels import DotsConfig, SwappedConfig, TiledConfig
from tilewright.codegen.qkv.plan import TOKEN_BUCKETS, choose, plan_fused_qkv
from tilewright.codegen.qkv.problem import HeadEpilogue, QkvProblem
from tilewright.codegen.qkv.time import _LOAD_BYTES_PER_SM_S, estimate, shared_bytes
from tilewright.codegen.row_norm import RowNorm
from tilewright.codegen.targets import SM80, SM86, SM89, SM90, SM100, SM120


def problem(hidden=4096, heads=32, kv_heads=8, dim=128, dtype="bf16", **changes) -> QkvProblem:
    cache = (16 * kv_heads * dim, kv_heads * dim, dim, 1)
    epilogue = HeadEpilogue(dtype, heads, kv_heads, dim, 16, dtype, cache, cache, **changes)
    weight = Operand(dtype, (0, dim * hidden, hidden, 1))
    return QkvProblem(hidden, Operand(dtype, (hidden,)), (weight,) * 3, epilogue)


LLAMA_8B = problem()
UNMEASURED = problem(hidden=5120, heads=40, kv_heads=8)


@pytest.fixture
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "measured_table", lambda file: ())


def test_fp32_tables_leave_no_room_for_a_wide_tile_in_one_go() -> None:
    """With fp32 tables, Triton 3.6 needs 262176 bytes of shared memory for a wide tile that is not
    cut into slices. Hopper has 232448."""
    walk = {"persistent": True, "flatten": True}
    whole = TiledConfig(128, 2, 64, 8, 4, **walk)
    for wide, parts, fitting in ((False, 1, True), (True, 1, False), (True, 2, True)):
        p = problem(rope_style="half", rotary_dim=128, rope_full_width=True, wide_tables=wide)
        assert fits(p, replace(whole, epilogue_parts=parts), SM90) == fitting


def test_measured_rows_can_be_launched() -> None:
    """Every config of the shipped table is legal for its dims, and no row occurs twice."""
    keys = set()
    for row in measured.measured_table(measured.NUMBERS_FILE):
        p = problem(row["hidden"], row["num_heads"], row["num_kv_heads"], row["head_dim"])
        if row["norm"]:
            p = replace(p, epilogue=replace(p.epilogue, normed=(True, True)))
        config = measured.read_config(row["config"])
        assert fits(p, config, SM90), row
        assert measured.write_config(config) == row["config"]
        assert 0 < row["fused_us"] < 1e5
        assert row["packed_library_us"] < 1.1 * row["library_us"]
        keys.add((p, row["num_tokens"]))
    assert len(keys) == len(measured.measured_table(measured.NUMBERS_FILE)) >= 60


def test_measured_dims_take_the_measured_config() -> None:
    row = measured.measured_row(LLAMA_8B, 50, SM90)
    assert row is not None
    assert row["num_tokens"] == 64
    choice = choose(LLAMA_8B, 50, SM90)
    assert choice.measured
    assert choice.config == measured.read_config(row["config"])
    assert f"{row['fused_us']:.1f} us measured" in choice.reason


@pytest.mark.parametrize("packed", [False, True])
def test_the_faster_of_two_measured_lowerings_is_taken(packed: bool) -> None:
    column = "packed_library_us" if packed else "library_us"
    taken = set()
    for tokens in TOKEN_BUCKETS:
        row = measured.measured_row(LLAMA_8B, tokens, SM90)
        choice = choose(LLAMA_8B, tokens, SM90, packed)
        assert choice.seconds == pytest.approx(min(row["fused_us"], row[column]) * 1e-6)
        taken.add(choice.name == "library")
    # Three GEMMs never win at these dims. One GEMM over packed weights wins at some token counts.
    assert taken == ({True, False} if packed else {False})


def test_a_chip_without_measurements_uses_the_model() -> None:
    choice = choose(LLAMA_8B, 64, SM100)
    assert not choice.measured
    assert "modelled" in choice.reason


@pytest.mark.usefixtures("no_table")
def test_few_tokens_swap_the_operands() -> None:
    plan = plan_fused_qkv(UNMEASURED, SM90)
    assert isinstance(plan.choice(1).config, SwappedConfig)
    assert isinstance(plan.choice(8192).config, TiledConfig | type(None))
    assert [c.max_tokens for c in plan.choices] == [*TOKEN_BUCKETS, None]


@pytest.mark.usefixtures("no_table")
def test_the_model_is_near_what_was_measured() -> None:
    """The predicted microseconds of the fused kernel are within a quarter of those measured, for
    Llama-3 8B and 70B on an H200."""
    measured = {
        (4096, 32): {16: 15.1, 64: 17.6, 1024: 78.1, 8192: 571},
        (8192, 64): {16: 43.1, 64: 45.4, 1024: 242, 8192: 1858},
    }
    for (hidden, heads), times in measured.items():
        p = problem(hidden, heads)
        for tokens, microseconds in times.items():
            best = min(estimate(p, c, tokens, SM90) for c in candidates(p, tokens, SM90))
            assert best * 1e6 == pytest.approx(microseconds, rel=0.25), (hidden, tokens)


@pytest.mark.parametrize("split", [2, 4])
def test_parts_of_k_are_written_and_read_again(split: int) -> None:
    """Splitting K has a cost: each part writes a sum in fp32 for every row and token, which is read
    again. This is at least eight bytes of traffic."""
    p, tokens = problem(8192, 64, 8), 64
    whole = SwappedConfig(64, tokens, 128, 8, 4)
    more = estimate(p, replace(whole, split_k=split), tokens, SM90)
    traffic = 8 * p.num_rows * tokens * split
    assert more - estimate(p, whole, tokens, SM90) >= traffic / SM90.hbm_bytes_per_s


@pytest.mark.parametrize("tokens", [16, 64])
def test_a_norm_of_x_reads_whole_rows_before_the_first_product(tokens: int) -> None:
    """Every program reads whole rows of x for the norm before its first product, because the norm
    cannot overlap an earlier product."""
    normed = replace(LLAMA_8B, input_norm=RowNorm(Operand("bf16", (1,)), 1e-5, 0.0, "layer"))
    config = SwappedConfig(64, tokens, 128, 4, 3)
    more = estimate(normed, config, tokens, SM90) - estimate(LLAMA_8B, config, tokens, SM90)
    assert more >= 0.99 * tokens * LLAMA_8B.hidden * 2 / _LOAD_BYTES_PER_SM_S


def test_static_tokens_have_one_choice() -> None:
    static = problem(num_tokens=7)
    plan = plan_fused_qkv(static, SM90)
    assert len(plan.choices) == 1
    assert plan.choices[0].max_tokens is None


def test_a_bucket_does_not_depend_on_the_count() -> None:
    """No token count gets a kernel that is compiled only for this count."""
    plan = plan_fused_qkv(LLAMA_8B, SM90)
    assert plan.choice(33) is plan.choice(64)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (problem(dtype="fp32"), "fp32"),
        (problem(dim=96), None),
        (
            replace(LLAMA_8B, weights=tuple(Operand("bf16", (0, n, n, 1)) for n in (1, 2, 3))),
            None,
        ),
    ],
    ids=["fp32", "head_dim 96", "weights of different strides"],
)
def test_what_tma_cannot_take_goes_elsewhere(changed: QkvProblem, reason: str | None) -> None:
    many = choose(changed, 4096, SM90)
    assert not isinstance(many.config, TiledConfig)
    if reason:
        assert many.name == "library"
        assert reason in many.reason


def test_an_unknown_chip_runs_the_library() -> None:
    plan = plan_fused_qkv(LLAMA_8B, replace(SM90, features=frozenset()))
    assert {choice.name for choice in plan.choices} == {"library"}


@pytest.mark.parametrize("target", [SM89, SM86, SM80], ids=lambda t: t.name)
def test_a_chip_without_tma_runs_the_library(target) -> None:
    choices = plan_fused_qkv(LLAMA_8B, target).choices
    assert {choice.name for choice in choices} == {"library"}


def test_a_norm_keeps_heads_whole() -> None:
    normed = problem(normed=(True, True))
    for config in candidates(normed, 16, SM90):
        if isinstance(config, SwappedConfig):
            assert config.block_p >= normed.epilogue.pairs_per_head
    assert not fits(normed, SwappedConfig(32, 16, 128, 4, 4), SM90)
    assert fits(LLAMA_8B, SwappedConfig(32, 16, 128, 4, 4), SM90)


@pytest.mark.parametrize(
    ("style", "head_dim", "rotary_dim", "pairs"),
    [
        ("interleaved", 64, 64, 32),
        ("interleaved", 64, 16, 32),
        ("half", 64, 64, 32),
        ("half", 96, 64, 64),  # the elements of a pair are 32 apart, which gives two runs
        ("half", 80, 32, 48),
        ("none", 24, 0, 12),
        ("none", 25, 0, 13),
    ],
)
def test_pairs_cover_a_head(style, head_dim, rotary_dim, pairs) -> None:
    heads = problem(dim=head_dim, rope_style=style, rotary_dim=rotary_dim).epilogue
    assert heads.pairs_per_head == pairs


def extents_of(config: DotsConfig | SwappedConfig | TiledConfig) -> tuple[int, ...]:
    """Returns the extents of tiles and the number of warps, which must be powers of two for
    Triton."""
    if isinstance(config, DotsConfig):
        return config.block_p, config.block_k, config.num_warps
    if isinstance(config, SwappedConfig):
        return config.block_p, config.block_t, config.block_k, config.num_warps
    return config.block_m, config.heads_per_tile, config.block_k, config.num_warps


@pytest.mark.parametrize("target", [SM90, SM100, SM120], ids=lambda t: t.name)
def test_candidates_fit_the_chip(target) -> None:
    for p in (LLAMA_8B, UNMEASURED, problem(2048, 32, 8, 64), problem(2880, 64, 8, 64)):
        for tokens in (1, 64, 65, 512, 4096):
            found = candidates(p, tokens, target)
            assert found or target is SM120  # the library computes tiles of many tokens
            assert len(found) == len(set(found))
            for config in found:
                assert shared_bytes(p, config, target) < target.max_shared_bytes
                assert all(extent.bit_count() == 1 for extent in extents_of(config)), config
                if isinstance(config, TiledConfig):
                    heads = p.epilogue.num_heads, p.epilogue.num_kv_heads
                    assert not any(count % config.heads_per_tile for count in heads)
