"""The linears that patterns of this family look for: few tokens, a weight as it is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.mlp.plan import MOST_TOKENS
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.quantised.scales import Names, weight_arguments
from tilewright.patterns.quantised.weights import match_scaled_weight, refuse, repeated
from tilewright.patterns.quantised.words import holds_codes
from tilewright.patterns.recognise.dtypes import HALVES, check_dtypes, dtype_name
from tilewright.patterns.recognise.gemm import piece_of
from tilewright.patterns.recognise.linear import match_columns

# Values that the model stores.
STORED = ("constant", "input")
# A shorter sum, or fewer of them, is a factor of an adapter, or a gate.
LEAST_COLUMNS = 64


@dataclass(frozen=True)
class FewTokens:
    """x @ weight^T + bias: x [T, K], weight [N, K], bias [N] or None.

    coded: the weight is computed from codes. sums_scale [N]: what their sums are multiplied with.
    """

    x: View
    weight: View
    bias: View | None
    absorbed: tuple[Value, ...]
    coded: bool = False
    sums_scale: View | None = None

    @property
    def product(self) -> Value:
        """What reads x."""
        return self.absorbed[-1]

    @property
    def float_values(self) -> tuple[Value, ...]:
        """Activation and weight, those that are no codes."""
        return (self.x.value,) if self.coded else (self.x.value, self.weight.value)


def match_few_tokens(view: View) -> FewTokens | None:
    """The linear that a view [tokens..., N] is, or whose columns it is; None for any other view,
    and where there are certainly too many tokens for the op."""
    value = view.value
    # Of a sum of two tensors of its shape, a residual, none is a bias: nothing to look for behind.
    by_column = value.op in ("aten.add", "aten.mul") and any(
        v.shape != value.shape for v in value.operands
    )
    try:
        columns = match_columns(view, bare=not by_column)
        if columns is None or not columns.all_tokens:
            return None
        linear = columns.linear
        if linear.clip or linear.deltas or linear.gemm.x_scale or linear.gemm.weight_scale:
            return None
        x, weight = columns.x.matrix, columns.weight
        coded = weight.value.op not in STORED and holds_codes(weight.value, {})
        bias, scale = columns.bias, columns.scale
    except InexpressibleError:
        return None
    if len(weight.shape) != 2:
        return None
    if not all(isinstance(n, int) and n >= LEAST_COLUMNS for n in weight.shape):
        return None
    # Of codes the library's GEMM would want the numbers first: an op for few tokens alone.
    if not _few(x.shape[0]) or (coded and not isinstance(x.shape[0], int)):
        return None
    if not coded and (weight.value.op not in STORED or len(weight.value.shape) != 2):
        return None
    return FewTokens(x, weight, bias, linear.absorbed, coded, scale)


def match_codes(linears: Sequence[FewTokens], names: Sequence[Names]) -> dict[str, Any]:
    """The op's arguments for the weights of linears, by the names of their codes, scale and zero.

    Raises Reject (WEIGHT_FORMAT, SCALE_BLOCK) for codes that the op does not know, and where not
    all are of one format.
    """
    if not any(linear.coded for linear in linears):
        return {codes: one.weight for (codes, *_), one in zip(names, linears, strict=False)}
    weights = []
    for linear in linears:
        weight, scale = piece_of(linear.weight), linear.sums_scale
        wide = None if scale is None else repeated(scale, weight.shape[1])
        found = match_scaled_weight(weight, wide)
        if found is None:
            refuse(weight, "the other weight is not")
        if found.codes.value.op not in STORED:
            refuse(weight, "these are not what the model stores")
        weights.append(found)
    return weight_arguments(weights, names)


def _few(tokens: Any) -> bool:
    """Not of sizes that only data tell: those are a mixture's."""
    if isinstance(tokens, int):
        return tokens <= MOST_TOKENS
    return not any(str(symbol).startswith("u") for symbol in tokens.free_symbols)


def check_linears(linears: Iterable[FewTokens], others: Iterable[View], end: Value) -> None:
    """Raises Reject (DTYPE, UNSUPPORTED) for what there are no kernels for."""
    linears = list(linears)
    given = [value.dtype for one in linears for value in one.float_values]
    made = [value.dtype for one in linears for value in one.absorbed]
    more = [view.value.dtype for view in others]
    check_dtypes([*given, *made, *more, end.dtype], "activations and weights", end, HALVES)


def linear_facts(linear: FewTokens, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What reports say of a linear; arguments: the op's."""
    tokens, columns = linear.x.shape
    size = effects.size_fact(tokens)
    return {
        "x": f"{dtype_name(linear.x.value.dtype)}[{size},{columns}]",
        "n": linear.weight.shape[0],
        **({"weights": arguments["weight_format"]} if linear.coded else {}),
    }


def in_shape_of(end: Value, linear: FewTokens) -> effects.Effect:
    """The op's output [T, N] in the shape of the value that it replaces."""
    made = (linear.x.shape[0], linear.weight.shape[0])
    return effects.reshape(effects.identity(made), end.shape)
