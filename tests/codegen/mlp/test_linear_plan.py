"""Tests that plans of linears choose the tiles that an H100 ran fastest."""

import pytest

from tilewright.codegen.mlp.plan import linear_config
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.targets import SM90, SM100, Target


def tiles(rows: int, columns: int, gated: bool, tokens: int, target: Target = SM90) -> str:
    problem = LinearProblem(rows, columns, "bf16", gated, k_major=True)
    config = linear_config(problem, tokens, target)
    return f"{config.block_n}x{config.block_k} /{config.split_k} s{config.num_stages}"


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize(
    ("rows", "columns", "wanted"),
    [(14336, 4096, "64x128 /1 s5"), (9728, 2560, "128x64 /1 s5")],
    ids=["llama3-8b", "qwen3-4b"],
)
def test_gate_and_up(rows: int, columns: int, wanted: str, tokens: int) -> None:
    """A step reads 32 KiB of the weights. Tiles are wide if a second wave of programs would be
    nearly empty."""
    assert tiles(rows, columns, True, tokens) == wanted


def test_other_linears_keep_short_steps() -> None:
    """Chips on which nothing was measured, and one weight with few tokens, have other tiles."""
    assert tiles(14336, 4096, True, 16, SM100) == "64x64 /1 s5"
    assert tiles(4096, 14336, False, 16) == "64x128 /4 s5"
    assert tiles(4096, 14336, False, 64, SM100) == "64x64 /4 s6"


def test_one_weight_and_64_tokens() -> None:
    """The programs are alone on a multiprocessor, so K has half as many parts."""
    assert tiles(4096, 14336, False, 64) == "64x128 /2 s5"
    assert tiles(2560, 9728, False, 64) == "64x128 /3 s5"
