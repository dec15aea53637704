"""A linear whose result is added to a residual, for example the output projection of an attention,
or the second half of an MLP.

    out = residual + scale * linear(x, weight)     ⇒   linear_residual(x, weight, residual)
    out = residual + scale * rms_norm(linear(x, weight))   ⇒   linear_residual(.., rms_norm=True)

The first form matches every shape in which the columns of a token are contiguous. The second form
requires that the number of tokens is not symbolic. On a chip that has a kernel that decodes
quantised weights, the pattern also matches many tokens, or a symbolic number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilewright.ops.mlp.gains import MOST_TOKENS
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope
from tilewright.patterns.language import (
    Match,
    Missed,
    Reject,
    Result,
    Sought,
    Stage,
    register,
    reject,
)
from tilewright.patterns.mlp.linears import (
    WEIGHT_NAMES,
    FewTokens,
    check_linears,
    linear_facts,
    match_codes,
    match_few_tokens,
    match_unlike,
    weighed,
)
from tilewright.patterns.mlp.norms import norms_before, norms_between
from tilewright.patterns.recognise.norm import Norm
from tilewright.patterns.recognise.ranks import part_of_a_sum
from tilewright.patterns.recognise.row_norm import rms_norm_of, row_norm_arguments, unread


@dataclass(frozen=True)
class Sum:
    """The sum `residual + scale * linear`, or `residual + scale * norm(linear)`.

    Attributes:
        linear: The linear whose result is added.
        residual: The tensor that is added to the linear's result.
        scale: The number that multiplies the linear's result.
        norm: The norm of the linear's result, or None.
        absorbed: The values that the op replaces. They include the product with `scale`, and the
            norm.
    """

    linear: FewTokens
    residual: View
    scale: float
    norm: Norm | None
    absorbed: tuple[Value, ...]


@dataclass(frozen=True)
class Anchor:
    """A sum and the linears that it adds.

    Attributes:
        stores: The sum, and the linear that goes into it.
        products: The linears of all sides of the sum. A miss accounts for them.
    """

    stores: tuple[Value, Value]
    products: tuple[Value, ...]


@dataclass(frozen=True)
class LinearResidual:
    """Matches a linear whose result is added to a residual."""

    name: str = "linear_residual"
    op: str = "linear_residual"
    asked_before: ClassVar[tuple[str, ...]] = ("grouped_gemm_nvfp4",)
    takes_leftovers: bool = True
    optional: ClassVar[bool] = True  # without a kernel, PyTorch's product is good enough
    sought: ClassVar[Sought] = Sought(
        f"linears of at most {MOST_TOKENS} tokens (more with quantised weights) with a residual "
        "sum after them",
        frozenset({"aten.linear", "aten.addmm", "aten.mm", "aten.matmul"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Anchor | Missed]:
        """Yields the sums that add linears for few tokens, even if the op cannot compute a sum,
        because such a sum becomes a miss. Also yields a miss for each norm in front of such a
        linear, if the op cannot compute this norm."""
        for value in flow.values:
            if value.op != "aten.add":
                continue
            sums = list(_sums_of(value, flow))
            products = tuple(_products(value, sums))
            if products:
                yield Anchor((value, products[0]), products)
                for found in sums:
                    yield from norms_before(found.linear)

    def match(self, anchor: Anchor, flow: Dataflow) -> Match:
        end, _ = anchor.stores
        sums = list(_sums_of(end, flow))
        taken = [one for one in sums if _is_taken(one)]
        if not taken:
            if sums:
                product = sums[0].linear.product
                message = f"a norm reads {product}, whose number of tokens is symbolic; for "
                message += f"more than {MOST_TOKENS} tokens, PyTorch's product and norm are faster"
                hint = (
                    "compile this graph for one number of tokens: torch.compile(..., dynamic=False)"
                )
                reject("UNSUPPORTED", Stage.GUARDS, message, product, hint=hint)
            if near := [*_unlike(end), *norms_between(end)]:
                raise Reject(near[0].miss)
            message = "the ranks' parts of the linear are summed before the residual is added"
            reject("COLLECTIVE", Stage.ACTIVATION, message, end)
        refused: list[Reject] = []
        for one in taken:
            try:
                return self._of(end, one)
            except Reject as why:  # the other side may match
                refused.append(why)
        raise refused[0]

    def _of(self, anchor: Value, found: Sum) -> Match:
        """Returns the match of a sum. One side of the sum is the linear, the other side is the
        residual. Raises Reject if the op does not support the dtypes or the format of the
        weight."""
        linear = found.linear
        check_linears([linear], [found.residual], anchor)
        weights = match_codes([linear], [WEIGHT_NAMES])
        return Match(
            anchor=anchor,
            arguments={
                "x": linear.rows,
                **weights,
                "residual": found.residual.reshape(*linear.made),
                "bias": linear.bias,
                "scale": found.scale,
                **row_norm_arguments(found.norm),
            },
            results=(Result.of_rows(anchor, linear.made),),
            absorbed=(anchor, *found.absorbed),
            facts={
                **linear_facts(linear, weights),
                "bias": "yes" if linear.bias is not None else "no",
                **({"scale": found.scale} if found.scale != 1.0 else {}),
                **({"norm": "rms"} if found.norm is not None else {}),
            },
            scope=common_scope(linear.product.scope, anchor.scope),
        )


def _sums_of(value: Value, flow: Dataflow) -> Iterator[Sum]:
    """Yields a Sum for each side of an addition, if this side is a linear for few tokens whose
    result nothing else reads."""
    if value.kwargs.get("alpha", 1) != 1:
        return
    for product, residual in value.either_way:
        if product.shape != value.shape or residual.shape != value.shape:
            continue
        found = _match_normed(product, residual) or _match_scaled(product, residual, flow)
        if found is not None and _is_read_here_alone(found, value, flow):
            yield found


def _is_taken(found: Sum) -> bool:
    """Whether the op can compute a sum. If the sum has a norm, the number of tokens must not be
    symbolic."""
    return found.norm is None or isinstance(found.linear.x.shape[0], int)


def _products(value: Value, sums: Sequence[Sum]) -> Iterator[Value]:
    """Yields the linears for few tokens that are sides of an addition. The linears of `sums` come
    first. The other linears are summed over ranks, have another form, or have a norm that the op
    does not support."""
    yield from (found.linear.product for found in sums)
    for near in (*_unlike(value), *norms_between(value)):
        yield from near.products
    if (shared := _summed_over_ranks(value)) is not None:
        yield shared


def _unlike(value: Value) -> list[Missed]:
    """Returns the misses for the sides of an addition of two tensors that are products, but have a
    form that no op supports."""
    sides = [side for side, other in value.either_way if len(other.shape) > 1]
    found = (match_unlike(weighed(side, strip=True)[0]) for side in sides)
    return [one for one in found if one is not None]


def _summed_over_ranks(value: Value) -> Value | None:
    """Returns the linear for few tokens whose sum over ranks is one side of an addition. Returns
    None if there is no such linear."""
    for side in value.operands:
        part = part_of_a_sum(side) if side.shape == value.shape else None
        linear = None if part is None else match_few_tokens(part)
        if linear is not None:
            return linear.product
    return None


def _match_scaled(product: View, residual: View, flow: Dataflow) -> Sum | None:
    inner, scale, values = weighed(product, strip=True)
    linear = match_few_tokens(inner, by_head=True, target=flow.target)
    if linear is None:
        return None
    return Sum(linear, residual, scale, None, (*values, *linear.absorbed))


def _match_normed(product: View, residual: View) -> Sum | None:
    normed, scale, values = weighed(product)
    norm = rms_norm_of(normed)
    linear = None if norm is None else match_few_tokens(norm.x)
    if norm is None or linear is None:
        return None
    return Sum(linear, residual, scale, norm, (*values, *norm.absorbed, *linear.absorbed))


def _is_read_here_alone(found: Sum, end: Value, flow: Dataflow) -> bool:
    if found.norm is None:
        return all(flow.only_user(one) is not None for one in found.absorbed)
    return set(unread(found.absorbed, [end], flow)) == set(found.absorbed)


register(LinearResidual())
