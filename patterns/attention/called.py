"""Calls of `cache_attention` that the model makes itself, for example in an engine's attention
function.

Such a call becomes a match, so that reports show the kernels of the call and their times. The
rewritten graph has the same call.
"""

from __future__ import annotations

from typing import Any

from tilewright.ops.attention.cache_attention import OP
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.language import Match, Result
from tilewright.patterns.recognise.dtypes import dtype_name


def is_call(value: Value) -> bool:
    """Whether a value is a call of the op that the model makes itself."""
    return value.op == OP.qualified_name and "tilewright" not in value.node.meta


def match_call(value: Value) -> Match:
    """Returns the match of a call: the op with the arguments that the model gives."""
    given = {name: item for name, item in value.named(*OP.parameters).items() if item is not None}
    return Match(
        anchor=value,
        arguments=given,
        results=(Result(value, effects.identity(value.shape)),),
        absorbed=(value,),
        facts=_facts(value, given),
        scope=value.scope,
        needs_kernel=True,
    )


def _facts(value: Value, given: dict[str, Any]) -> dict[str, Any]:
    q, k = given["q"], given["k"]
    assert isinstance(q, View)
    assert isinstance(k, View)
    tokens, heads, width = q.shape
    return {
        "heads": f"{heads}/{k.shape[2]}x{width}",
        "tokens": effects.size_fact(tokens),
        **({"page": effects.size_fact(k.shape[1])} if "block_table" in given else {}),
        "runs": "ragged" if "row_offsets" in given else "equal",
        "mask": given.get("mask", "causal"),
        **({"sinks": "yes"} if "sinks" in given else {}),
        "q": dtype_name(value.dtype),
        "called": "by the model",
    }
