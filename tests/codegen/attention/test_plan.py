"""Tests that plans of `cache_attention` choose the numbers of parts that an H100 ran fastest."""

from dataclasses import replace

import pytest

from tilewright.codegen.attention.plan import decode_config
from tilewright.codegen.attention.problem import AttentionSizes, CacheProblem
from tilewright.codegen.row_rounding import RowRounding
from tilewright.codegen.targets import SM90

LATENTS = CacheProblem(
    num_kv_heads=1,
    group=16,
    head_dim=512,
    v_dim=512,
    dtype="bf16",
    key_dtype="bf16",
    latent=True,
    rope_dim=64,
)
HEADS_OF_8 = CacheProblem(8, 4, 128, 128, "bf16", "bf16")
HEADS_OF_4 = CacheProblem(4, 8, 128, 128, "bf16", "bf16")
MANY_LATENTS = replace(LATENTS, group=128)
ROUNDED = replace(LATENTS, rounding=RowRounding(128, 0.0, 0.0, 1e-12))


@pytest.mark.parametrize(
    ("problem", "sequences", "keys", "splits"),
    [
        (LATENTS, 1, 2048, 64),
        (LATENTS, 8, 2048, 16),
        (LATENTS, 64, 1024, 2),
        (MANY_LATENTS, 1, 2048, 22),
        (MANY_LATENTS, 8, 2048, 8),
        (MANY_LATENTS, 64, 1024, 1),
        (ROUNDED, 1, 1024, 64),
        (ROUNDED, 1, 2048, 128),
        (ROUNDED, 8, 2048, 16),
        (ROUNDED, 16, 2048, 16),
        (ROUNDED, 64, 2048, 4),
    ],
)
def test_parts_of_latents(problem: CacheProblem, sequences: int, keys: int, splits: int) -> None:
    """Two programs share a multiprocessor if they round latents, but not if they only read them."""
    assert decode_config(problem, AttentionSizes(sequences, 1, keys), SM90).splits == splits


@pytest.mark.parametrize(
    ("problem", "sequences", "keys", "splits"),
    [
        (HEADS_OF_8, 1, 2048, 8),
        (HEADS_OF_4, 1, 2048, 16),
        (HEADS_OF_8, 1, 16384, 16),
        (HEADS_OF_4, 1, 16384, 32),
        (HEADS_OF_8, 16, 2048, 1),
        (HEADS_OF_4, 16, 2048, 2),
        (HEADS_OF_8, 64, 1024, 1),
        (HEADS_OF_4, 64, 1024, 1),
    ],
)
def test_parts_of_keys(problem: CacheProblem, sequences: int, keys: int, splits: int) -> None:
    """Keys get as many parts as were the fastest, or within 2 % of the fastest tiles."""
    assert decode_config(problem, AttentionSizes(sequences, 1, keys), SM90).splits == splits
