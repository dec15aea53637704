"""The sizes up to which the kernels of linears are faster than PyTorch."""

from __future__ import annotations

from typing import Any

from tilewright.codegen.mlp.plan import MOST_CODED_TOKENS as MOST_CODED_TOKENS
from tilewright.codegen.mlp.plan import MOST_GATED_TOKENS as MOST_GATED_TOKENS
from tilewright.codegen.mlp.plan import MOST_TOKENS as MOST_TOKENS
from tilewright.codegen.mlp.plan import most_tokens, takes_norm


def slower(
    *,
    tokens: Any,
    weights: int = 1,
    norm: str = "",
    columns: int = 0,
    coded: bool = False,
    rounded: bool = False,
) -> str | None:
    """Returns why PyTorch's own calls are faster for `tokens` rows; None if the kernel is.

    weights: 2 for a gate and its up projection. norm: the kind of norm of rows of `columns` numbers
    that the kernel would compute first; empty for none. coded: the weights are quantised. rounded:
    x is decoded from codes, which a library's GEMM can multiply with those of the weights.
    """
    most = most_tokens(weights, coded, rounded)
    if isinstance(tokens, int) and tokens > most:
        return f"more than {most} tokens: the library's GEMM is the faster one"
    if norm and not takes_norm(norm, tokens, columns):
        return f"{norm} norm of {tokens} tokens: a kernel of its own is the faster one"
    return None
