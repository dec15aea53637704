"""The MLP of the experts of a mixture: its GEMMs and the activation between them, in the form that
`fused_moe` expects. The weights are dense or quantised. Dimension letters: E experts, N outputs, K
inputs, T tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.ops.checks import HALVES
from tilewright.patterns.arithmetic.casts import is_float_cast
from tilewright.patterns.arithmetic.steps import is_filled
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.quantised.expert_arguments import DequantizedExperts, expert_arguments
from tilewright.patterns.quantised.experts import match_dequantized_experts
from tilewright.patterns.recognise.activation import Activation
from tilewright.patterns.recognise.dtypes import check_dtypes, rows_fact
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm
from tilewright.patterns.recognise.linear import Columns
from tilewright.patterns.recognise.routing import rows_added_to


@dataclass(frozen=True)
class Layer:
    """The MLP `down(activation(gate(x), up(x)))`. `up` is None if the MLP is not gated. `gate` and
    `up` may be parts of one GEMM."""

    gate: ExpertGemm
    up: ExpertGemm | None
    down: ExpertGemm
    activation: Activation

    @property
    def firsts(self) -> tuple[ExpertGemm, ...]:
        return (self.gate,) if self.up is None else (self.gate, self.up)

    @property
    def gemms(self) -> tuple[ExpertGemm, ...]:
        return (*self.firsts, self.down)

    def check_rows(self) -> None:
        """Raises Reject (ACTIVATION) unless gate and up multiply the same rows."""
        if any(gemm.x != self.gate.x for gemm in self.firsts):
            refuse_rows(self.down.x)

    def check_kernels(self, x: View, anchor: Value, arguments: Mapping[str, Any]) -> None:
        """Raises Reject (DTYPE) for dtypes that have no kernel. arguments: the op's arguments for
        the weights.

        For a GEMM, the graph may convert rows and weights to float32, if bfloat16 can represent all
        numbers of the weights' format. The kernels compute their sums in float32 as well.
        """
        dtype, dtypes = x.value.dtype, {x.value.dtype, self.down.x.value.dtype}
        exact = dtype == torch.bfloat16 and _has_powers_of_two(arguments)
        for weight in (gemm.weight.value.dtype for gemm in self.gemms):
            dtypes.add(dtype if exact and weight == torch.float32 else weight)
        check_dtypes(dtypes, "activation and expert weights", anchor, HALVES)

    def arguments(self) -> dict[str, Any]:
        """Returns the op's arguments for the weights, the biases and the activation. They do not
        include x and the routes.

        Raises Reject in the same cases as `_weight_arguments`.
        """
        named = {"gate": self.gate, "up": self.up, "down": self.down}
        views = {name: gemm.weight for name, gemm in named.items() if gemm is not None}
        biases = {f"{name}_bias": gemm and gemm.bias for name, gemm in named.items()}
        activation = self.activation
        numbers = {"alpha": activation.alpha, "limit": activation.limit}
        weights = {"up_weight": None, **_weight_arguments(views)}
        return {**weights, **biases, "activation": activation.name, **numbers}

    def facts(self, x: View, num_slots: Any, weights: str, **own: Any) -> dict[str, Any]:
        """Returns the facts that reports show about the layer. own: further facts, which the
        calling pattern adds."""
        experts, hidden, inner = self.down.weight.shape
        return {
            "experts": experts,
            "slots": num_slots,
            "inner": inner,
            "activation": self.activation.name,
            **own,
            "x": rows_fact(x.value.dtype, x.shape[0], hidden),
            "weights": weights,
        }


def _has_powers_of_two(arguments: Mapping[str, Any]) -> bool:
    """Whether each weight is an E2M1 number that is multiplied only by a power of two."""
    form = WEIGHT_FORMATS.get(arguments.get("weight_format", "dense"))
    factors = any(f"{name}_expert_scale" in arguments for name in ("gate", "up", "down"))
    return form is not None and form.expert_scales == ("u8",) and not factors


def refuse_rows(culprit: View) -> NoReturn:
    """Raises Reject with the code ACTIVATION."""
    reject("ACTIVATION", Stage.ACTIVATION, "gate and up read different rows", culprit)


def refuse_activation(found: View) -> NoReturn:
    """Raises Reject with the code EXPERT_ACTIVATION."""
    message = f"{found.value} between the experts' GEMMs is not a known activation"
    reject("EXPERT_ACTIVATION", Stage.ACTIVATION, message, found)


def refuse_combine(reader: Value | None, result: Value) -> NoReturn:
    """Raises Reject with the code EXPERT_COMBINE, because of the operations that read the experts'
    results."""
    refuse_sum(
        f"the experts' results are read by {reader or 'several operations'}; expected weights, "
        "the inverse order and a sum over the experts of each token",
        reader or result,
        hint="" if reader is None or not _adds_in_rows(reader) else _TO_ZEROS,
    )


def refuse_sum(message: str, culprit: Value, hint: str = "") -> NoReturn:
    """Raises Reject with the code EXPERT_COMBINE."""
    reject("EXPERT_COMBINE", Stage.GUARDS, message, culprit, hint=hint)


_TO_ZEROS = (
    "add the experts' results to zeros, torch.zeros_like(x).index_add(0, tokens, y), and add "
    "anything else to that sum"
)


def _adds_in_rows(value: Value) -> bool:
    written = value.store is not None and value.store.accumulate
    return written or value.op in ("aten.index_add", "aten.scatter_add")


def first_gemm(
    part: View, name: str, gemms_of: Callable[[Value], Iterable[ExpertGemm]]
) -> ExpertGemm:
    """Returns the GEMM that computes `part`, the gate half or the up half, with the weight and bias
    of this half. Raises Reject (EXPERT_ACTIVATION) if `part` is not a set of columns of such a
    GEMM.

    gemms_of: a function that returns the GEMMs whose result a value may be, each with the bias that
    is added after it.
    """
    for candidate in (part.value, *(v.value for v in part.value.operands)):
        for gemm in gemms_of(candidate):
            columns = gemm.columns_of(part) if gemm.end is part.value else None
            if columns is not None:
                weight, bias = _rows(gemm.weight, columns), gemm.bias and _rows(gemm.bias, columns)
                return replace(gemm, weight=weight, bias=bias)
    message = f"the {name} half is {part.value}, not a set of columns of a GEMM with expert weights"
    reject("EXPERT_ACTIVATION", Stage.ACTIVATION, message, part)


def _rows(view: View, columns: Columns) -> View:
    """Returns the rows (dimension 1) of a weight or bias [E, N, ...] that compute certain
    columns."""
    return view.narrow(1, *columns)


def sum_of_experts(
    flow: Dataflow, end: Value, dtype: torch.dtype, absorbed: Collection[Value]
) -> tuple[tuple[Value, ...], View | None]:
    """Returns (ends, added). `ends` are the sum of the experts, `end`, and the cast of this sum to
    the tokens' `dtype`, if there is one. `added` is the tensor that the sum is added to, as in
    :class:`Result`.

    absorbed: the values that the op replaces. Raises Reject (EXPERT_COMBINE) if the op's result
    cannot replace the sum.
    """
    ends = _cast_back(flow, end, dtype)
    if ends[-1].store is not None:
        message = (
            "the experts are summed in place, in memory that the graph may also read through "
            "another tensor"
        )
        refuse_sum(message, ends[-1], hint="use index_add instead of index_add_")
    added = rows_added_to(end)
    return ends, None if added is None else _added_to(added[0], ends, absorbed)


def _cast_back(flow: Dataflow, end: Value, dtype: torch.dtype) -> tuple[Value, ...]:
    """Returns the sum of the experts. If a cast to the tokens' dtype is the only reader of the sum,
    returns the cast too.

    Raises Reject (EXPERT_COMBINE) if the sum keeps another dtype.
    """
    if end.dtype == dtype:
        return (end,)
    user = flow.only_user(end)
    if user is None or not is_float_cast(user) or user.dtype != dtype:
        message = f"the sum stays {end.dtype}, but the tokens are {dtype}"
        hint = "cast the sum back to the dtype of the tokens, and use only the result of the cast"
        refuse_sum(message, end, hint=hint)
    return end, user


def _added_to(base: View, ends: Sequence[Value], absorbed: Collection[Value]) -> View | None:
    """Returns the tensor that the sum of the experts is added to, or None if it is zeros.

    ends: the sum, and its cast if there is one. Raises Reject (EXPERT_COMBINE) if this tensor has
    another shape or dtype than the tokens, or is computed from the experts.
    """
    if is_filled(base, 0):
        return None
    if base.value in absorbed:
        refuse_combine(ends[0], base.value)
    if len(ends) > 1 or base.shape != ends[0].shape or base.value.dtype != ends[0].dtype:
        message = (
            f"the experts' results are added to {base.value}, which has another shape or dtype"
        )
        refuse_sum(message, ends[0], hint=_TO_ZEROS)
    return base


# --- weights --------------------------------------------------------------------------------------


def _weight_arguments(views: Mapping[str, View]) -> dict[str, Any]:
    """Returns the op's arguments for the weights, which are views [E, N, K] named gate, up and
    down. All weights must be dense and stored in this form, or all must have the same format.

    Raises Reject (EXPERT_WEIGHT) if a weight is computed, but not from codes. Raises Reject
    (WEIGHT_FORMAT, SCALE_BLOCK) if the op does not support the codes, or their combination.
    """
    found = {name: _codes_of(view) for name, view in views.items()}
    quantised = {name: weight for name, weight in found.items() if weight is not None}
    if not quantised:
        return {f"{name}_weight": view for name, view in views.items()}
    if len(quantised) != len(found):
        dense = ", ".join(name for name in found if name not in quantised)
        message = f"the experts' weights {', '.join(quantised)} are quantised, but {dense} are not"
        reject("WEIGHT_FORMAT", Stage.GUARDS, message, *(views[name] for name in quantised))
    return expert_arguments(
        {(f"{n}_weight", f"{n}_scale", f"{n}_expert_scale"): w for n, w in quantised.items()}
    )


def _codes_of(weight: View) -> DequantizedExperts | None:
    """Returns the codes that a weight is dequantised from. Returns None if the weight is stored.
    Raises Reject if the graph computes the weight in another way."""
    if weight.value.op in ("constant", "input"):
        return None
    found = match_dequantized_experts(weight)
    if found is None:
        message = f"the expert weight is {weight.value}, which the graph computes"
        reject("EXPERT_WEIGHT", Stage.GUARDS, message, weight)
    return found
