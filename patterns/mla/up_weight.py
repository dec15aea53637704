"""Builds the weight of an up-projection in the form that `mla_decode` expects. The weight has two
halves: W_UK [H, N, L] for the keys, and W_UV [H, V, L] for the values.

Dimension letters are explained in `patterns/mla/keys.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Dataflow, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Reject
from tilewright.patterns.quantised import scales
from tilewright.patterns.quantised.weights import match_weight
from tilewright.patterns.quantised.words import holds_codes

# The op's arguments for the weight's codes, scale, zero and factor.
_NAMES = ("kv_b_weight", "kv_b_scale", "kv_b_zero", "kv_b_factor")


@dataclass(frozen=True)
class UpProjection:
    """The weight of an up-projection.

    Attributes:
        arguments: The arguments of `mla_decode`.
        form: A few words for reports: "dense", the name of a format, or "decoded" with the miss
            code of the reason if the graph decodes the weight in each call.
    """

    arguments: dict[str, Any]
    form: str


def up_projection(keys: View, values: View, flow: Dataflow) -> UpProjection:
    """Returns the weight of W_UK [H, N, L] and W_UV [H, L, V], which are given in the form in which
    the graph multiplies them. If both are rows of one weight, dense or quantised, the argument is
    this weight. Otherwise, there are two weights."""
    values = values.permute(0, 2, 1)
    whole = _joined(keys, values)
    form = "dense"
    if whole is not None:
        try:
            if (coded := _codes(whole)) is not None:
                return coded
        except (Reject, InexpressibleError) as reason:
            code = reason.miss.code if isinstance(reason, Reject) else "WEIGHT_FORMAT"
            form = f"decoded ({code})"
        if _lies_in_rows(whole, flow):
            return UpProjection({"kv_b_weight": whole.matrix}, form)
    elif holds_codes(keys.value):
        form = "decoded (two weights)"
    return UpProjection({"kv_b_weight": keys, "v_weight": values}, form)


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


def _codes(whole: View) -> UpProjection | None:
    """Returns the weight as codes, if the graph decodes it from codes. Returns None for a weight
    that is not decoded.

    Raises Reject or InexpressibleError if the op does not support the form of the codes; the
    decoded tensor is then the weight.
    """
    found = match_weight(whole)
    if found is None:
        return None
    arguments = scales.weight_arguments([found], [_NAMES])
    arguments["kv_b_weight"] = found.codes.matrix
    return UpProjection(arguments, found.format + (" with zeros" if found.zero else ""))
