"""The sizes for which absorbed attention is faster than attention to expanded keys, which the
up-projection computes from the latents."""

from __future__ import annotations

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.attention.plan import decode_rows
from tilewright.codegen.attention.problem import CacheProblem
from tilewright.codegen.mla.plan import DecodeSizes, absorbs


def is_faster(
    *,
    queries: int,
    keys: int,
    heads: int,
    nope: int,
    rope: int,
    v_dim: int,
    rank: int,
    sequences: int = 0,
) -> bool:
    """Whether absorbed attention is faster. The arguments have the meaning of the fields of
    DecodeSizes."""
    problem = CacheProblem(1, heads, rank, rank, "bf16", "bf16", latent=True, rope_dim=rope)
    tile_queries, tile_heads, rows = decode_rows(problem, queries)
    tiles = cdiv(queries, tile_queries) * cdiv(heads, tile_heads)
    sizes = DecodeSizes(queries, keys, heads, nope, rope, v_dim, rank, rows, tiles, sequences)
    return absorbs(sizes)
