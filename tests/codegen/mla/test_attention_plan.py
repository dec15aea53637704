"""Tests which tiles the plan chooses for MLA's attention on Hopper. The choice depends on the
number of keys of a sequence, as measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention_cases import attention_spec
from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.attention.blocks import KEYS, QUERIES
from tilewright.codegen.attention.prefill_tiles import L2_SHARE, schedule
from tilewright.codegen.attention.problem import AttentionSizes
from tilewright.codegen.build import compile_for
from tilewright.codegen.mla.attention_kernels import AttentionProblem
from tilewright.codegen.mla.attention_plan import attention_config
from tilewright.codegen.targets import SM90, SM100

DENSE = AttentionProblem(
    num_heads=16, nope=128, rope=64, v_dim=128, dtype="bf16", out="bf16", tma=True, rope_tma=True,
    joint=True,
)  # fmt: skip
WIDE = replace(DENSE, num_heads=20, nope=192, v_dim=256)
RAGGED = replace(DENSE, ragged=True, sequences=8)


def sizes(sequences: int, tokens: int) -> AttentionSizes:
    return AttentionSizes(sequences, tokens, tokens)


@pytest.mark.parametrize(
    ("problem", "given", "tiles"),
    [
        (DENSE, sizes(1, 512), "64 queries x 64 keys w4 s3"),
        (DENSE, sizes(1, 1024), "64 queries x 64 keys w4 s2"),
        (replace(DENSE, num_heads=128), sizes(1, 512), "64 queries x 64 keys w4 s2"),
        (DENSE, sizes(1, 1536), "128 queries x 64 keys w8 s3"),
        (DENSE, sizes(1, 4096), "128 queries x 128 keys w4 s2 tma one loop ws"),
        (RAGGED, sizes(6, 5120), "128 queries x 128 keys w4 s2 tma one loop ws"),
        (RAGGED, sizes(8, 1600), "64 queries x 64 keys w4 s2 one loop"),
        (replace(RAGGED, sequences=128), sizes(100, 409600), "128 queries x 64 keys w8 s3"),
        (replace(RAGGED, tma=False), sizes(6, 12288), "128 queries x 64 keys w8 s3"),
        (replace(DENSE, attn_mask="u8"), sizes(1, 4096), "128 queries x 64 keys w8 s3"),
        (replace(DENSE, attn_mask="fp32"), sizes(1, 4096), "128 queries x 64 keys w8 s2"),
        # The plan assumes that the queries see as many keys of a cache as there are queries.
        (
            replace(DENSE, attn_mask="u8"),
            AttentionSizes(1, 1, 65536),
            "64 queries x 64 keys w4 s3",
        ),
        (
            replace(DENSE, attn_mask="u8"),
            AttentionSizes(8, 1024, 4096),
            "64 queries x 64 keys w4 s2",
        ),
        (
            replace(WIDE, attn_mask="u8"),
            AttentionSizes(8, 1, 4096),
            "64 queries x 64 keys w8 s2",
        ),
        (replace(WIDE, attn_mask="u8"), sizes(1, 1024), "128 queries x 32 keys w8 s2"),
        (replace(DENSE, out="fp32"), sizes(1, 4096), "128 queries x 64 keys w8 s3"),
    ],
)
def test_tiles_by_the_keys_of_a_sequence(problem, given, tiles):
    assert str(attention_config(problem, given, SM90)) == tiles


@pytest.mark.parametrize("keys", [2048, 16384])
@pytest.mark.parametrize("problem", [DENSE, WIDE, replace(WIDE, dtype="fp8e4nv")])
def test_heads_side_by_side_have_keys_and_values_that_l2_holds(problem, keys):
    """Tests the groups of heads that run at the same time. Their keys and values fit into the L2
    cache, and there are as few groups as possible."""
    given = AttentionSizes(2, keys, keys)
    config = attention_config(problem, given, SM90)
    tiles = schedule(
        config, given, SM90, heads=problem.num_heads, key_bytes=problem.key_bytes, ragged=False
    )
    dtype = torch.float8_e4m3fn if problem.is_fp8 else torch.bfloat16
    held = torch.empty(keys, problem.nope + problem.v_dim, dtype=dtype, device="meta").nbytes
    pairs, share = 2 * problem.num_heads, L2_SHARE * SM90.l2_bytes
    groups = cdiv(pairs, tiles.head_group)
    assert groups > 1
    assert tiles.head_group * held <= share < cdiv(pairs, groups - 1) * held


def test_wider_heads_get_tiles_that_fit():
    wide = replace(DENSE, nope=256, v_dim=256)
    config = attention_config(wide, sizes(1, 4096), SM90)
    nope, rope, v = wide.blocks
    held = config.block_m * (nope + rope) + config.num_stages * config.block_n * (nope + rope + v)
    assert 2 * held < SM90.max_shared_bytes


def test_a_part_of_several_chunks_fits_shared_memory():
    """Tests that the tiles that need the most shared memory fit into it. The result of a part is in
    fp32, and the compiler may keep it in separate shared memory.

    Among the parts that the plan makes, parts with these tiles take the most shared memory.
    """
    part = replace(RAGGED, num_heads=128, sequences=1, out="fp32", has_lse=True)
    config = attention_config(part, sizes(1, 4096), SM90)
    assert config.block_m == 128
    audit = compile_for(attention_spec(part, config, 4096)).audit
    assert audit.shared_bytes <= SM90.max_shared_bytes


@pytest.mark.parametrize("target", [SM90, SM100], ids=lambda target: target.name)
@pytest.mark.parametrize("dims", [(128, 64, 128), (64, 32, 64), (192, 64, 256)], ids=str)
@pytest.mark.parametrize("queries", [1, 100, 4096])
@pytest.mark.parametrize("dtype", ["bf16", "fp8e4nv"])
def test_tiles_of_a_masked_call_divide_those_of_its_list(target, dims, queries, dtype):
    nope, rope, v_dim = dims
    masked = replace(DENSE, nope=nope, rope=rope, v_dim=v_dim, dtype=dtype, attn_mask="u8")
    config = attention_config(masked, AttentionSizes(2, queries, 4096), target)
    assert (QUERIES % config.block_m, KEYS % config.block_n) == (0, 0)
    assert not config.warp_specialize
