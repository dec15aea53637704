"""Builds the weight of an up-projection in the form that the op expects. The weight has two halves:
W_UK [H, N, L] for the keys, and W_UV [H, V, L] for the values.

Dimension letters are explained in `patterns/mla/keys.py`.
"""

from __future__ import annotations

from typing import Any

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Dataflow, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Reject
from tilewright.patterns.quantised import scales
from tilewright.patterns.quantised.weights import match_weight


def weight_arguments(keys: View, values: View, flow: Dataflow) -> dict[str, Any]:
    """Returns the op's arguments for W_UK [H, N, L] and W_UV [H, L, V], which are given in the form
    in which the graph multiplies them. If both are rows of one weight, dense or quantised, the
    argument is this weight. Otherwise, there are two weights."""
    values = values.permute(0, 2, 1)
    whole = _joined(keys, values)
    if whole is not None:
        coded = _codes(whole)
        if coded is not None:
            return coded
        if _lies_in_rows(whole, flow):
            return {"kv_b_weight": whole.matrix}
    return {"kv_b_weight": keys, "v_weight": values}


def _joined(keys: View, values: View) -> View | None:
    """Returns [H, N + V, L], in which the first rows of each head are W_UK and the other rows are
    W_UV. Returns None if the halves are not parts of such a tensor."""
    (_, nope, _), v_dim = keys.shape, values.shape[1]
    heads, rows, rank = keys.effect.dims
    if len(rows) != 1:
        return None
    longer = rows[0]._replace(length=nope + v_dim)
    whole = keys.with_dims(heads, (longer,), rank)
    return whole if equal_values(whole.narrow(1, nope, v_dim), values) else None


def _lies_in_rows(whole: View, flow: Dataflow) -> bool:
    """Whether [H, N + V, L] can be viewed as [H * (N + V), L] without a copy."""
    all_of_it = effects.product(whole.shape) == effects.product(whole.value.shape)
    in_order = all_of_it and whole.reshape(*whole.value.shape).is_whole
    return flow.rows_are_dense(whole) and (in_order or len(whole.matrix.effect.dims[0]) == 1)


def _codes(whole: View) -> dict[str, Any] | None:
    """Returns the arguments for 8-bit codes with a scale for each block, if the graph dequantises
    the weight from them. Returns None if the graph does not dequantise the weight from such codes,
    or if the op does not support the form of the dequantisation. In both cases, the op gets the
    dequantised tensor as its weight."""
    try:
        codes = match_weight(whole)
        if codes is None or codes.format != "fp8":
            return None
        found = scales.weight_arguments([codes])
    except (Reject, InexpressibleError):
        return None
    return {
        "kv_b_weight": codes.codes.matrix,
        "kv_b_scale": found["q_scale"],
        "scale_block": found["scale_block"],
    }
