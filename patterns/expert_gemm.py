"""A GEMM that takes each row's weight from its expert: grouped by sorted rows, or one by one.

grouped_mm(x [M, K], weight [E, K, N], ends [E])
bmm(weight[experts] [M, N, K], x [M, K, 1])          or the other way round
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.codegen.targets import detect_target
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.norm import strip_casts
from tilewright.patterns.routing import gathered, strip_integer_casts

# First column, their number, and the distance from one to the next.
Columns = tuple[Any, Any, int]

_GROUPED = "aten._grouped_mm"
_BATCHED = "aten.bmm"


@dataclass(frozen=True)
class ExpertGemm:
    """`x @ weight[expert]^T + bias[expert]`.

    x [M, K]; weight [E, N, K], stored or computed; bias [E, N] with bias_index, the experts it was
    taken by.
    ends [E]: where each expert's sorted rows end; None where `experts` [M] has each row's expert.
    end: the value with the result. column_axis: its axis of N.
    """

    x: View
    weight: View
    bias: View | None
    bias_index: View | None
    ends: View | None
    experts: View | None
    end: Value
    column_axis: int
    absorbed: tuple[Value, ...]

    def columns_of(self, part: View) -> Columns | None:
        """The columns that a view [M, n] of the result takes of every row; None for another."""
        if part.value is not self.end or len(part.effect.dims) != 2:
            return None
        rows, columns = part.effect.dims
        whole = effects.reshape(
            effects.identity(self.end.shape), (part.shape[0], self.end.shape[self.column_axis])
        )
        starts = [s for a, s in enumerate(part.effect.start) if a != self.column_axis]
        if rows != whole.dims[0] or any(s != 0 for s in starts) or len(columns) != 1:
            return None
        (atom,) = columns
        if atom.axis != self.column_axis:
            return None
        return part.effect.start[self.column_axis], atom.length, atom.step


def is_expert_gemm(value: Value) -> bool:
    """Whether a value looks like one: cheap, for anchors."""
    return value.op == _GROUPED or (value.op == _BATCHED and _by_expert(value) is not None)


def rows_of(value: Value) -> View | None:
    """The rows that a GEMM with expert weights multiplies; None for another value."""
    if value.op == _GROUPED:
        rows: View = value.args[0]
        return rows
    sides = _by_expert(value) if value.op == _BATCHED else None
    return None if sides is None else value.operands[sides[1]]


def match_expert_gemm(value: Value, flow: Dataflow) -> ExpertGemm | None:
    """The GEMM that `value` computes, with the bias that follows it if one does."""
    found = match_grouped(value) or _batched(value)
    if found is None:
        return None
    for user in flow.users.get(value, ()):
        biased = _with_bias(found, user, value) if user.op == "aten.add" else None
        if biased is not None:
            return biased
    return found


def match_grouped(value: Value) -> ExpertGemm | None:
    """A GEMM of rows sorted by group, without what follows it; None for another value."""
    if value.op != _GROUPED:
        return None
    weight = value.args[1]
    ends = value.kwargs.get("offs")
    ends = value.args[2] if ends is None and len(value.args) > 2 else ends
    if len(weight.shape) != 3 or not isinstance(ends, View):
        return None
    by_row = View(weight.value, effects.permute(weight.effect, (0, 2, 1)))
    return ExpertGemm(value.args[0], by_row, None, None, ends, None, value, 1, (value,))


def _batched(value: Value) -> ExpertGemm | None:
    found = _by_expert(value) if value.op == _BATCHED else None
    if found is None:
        return None
    weight_side, x_side = found
    taken = gathered(value.args[weight_side].value.whole)
    assert taken is not None
    stored, experts = taken
    # The gathered weight may be transposed on its way: the same on the stored one.
    dims = value.args[weight_side].effect.dims
    order = [0, *(dim[0].axis for dim in dims[1:])]
    weight = View(stored.value, effects.permute(stored.effect, order))
    x = value.args[x_side]
    if weight_side == 1:
        weight = View(weight.value, effects.permute(weight.effect, (0, 2, 1)))
    x = View(x.value, effects.squeeze(x.effect, (1 if x_side == 0 else 2,)))
    axis = 2 if weight_side == 1 else 1
    absorbed = (value, value.args[weight_side].value)
    experts = strip_integer_casts(experts)
    return ExpertGemm(x, weight, None, None, None, experts, value, axis, absorbed)


def _by_expert(value: Value) -> tuple[int, int] | None:
    """(operand that is weight[experts], operand that is one row each) of a bmm."""
    for weight_side, x_side in ((0, 1), (1, 0)):
        weight, x = value.args[weight_side], value.args[x_side]
        taken = gathered(weight.value.whole)
        one_row = x.shape[1 if x_side == 0 else 2] == 1
        if taken is None or not one_row or len(taken[0].shape) != 3:
            continue
        dims = weight.effect.dims
        whole = all(len(d) == 1 and d[0].step == 1 for d in dims[1:])
        whole = whole and (dims[0] == () or dims[0][0].axis == 0)
        if whole and sorted(weight.shape[1:]) == sorted(weight.value.shape[1:]):
            return weight_side, x_side
    return None


def check_device(x: View) -> None:
    """Without kernels for the GPU at hand an op would run its reference: slower than the graph."""
    device = x.value.device
    if device.type == "cuda" and detect_target(device.index) is None:
        reject("UNSUPPORTED", Stage.CAPABILITY, "there are no kernels for this GPU's generation", x)


def _with_bias(gemm: ExpertGemm, add: Value, value: Value) -> ExpertGemm | None:
    """gemm + bias[experts], either way round."""
    if len(add.operands) != 2 or add.kwargs.get("alpha", 1) != 1:
        return None
    others = [v for v in add.operands if v.value is not value]
    own = [v for v in add.operands if v.value is value]
    if len(others) != 1 or gemm.columns_of(own[0]) != (0, value.shape[gemm.column_axis], 1):
        return None
    other, casts = strip_casts(others[0])
    taken = gathered(other)
    if taken is None or len(taken[0].shape) != 2 or len(add.shape) != 2:
        return None
    absorbed = (*gemm.absorbed, add, other.value, *casts)
    return ExpertGemm(
        gemm.x, gemm.weight, taken[0], strip_integer_casts(taken[1]), gemm.ends, gemm.experts,
        add, 1, absorbed,
    )  # fmt: skip
