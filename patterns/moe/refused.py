"""Mixtures of experts that are never fused. They are only reported, and the report says what to
change.

- EXPERT_LOOP: a Python loop over the experts. The number of tokens of each expert determines shapes
  in the loop, so Dynamo ends the graph before the loop. The graph then only prepares the routing,
  and returns the prepared tensors. With `capture_dynamic_output_shape_ops`, the graph may have the
  whole loop.
- EXPERT_KERNEL: an operator of a library that takes stacked quantised weights. Hugging Face's
  `FP8Experts` (`integrations/finegrained_fp8.py`) calls the `finegrained-fp8` kernel of the hub, or
  DeepGEMM: matmul_grouped(rows, weight [E, N, K] float8_e4m3fn, scales [E, N/128, K/128], offsets).
  The graph does not show how such a kernel quantises the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_casts
from tilewright.patterns.dataflow import (
    Dataflow,
    Value,
    View,
    calls_of,
    is_in_package,
    upstream,
)
from tilewright.patterns.language import Missed, Stage, miss_at
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.gemm import match_gemm
from tilewright.patterns.recognise.grouped_gemm import is_expert_gemm, routes_of
from tilewright.patterns.recognise.linear import match_columns


def refused_experts(flow: Dataflow) -> Iterator[Missed]:
    """Yields at most one miss for all loops of a graph, and at most one miss for all kernels."""
    yield from filter(None, (_loops(flow), _kernels(flow)))


# --- a loop in Python -----------------------------------------------------------------------------

# The operations by which a loop finds the tokens of each expert.
_PREPARED = {
    "aten.one_hot", "aten.eq", "aten.sort", "aten.argsort", "aten.histc", "aten.bincount",
    "aten.nonzero", "aten.unique", "aten.where", "opaque:unique", "opaque:bincount",
}  # fmt: skip
# The largest number of values that a search visits back to the choice of a router, or forward to
# the output of the graph.
_NEAR = 12


def _missed(
    values: Sequence[Value], code: str, message: str, hint: str, products: Sequence[Value] = ()
) -> Missed:
    """Returns one miss for all `values`, because they have the same cause. products: the products
    of the experts, if the graph has them."""
    miss = miss_at(code, Stage.ANCHORED, message, *values, hint=hint)
    return Missed(miss, values=tuple(values), products=tuple(products))


def _loops(flow: Dataflow) -> Missed | None:
    """Returns the miss for a graph that was cut before a loop over experts, or that has such a
    loop; else None."""
    prepared = [v for v in flow.values if v.op in _PREPARED and _of_experts(v) and _by_ids(v)]
    multiplied = _choices_of_gemms(flow) if prepared else frozenset()
    prepared = [v for v in prepared if multiplied.isdisjoint(choices_of(v, _NEAR))]
    found = [v for v in prepared if _finds_tokens(v) or _leaves(v, flow)]
    alone = [v for v in flow.values if _is_lone_expert(v) and _of_experts(v)]
    found += alone if len(alone) == 1 else []
    if not found:
        return None
    whole = all(map(_finds_tokens, found))
    return _missed(
        found,
        "EXPERT_LOOP",
        "a loop over experts was captured; the number of rows of its products depends on data"
        if whole
        else (
            "the experts run in a Python loop over the tokens of each expert; their products "
            "are in no graph, or each product is in a separate graph"
        ),
        "experts_implementation='grouped_mm' (model.set_experts_implementation)"
        if any(is_in_package(v.node, "transformers") for v in found)
        else "keep the experts' weights in one tensor [E, N, K], sort the routes by expert and "
        "multiply with torch._grouped_mm (or gather weights[expert_ids] for torch.bmm)",
        [v for v in flow.values if _is_of_found_rows(v)] if whole else (),
    )


def _is_of_found_rows(value: Value) -> bool:
    """Whether a value is a product whose number of rows depends on data."""
    gemm = match_gemm(value)
    return gemm is not None and any(map(effects.only_data_tell, gemm.shape))


def choices_of(value: Value, reach: int) -> Iterator[Value]:
    """Yields the choices of experts from which a value is computed. Searches up to `reach` values
    back."""
    return (item for item in upstream(value, reach) if item.op == "aten.topk")


def _choices_of_gemms(flow: Dataflow) -> frozenset[Value]:
    """Returns the choices that select experts for products of the graph itself. Other values that
    are computed from such choices, such as counts for statistics, do not prepare a loop."""
    routes = (routes_of(v) for v in flow.values if is_expert_gemm(v))
    return frozenset(c for view in routes if view for c in choices_of(view.value, 4 * _NEAR))


def _finds_tokens(value: Value) -> bool:
    """Whether the size of a value depends on data. If it does, Dynamo captured the operation and
    did not cut the graph there."""
    return value.op == "aten.nonzero" or (value.op == "aten.where" and len(value.args) == 1)


def _is_lone_expert(value: Value) -> bool:
    """Whether a value is an MLP whose weights are one matrix of a stacked tensor. The graph then
    computes one expert."""
    if value.op != "aten.linear" or not _is_one_of_many(value.args[1]):
        return False
    activation = match_activation(strip_casts(value.args[0])[0])
    gate = None if activation is None else match_columns(activation.gate)
    if gate is None or not _is_one_of_many(gate.linear.gemm.weight):
        return False
    return gate.linear.gemm.x.value.op == "input"


def _is_one_of_many(weight: View) -> bool:
    stacked = weight.value.op == "constant" and len(weight.value.shape) == 3
    return stacked and len(weight.shape) == 2


# The number of innermost calls in the user's code whose names are searched.
_CALLS = 2


def _of_experts(value: Value) -> bool:
    """Whether a name in the user's code, the name of the file, or the name of the module contains
    "expert" or "moe". This guess is good enough for a message."""
    named = calls_of(value.node.meta.get("stack_trace") or "")[-_CALLS:]
    words = " ".join((*named, value.scope)).lower()
    return "expert" in words or "moe" in words


def _by_ids(value: Value) -> bool:
    """Whether a value is computed from expert numbers: from the choice of a router, or from
    integers that are inputs of the graph."""
    return any(
        item.op == "aten.topk" or (item.op == "input" and not item.dtype.is_floating_point)
        for item in upstream(value, _NEAR)
        if item is not value
    )


def _leaves(value: Value, flow: Dataflow) -> bool:
    """Whether the graph returns a value, or masks and indices that are computed from it."""
    made = flow.downstream(value, _NEAR, lambda v: not v.dtype.is_floating_point)
    return not value.dtype.is_floating_point and any(v in flow.output_values for v in made)


# --- a library's kernel ---------------------------------------------------------------------------

_CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8)


def _kernels(flow: Dataflow) -> Missed | None:
    """Returns the miss for unknown operators that take stored codes [E, N, K] and scales [E, ...].
    Returns None if there are no such operators."""
    found = tuple(v for v in flow.values if _is_foreign(v.op) and _takes_experts(v))
    if not found:
        return None
    names = ", ".join(dict.fromkeys(v.op.removeprefix("opaque:") for v in found))
    return _missed(
        found,
        "EXPERT_KERNEL",
        f"{names} multiplies by stacked weights that are quantised",
        "in transformers load the model with FineGrainedFP8Config(dequantize=True), or write "
        "the dequantisation in PyTorch before torch._grouped_mm: this form is fused",
    )


def _is_foreign(op: str) -> bool:
    return op.startswith("opaque:") or ("::" in op and not op.startswith("tilewright::"))


def _takes_experts(value: Value) -> bool:
    stored = [v for v in value.operands if v.value.op in ("input", "constant")]
    codes = [v for v in stored if len(v.shape) == 3 and v.value.dtype in _CODES]
    scales = [v for v in stored if v.value.dtype.is_floating_point and v not in codes]
    return any(s.shape[:1] == c.shape[:1] and len(s.shape) == 3 for c in codes for s in scales)
