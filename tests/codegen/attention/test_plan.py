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
ROUNDED = replace(LATENTS, rounding=RowRounding(128, 0.0, 0.0, 1e-12))


@pytest.mark.parametrize(
    ("problem", "sequences", "keys", "splits"),
    [
        (LATENTS, 1, 2048, 64),
        (LATENTS, 8, 2048, 16),
        (LATENTS, 64, 1024, 2),
        (ROUNDED, 1, 2048, 64),
        (ROUNDED, 16, 2048, 16),
        (ROUNDED, 64, 2048, 4),
    ],
)
def test_parts_of_latents(problem: CacheProblem, sequences: int, keys: int, splits: int) -> None:
    """Two programs share a multiprocessor if they round latents, but not if they only read them."""
    assert decode_config(problem, AttentionSizes(sequences, 1, keys), SM90).splits == splits
