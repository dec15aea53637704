"""Reports calls of `flex_attention` that cannot be fused. Before patterns run, the compiler
replaces each call by ordinary operations. This file reports calls that could not be replaced, and
calls whose ordinary operations are not recognised as attention."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.patterns.dataflow import Dataflow, Value
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.recognise.attention import sketch_of

#: A key in the `meta` of a call's node. Its value is the reason why the call was not replaced by
#: ordinary operations.
UNREAD = "tilewright_flex_unread"
#: A key in the `meta` of a softmax node. It marks the softmax of a call that was replaced.
SPELLED = "tilewright_flex"
_HINT = (
    "write a score_mod that only caps the score, adds to it, or hides it by torch.where, with "
    "comparisons, sums, logical operations and look-ups of one element of a tensor; instead of a "
    "block mask, pass a mask tensor to scaled_dot_product_attention"
)


def unread_calls(flow: Dataflow) -> Iterator[Value]:
    """Yields the results of calls that the compiler did not replace by ordinary operations. If the
    compiler did replace a call, but the pattern does not recognise the attention, yields the
    softmax of this call."""
    for value in flow.values:
        if (UNREAD in value.node.meta and value.kwargs.get("output", 0) == 0) or (
            SPELLED in value.node.meta and sketch_of(value) is None
        ):
            yield value


def refuse_unread(value: Value) -> None:
    """Raises Reject (FLEX_FUNCTION) for a value from :func:`unread_calls`."""
    meta = value.node.meta
    unread = SPELLED in meta and sketch_of(value) is None
    reason = "no pattern can read what its score_mod computes" if unread else meta.get(UNREAD)
    if reason is not None:
        message = f"flex_attention: {reason}"
        reject("FLEX_FUNCTION", Stage.ACTIVATION, message, value, hint=_HINT)
