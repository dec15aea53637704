"""A linear that has a quantised weight and that no other pattern matches, such as the projections
of latents in MLA, or the head of a language model.

    out = linear(rms_norm(x) * norm_weight, decoded(codes), bias)     ⇒   linear_activation(x, ...)

The op reads the codes. Without the op, the graph would decode the whole weight in every call. The
op computes no activation here. It absorbs the norm in the same cases as the pattern
`linear_activation`. If the activation is float8 codes too, a library's product of codes may be
faster. Therefore `scaled_linear` is tried first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tilewright.ops.mlp.gains import MOST_CODED_TOKENS
from tilewright.ops.mlp.linear_activation import OP
from tilewright.patterns.collective.sums import unless_summed
from tilewright.patterns.dataflow import Dataflow, Value
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Match, Reject, Result, Sought, register
from tilewright.patterns.mlp.linears import (
    WEIGHT_NAMES,
    FewTokens,
    check_linears,
    linear_facts,
    match_codes,
    match_few_tokens,
)
from tilewright.patterns.quantised.coded_rows import CodedRows, first_alike
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.row_norm import match_norm_before, row_norm_arguments

# The largest number of steps from a linear to the activation or the sum that reads it.
_REACH = 8


@dataclass(frozen=True)
class CodedLinear:
    """Matches a linear that has a quantised weight and that no other pattern matches."""

    name: str = "coded_linear"
    op: str = "linear_activation"
    takes_leftovers: bool = True
    asked_last: ClassVar[bool] = True  # after the patterns whose kernels compute more operations
    optional: ClassVar[bool] = True  # without a kernel, PyTorch's product is good enough
    sought: ClassVar[Sought] = Sought(
        f"linears of at most {MOST_CODED_TOKENS} tokens whose weight is quantised",
        frozenset({"aten.linear", "aten.addmm", "aten.mm", "aten.matmul"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """Yields the last value of each linear that has a quantised weight. Leaves out a linear
        that the op cannot compute, if another pattern reports that linear."""
        inside: set[Value] = set()
        for value in reversed(flow.values):
            linear = None if value in inside else _linear(value)
            if linear is None:
                continue
            inside.update(linear.absorbed)
            if _is_known(linear) or not _is_of_another(value, flow):
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        linear = _linear(anchor)
        assert linear is not None
        check_linears([linear], (), anchor)
        given = match_codes([linear], [WEIGHT_NAMES])
        place = flow.positions[anchor.node]
        norm = unless_summed(match_norm_before(linear.x, [linear.product], place, flow, OP))
        x: Any = _shared(linear, flow).rows if norm is None else norm.x
        absorbed = linear.absorbed if norm is None else (*linear.absorbed, *norm.absorbed)
        return Match(
            anchor=anchor,
            arguments={
                "x": x,
                "bias": linear.bias,
                "activation": "",
                **given,
                **row_norm_arguments(norm),
            },
            results=(Result.of_rows(anchor, linear.made),),
            absorbed=tuple(dict.fromkeys(absorbed)),
            facts={
                **linear_facts(linear, given),
                "bias": "yes" if linear.bias is not None else "no",
                "norm": "no" if norm is None else norm.kind,
            },
            scope=linear.product.scope,
        )


def _linear(value: Value) -> FewTokens | None:
    """Returns the linear with a quantised weight whose result is `value`, if this result has the
    dtype of the activation; else None."""
    linear = match_few_tokens(value.whole)
    if linear is None or not linear.coded or value.dtype != linear.product.dtype:
        return None
    by_graph = linear.x_scale is not None and not linear.product.stands_in
    return None if by_graph else linear


def _shared(linear: FewTokens, flow: Dataflow) -> FewTokens:
    """Replaces the codes of a linear's activation by the first equal codes in the graph. All
    linears of one activation then read the same codes."""
    if linear.x_scale is None:
        return linear
    rows = first_alike(CodedRows(linear.x, linear.x_scale), flow)
    return replace(linear, x=rows.codes, x_scale=rows.scale)


def _is_known(linear: FewTokens) -> bool:
    """Whether the op supports the format of a linear's weight."""
    try:
        match_codes([linear], [WEIGHT_NAMES])
    except (Reject, InexpressibleError):
        return False
    return True


def _is_of_another(value: Value, flow: Dataflow) -> bool:
    """Whether the pattern `linear_activation` or `linear_residual` examines a linear, because an
    activation or a sum of tensors reads it."""
    read = flow.downstream(value, _REACH, lambda one: one.shape == value.shape)
    return any(one.op == "aten.add" or match_activation(one.whole) is not None for one in read)


register(CodedLinear())
