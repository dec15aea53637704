"""The numbers of tokens up to which the kernels of linears are faster than PyTorch."""

from __future__ import annotations

from typing import Any

from tilewright.codegen.mlp.mixed import decodes_codes, most_decoded
from tilewright.codegen.mlp.plan import MOST_CODED_TOKENS as MOST_CODED_TOKENS
from tilewright.codegen.mlp.plan import MOST_GATED_TOKENS as MOST_GATED_TOKENS
from tilewright.codegen.mlp.plan import MOST_TOKENS as MOST_TOKENS
from tilewright.codegen.mlp.plan import most_tokens, takes_norm
from tilewright.codegen.targets import Target
from tilewright.ops.mlp.arguments import LinearArguments
from tilewright.ops.mlp.mixed import decoding_obstacle, quantization_of_call


def slower(
    *,
    tokens: Any,
    weights: int = 1,
    norm: str = "",
    columns: int = 0,
    coded: bool = False,
    rounded: bool = False,
    target: Target | None = None,
) -> str | None:
    """Returns why PyTorch's own calls are faster for `tokens` rows; None if the kernel is faster.

    Args:
        weights: 2 for a gate and its up projection, else 1.
        norm: The kind of norm that the kernel would compute first; "" for none.
        columns: The number of columns of the rows that the norm reads.
        coded: Whether the weights are quantised.
        rounded: Whether x was decoded from codes, which a library's GEMM can multiply with the
            codes of the weights.
        target: The chip, if it may have a kernel for any number of tokens. `slower_on` then
            decides.
    """
    if coded and not rounded and target is not None and decodes_codes(target):
        return None
    most = most_tokens(weights, coded, rounded)
    if coded and not isinstance(tokens, int):
        return f"the number of tokens is symbolic, and may be more than {most}"
    if isinstance(tokens, int) and tokens > most:
        return f"more than {most} tokens: the library's GEMM is faster"
    if norm and not takes_norm(norm, tokens, columns, coded):
        return f"{norm} norm of {tokens} tokens: a separate kernel for the norm is faster"
    return None


def slower_on(a: LinearArguments, target: Target, varies: bool) -> str | None:
    """Returns why PyTorch's own calls are faster on a chip, for quantised weights; None if a kernel
    is faster. Reads only metadata. varies: whether the number of tokens is a symbol."""
    tokens = a.x.shape[0]
    if a.weight_format == "dense" or (tokens <= MOST_CODED_TOKENS and not varies):
        return None
    more = "perhaps more than" if varies else "more than"
    if (obstacle := decoding_obstacle(a, target)) is not None:
        why = f"{more} {MOST_CODED_TOKENS} tokens, and {obstacle}"
        return f"{why}: the library's GEMM is faster"
    most = most_decoded(quantization_of_call(a), a.linear.shape[1])
    if most is not None and (varies or tokens > most):
        return f"{more} {most} tokens of such codes: the library's GEMM is faster"
    return None
