"""Tests what the options leave in the emitted source, and which kernels a problem may have with
them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.codegen.qkv.test_templates import fused_spec
from tilewright.codegen.emit import emit
from tilewright.codegen.qkv.candidates import candidates
from tilewright.codegen.qkv.kernels import SwappedConfig, TiledConfig
from tilewright.codegen.qkv.plan import choose
from tilewright.codegen.qkv.problem import (
    QkvProblem,
    heads_fit,
    swapped_obstacle,
    tiled_obstacle,
    tiled_weights,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.samples import AttentionCase

LLAMA = AttentionCase(
    "llama", hidden=128, num_heads=8, head_dim=64, rope_style="half", rotary_dim=64, page_size=16
)
TABLE = replace(LLAMA, slots="ragged", new_tokens=(0, 5), cached_tokens=(3, 20))
NORMED = replace(LLAMA, qk_norm=True)
TILES = TiledConfig(16, 1, 32, 4, 2)
FEW = SwappedConfig(32, 16, 32, 4, 2)


def problem(case: AttentionCase) -> QkvProblem:
    return prepare(qkv_cache.OP.sample_inputs(case)).problem


def spec_of(case: AttentionCase, config: SwappedConfig | TiledConfig) -> KernelSpec:
    return fused_spec(qkv_cache.OP.sample_inputs(case), config)


def tiled(case: AttentionCase) -> str:
    return emit(spec_of(case, TILES))


def test_a_plain_kernel_holds_nothing_of_the_options() -> None:
    source = tiled(LLAMA)
    for word in ("clamp", "rsqrt", "lookup", "sequences", "scale", "float8"):
        assert word not in source.partition("def qkv_projection")[2], word
    assert source.count("tl.store(") == 2


@pytest.mark.parametrize(
    ("projection", "block"),
    [("separate", "[1, 1, 1, 64, 32]"), ("grouped", "[1, 1, 1, 64, 32]"), ("n_major", "32, 64]")],
)
def test_one_descriptor_reaches_the_weights(projection: str, block: str) -> None:
    source = tiled(replace(LLAMA, projection=projection))
    assert source.count("tl.make_tensor_descriptor(") == 2
    assert block in source
    assert ("weight.T" in source) == (projection != "n_major")


@pytest.mark.parametrize(("dtype", "limit"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
def test_8_bit_caches_saturate_and_leave_q_alone(dtype: str, limit: int) -> None:
    source = tiled(replace(LLAMA, cache_dtype=getattr(torch, dtype), cache_scale="head"))
    body = source.partition("def qkv_projection")[2]
    assert body.count("tl.clamp(") == 2
    assert body.count(f"-{limit}.0, {limit}.0") == 2
    assert body.count("tl.store(") == 4
    assert "low / scale" in body
    assert "< 64)" not in body, "no store of a whole head has a mask over its dims"
    multiplied = replace(LLAMA, cache_dtype=getattr(torch, dtype), cache_scale="one")
    assert "low * scale" in tiled(replace(multiplied, cache_scale_multiplies=True))


def test_row_offsets_are_compared_where_they_are_few() -> None:
    few = emit(spec_of(TABLE, FEW))
    assert "tl.sum((offset" in few
    many = replace(TABLE, new_tokens=(0,) * 299 + (5,), cached_tokens=(0,) * 300)
    source = emit(spec_of(many, FEW))
    assert "tl.sum((offset" not in source
    assert source.count("sequences_ptr + ") == 9 + 1  # 2 ** 9 > 300, plus the token's own


def test_repeated_heads_are_stored_again_and_projected_once() -> None:
    source = tiled(replace(LLAMA, kv_repeat=3))
    assert source.count("tl.store(") == 2 * 3
    assert source.count("tl.dot(") == tiled(LLAMA).count("tl.dot(")


def test_counts_of_tables_come_at_run_time() -> None:
    """A longer table or more sequences need no separate kernel."""
    spec = spec_of(TABLE, FEW)
    assert {"num_sequences", "lookup_columns", "lookup_stride"} <= dict(spec.signature).keys()
    longer = replace(TABLE, new_tokens=(5, 0, 0), cached_tokens=(77, 1, 1), num_pages=9)
    assert spec_of(longer, FEW) == spec


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(NORMED, norm_width="row", norm_per_head=True), "all heads of a projection"),
        (replace(LLAMA, dtype=torch.float32), "fp32"),
    ],
    ids=["norm of rows", "fp32"],
)
def test_what_no_fused_kernel_takes_goes_to_the_library(case: AttentionCase, reason: str) -> None:
    for tokens in (1, 4096):
        choice = choose(problem(case), tokens, SM90, packed=False)
        assert choice.name == "library"
        assert reason in choice.reason


def test_weights_of_two_orders_have_no_fused_kernel() -> None:
    plain, turned = problem(LLAMA), problem(replace(LLAMA, projection="n_major"))
    mixed = replace(plain, weights=(turned.weights[0], *plain.weights[1:]))
    assert "others are n-major" in (swapped_obstacle(mixed) or "")
    assert "strides" in (tiled_obstacle(mixed) or "")
    assert choose(mixed, 64, SM90, packed=False).name == "library"


def test_heads_are_loaded_together_where_they_are_neighbours() -> None:
    grouped = problem(replace(LLAMA, projection="grouped"))
    assert tiled_weights(grouped).head_steps == (6, 1, 6, 6)
    assert heads_fit(grouped, 1)
    assert not heads_fit(grouped, 2)
    # The groups of q are apart in memory, and the heads of k and v are next to each other, so tiles
    # must divide a group.
    plain = problem(LLAMA)
    _, head, *rest = plain.weights[0].strides
    q = replace(plain.weights[0], strides=(7 * head, head, *rest))
    epilogue = replace(plain.epilogue, group=4)
    apart = replace(plain, weights=(q, *plain.weights[1:]), epilogue=epilogue)
    assert heads_fit(apart, 2)
    assert not heads_fit(replace(apart, epilogue=replace(epilogue, group=1)), 2)


@pytest.mark.parametrize("target", [SM90, SM100], ids=["sm90", "sm100"])
def test_a_norm_after_the_rotation_keeps_heads_whole(target) -> None:
    after = problem(replace(NORMED, head_dim=128, rotary_dim=128, norm_after_rope=True))
    found = candidates(after, 4096, target)
    assert found
    for config in found:
        assert isinstance(config, TiledConfig)
        assert config.pair_parts == 1
