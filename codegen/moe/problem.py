"""The static part of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.grouped.problem import (
    TMA_BYTES,
    GroupedProblem,
    WeightOperands,
    weight_obstacle,
)

# The largest size of the scratch memory for dequantised weights, in bytes. The dequantised weights
# of a layer take as much memory as dense weights.
DECODED_BYTES = 4 * 2**30


@dataclass(frozen=True)
class MoeProblem:
    """The static part of a `fused_moe` call. All weights have one format, and all biases have one
    dtype.

    Attributes:
        num_experts: The number of experts, E.
        num_slots: The number of experts that each token chooses. A pair of a token and an expert
            that it chose is a route.
        hidden, inner: The width of x, and the width of the hidden rows, which the first GEMM
            computes.
        dtype: The dtype of x, of the hidden rows and of the result.
        gate, up: The weights [E, inner, hidden]. up is None if the activation is not gated.
        down: The weight [E, hidden, inner].
        interleaved: Whether rows of gate and rows of up alternate in one tensor.
        distance: If gate and up do not alternate, the number of stored elements from gate to up;
            None if this number is known only at the launch, because gate and up are two tensors.
        up_first: Whether up is before gate in memory.
        activation, alpha, limit: The activation and its parameters.
        coded_rows: Whether x and the hidden rows are quantised to e4m3 before they are multiplied.
    """

    num_experts: int
    num_slots: int
    hidden: int
    inner: int
    dtype: str
    gate: WeightOperands
    up: WeightOperands | None
    down: WeightOperands
    interleaved: bool
    distance: int | None
    up_first: bool
    activation: str
    alpha: float
    limit: float
    coded_rows: bool = False

    @property
    def format(self) -> str:
        """The format of the weights."""
        return self.gate.format

    @property
    def gate_up(self) -> WeightOperands:
        """The weight of gate. If the rows of gate and up alternate, the row stride of the result
        leads from a row of gate to the next row of up, because the first GEMM steps over the rows
        of both."""
        expert, row, column = self.gate.data.strides
        if not self.interleaved or self.gate.n_major:
            return self.gate
        data = replace(self.gate.data, strides=(expert, row // 2, column))
        return replace(self.gate, data=data)

    @property
    def experts(self) -> int:
        return next_power_of_2(self.num_experts)


def up_problem(problem: MoeProblem, weight: WeightOperands) -> GroupedProblem:
    """Returns the problem of the first GEMM with one weight, which is gate or up."""
    return replace(down_problem(problem), rows=problem.inner, inner=problem.hidden, weight=weight)


def down_problem(problem: MoeProblem) -> GroupedProblem:
    """Returns the problem of the second GEMM. Its rows are the sorted routes. The GEMM stores its
    result in the order of the unsorted routes."""
    return GroupedProblem(
        num_groups=problem.num_experts,
        num_experts=problem.num_experts,
        rows=problem.hidden,
        inner=problem.inner,
        x=problem.dtype,
        weight=problem.down,
        ordered=True,
    )


def gemms(problem: MoeProblem) -> dict[str, GroupedProblem]:
    """Returns the problems of the GEMMs, by the name of the weight: "gate", "up" and "down"."""
    made = {"gate": up_problem(problem, problem.gate)}
    if problem.up:
        made["up"] = up_problem(problem, problem.up)
    return made | {"down": down_problem(problem)}


# --- weights dequantised before the GEMMs ---------------------------------------------------------


def decodable(problem: MoeProblem) -> bool:
    """Whether the weights can be dequantised before the GEMMs. This requires that they are
    quantised, that x's dtype has their range, that the scratch memory is large enough, and that TMA
    can load the dequantised rows."""
    elements = (3 if problem.up else 2) * decoded_elements(problem)
    size = ELEMENT_BYTES[problem.dtype]
    fits = size * elements <= DECODED_BYTES and problem.hidden * size % TMA_BYTES == 0
    fits = fits and problem.gate.fits(problem.dtype)
    return problem.format != "dense" and not problem.coded_rows and fits


def decoded_elements(problem: MoeProblem) -> int:
    """Returns the number of elements of one dequantised weight: gate, up or down, each of which is
    contiguous."""
    return problem.num_experts * problem.hidden * problem.inner


def decoded_problem(problem: MoeProblem) -> MoeProblem:
    """Returns the problem after its weights have been dequantised."""
    weights: dict[str, Any] = {n: gemm.dequantized().weight for n, gemm in gemms(problem).items()}
    distance = decoded_elements(problem) if problem.up else 0
    return replace(problem, **weights, interleaved=False, distance=distance, up_first=False)


# --- addresses ------------------------------------------------------------------------------------


def gemm_obstacle(problem: MoeProblem) -> str | None:
    """Returns why TMA cannot load the operands; None if it can. Only metadata is checked, not
    addresses."""
    obstacle = weight_obstacle("gate_weight", problem.gate_up)
    obstacle = obstacle or weight_obstacle("down_weight", problem.down)
    if obstacle is not None:
        return obstacle
    distance = problem.distance or 0
    if distance * ELEMENT_BYTES[problem.gate.data.dtype] % TMA_BYTES:
        return (
            f"up_weight: {distance} elements from gate_weight are not a multiple of "
            f"{TMA_BYTES} bytes"
        )
    if not problem.coded_rows and problem.inner * ELEMENT_BYTES[problem.dtype] % TMA_BYTES:
        return f"{problem.inner} inner columns are not a multiple of {TMA_BYTES} bytes"
    return None


def address_obstacle(problem: MoeProblem, *, decoded: bool) -> str | None:
    """Returns why the GEMMs cannot load a weight by TMA or as 32-bit words; None if they can.

    Callers check this at each call. Calls with equal metadata may differ in their addresses, and
    therefore in the distance from gate to up. decoded: whether weights are dequantised first. The
    kernel that dequantises weights can load them from any address, and the GEMMs then read memory
    that the call itself allocated.
    """
    obstacle = gemm_obstacle(problem)
    if obstacle is not None or decoded:
        return obstacle
    read: dict[str, WeightOperands | None] = {"down_weight": problem.down}
    # If gate and up are in one tensor, only the address of the first one matters.
    if problem.distance is None or not problem.up_first:
        read["gate_weight"] = problem.gate
    if problem.distance is None or problem.up_first:
        read["up_weight"] = problem.up
    for name, weight in read.items():
        if weight is not None and not weight.data.aligned:
            return f"{name}: its address is not a multiple of {TMA_BYTES} bytes"
    return None
