"""Tests that plans of `cache_attention` choose the numbers of parts that an H100 and an H200 ran
fastest."""

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
NARROW_HEADS = replace(HEADS_OF_8, head_dim=64, v_dim=64)
MANY_LATENTS = replace(LATENTS, group=128)
ROUNDED = replace(LATENTS, rounding=RowRounding(128, 0.0, 0.0, 1e-12))


#: An H100 has the record of an H200, but slower memory.
H100 = replace(SM90, hbm_bytes_per_s=2.95e12)


def parts(problem: CacheProblem, sequences: int, keys: int) -> tuple[int, ...]:
    """Returns the numbers of parts of the plans for an H100 and an H200."""
    sizes = AttentionSizes(sequences, 1, keys)
    return tuple(decode_config(problem, sizes, target).splits for target in (H100, SM90))


@pytest.mark.parametrize(
    ("problem", "sequences", "keys", "on_h100", "on_h200"),
    [
        (LATENTS, 1, 2048, 64, 64),
        (LATENTS, 8, 2048, 16, 16),
        (LATENTS, 32, 2048, 4, 8),
        (LATENTS, 64, 1024, 2, 4),
        (MANY_LATENTS, 1, 2048, 32, 32),
        (MANY_LATENTS, 8, 2048, 8, 8),
        (MANY_LATENTS, 64, 1024, 1, 1),
        (ROUNDED, 1, 1024, 64, 64),
        (ROUNDED, 1, 2048, 128, 128),
        (ROUNDED, 8, 2048, 16, 16),
        (ROUNDED, 16, 2048, 16, 16),
        (ROUNDED, 64, 2048, 4, 4),
    ],
)
def test_parts_of_latents(
    problem: CacheProblem, sequences: int, keys: int, on_h100: int, on_h200: int
) -> None:
    """Two programs share a multiprocessor if they round latents. Programs that only read latents
    share one on an H200, whose memory is faster than a single program reads, but not on an H100."""
    assert parts(problem, sequences, keys) == (on_h100, on_h200)


@pytest.mark.parametrize(
    ("problem", "sequences", "keys", "on_h100", "on_h200"),
    [
        (HEADS_OF_8, 1, 16384, 16, 16),
        (HEADS_OF_4, 1, 2048, 16, 16),
        (HEADS_OF_4, 1, 16384, 32, 32),
        (HEADS_OF_8, 16, 2048, 1, 1),
        (HEADS_OF_4, 16, 2048, 2, 2),
        (HEADS_OF_8, 64, 1024, 1, 1),
        (HEADS_OF_4, 64, 1024, 1, 1),
        (NARROW_HEADS, 8, 2048, 2, 4),
        (NARROW_HEADS, 8, 8192, 2, 4),
        (NARROW_HEADS, 16, 2048, 1, 2),
    ],
)
def test_parts_of_keys(
    problem: CacheProblem, sequences: int, keys: int, on_h100: int, on_h200: int
) -> None:
    """Keys get as many parts as were the fastest, or within 5 % of the fastest tiles."""
    assert parts(problem, sequences, keys) == (on_h100, on_h200)


@pytest.mark.parametrize(("keys", "stages"), [(1024, 2), (4096, 3)])
def test_no_more_stages_than_blocks(keys: int, stages: int) -> None:
    """A part with one block of latents has two stages, and a part with more blocks has three."""
    config = decode_config(ROUNDED, AttentionSizes(1, 1, keys), SM90)
    assert config.num_stages == stages
