"""Finds values that depend on a product with a weight that the model stores."""

from __future__ import annotations

import torch

from tilewright.compiler import _compat
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View, upstream
from tilewright.patterns.quantised.words import holds_codes
from tilewright.patterns.recognise.gemm import (
    is_weight,
    match_gemm,
    multiplies_stored,
    sums_enough,
    unread_product,
)

# Products whose second operand is always a weight.
_OF_WEIGHTS = frozenset(("aten.linear", "aten._scaled_mm", "aten._scaled_mm_v2"))
# Products whose second operand is a weight if the model stores this operand.
_PRODUCTS = frozenset(
    f"aten.{name}" for name in ("einsum", "bmm", "mm", "matmul", "baddbmm", "addmm", "_grouped_mm")
)


def projects(value: Value) -> bool:
    """Whether a value is a product with a tensor that the model stores. An unknown operation may be
    such a product, too."""
    if value.op in _OF_WEIGHTS:
        return True
    if value.op in _PRODUCTS:
        return multiplies_stored(value) or _multiplies_codes(value)
    foreign = not value.op.startswith(("aten.", "store", "cast", "bitcast"))
    given = foreign and any(is_weight(v) or _holds_own_codes(v) for v in value.operands)
    return (given and not _is_own(value)) or unread_product(value) is not None


# The largest number of values that a search visits from a weight back to the stored codes from
# which the weight is computed.
_REACH = 64


def _is_own(value: Value) -> bool:
    """Whether a value is a weight: it is computed only from tensors that the model stores."""
    before = list(upstream(value, _REACH))
    leaves = [v for v in before if not v.operands]
    return len(before) < _REACH and all(
        leaf.op == "constant" or (leaf.op == "input" and _compat.is_models_own(leaf.node))
        for leaf in leaves
    )


def _multiplies_codes(value: Value) -> bool:
    """Whether a value is a product with a weight that is computed from codes."""
    gemm = match_gemm(value)
    return gemm is not None and sums_enough(gemm) and holds_codes(gemm.weight.value)


# A stored integer tensor with fewer elements is more likely an index, such as slots, groups or an
# order of columns.
_LEAST_CODES = 256
_OF_CODES = frozenset((torch.int8, torch.uint8, torch.int16, torch.int32))


def _holds_own_codes(view: View) -> bool:
    """Whether a view shows codes that the model stores, that is, a quantised weight packed in any
    way."""
    value = view.value
    if value.op != "input" or not _compat.is_models_own(value.node):
        return False
    many = effects.product(value.shape)
    coded = value.dtype in _OF_CODES or (
        value.dtype.is_floating_point and value.dtype.itemsize == 1
    )
    return coded and isinstance(many, int) and many >= _LEAST_CODES
