"""Weights of a mixture decoded to numbers before its GEMMs, all experts', into scratch memory.

Worth it where an expert has so many rows that its weights would be decoded again and again. The
scratch has the size of the dense weights of a layer, of every call: beyond DECODED_BYTES it is not
done.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES
from tilewright.codegen.grouped.specs import (
    TMA_BYTES,
    DequantizeConfig,
    ExpertLayout,
    GroupedProblem,
    dequantize_grid,
    dequantize_spec,
)
from tilewright.codegen.moe.specs import MoeProblem, down_problem, up_problem
from tilewright.codegen.spec import KernelSpec

DECODE = DequantizeConfig()
# At most so much scratch memory for decoded weights.
DECODED_BYTES = 4 * 2**30


def decodable(problem: MoeProblem) -> bool:
    """Whether there is something to decode, in the memory that is given to it, to rows that TMA
    can step through."""
    elements = len(_storages(problem)) * decoded_elements(problem)
    size = ELEMENT_BYTES[problem.dtype]
    fits = size * elements <= DECODED_BYTES and problem.hidden * size % TMA_BYTES == 0
    return problem.format != "dense" and not problem.coded_rows and fits


def decoded_elements(problem: MoeProblem) -> int:
    """Elements of one decoded weight. gate, up and down follow each other without a gap."""
    return problem.num_experts * problem.hidden * problem.inner


def decoded_problem(problem: MoeProblem) -> MoeProblem:
    """The problem once its weights are decoded; the factors of the experts are left."""
    matrix = problem.hidden * problem.inner
    kept = {"x_ptr", "bias_ptr", "gate_bias_ptr", "up_bias_ptr", "ids_ptr", "weights_ptr"}
    kept |= {"gate_factor_ptr", "up_factor_ptr", "down_factor_ptr"}
    return replace(
        problem,
        format="dense",
        scale_block=(1, 1),
        scale_strides=((0, 0, 0),) * 3,
        gate_up=ExpertLayout(matrix, problem.hidden, False),
        down=ExpertLayout(matrix, problem.inner, False),
        interleaved=False,
        distance=decoded_elements(problem) if problem.gated else 0,
        up_first=False,
        unaligned=tuple(name for name in problem.unaligned if name in kept),
    )


def decode_specs(problem: MoeProblem, target: str) -> dict[str, KernelSpec]:
    """A kernel for each weight: decode_gate, decode_up, decode_down."""
    return {
        f"decode_{name}": dequantize_spec(storage, DECODE, target)
        for name, storage in _storages(problem).items()
    }


def decode_grids(problem: MoeProblem) -> dict[str, tuple[int, ...]]:
    """The grids of `decode_specs`."""
    return {
        f"decode_{name}": dequantize_grid(storage, DECODE)
        for name, storage in _storages(problem).items()
    }


def _storages(problem: MoeProblem) -> dict[str, GroupedProblem]:
    """Each weight as that of a grouped GEMM of its own."""
    gate = up_problem(problem)
    if problem.interleaved:
        row_stride = 2 * problem.gate_up.row_stride
        gate = replace(gate, weight=replace(gate.weight, row_stride=row_stride))
    made = {"gate": replace(gate, unaligned=_unaligned(problem, "gate", "weight_ptr"))}
    if problem.gated:
        names = _unaligned(problem, "up", "up_weight_ptr")
        made["up"] = replace(gate, scale_strides=problem.scale_strides[1], unaligned=names)
    names = _unaligned(problem, "down", "down_weight_ptr")
    return made | {"down": replace(down_problem(problem), unaligned=names)}


def _unaligned(problem: MoeProblem, name: str, weight: str) -> tuple[str, ...]:
    names = {weight: "weight_ptr", f"{name}_scale_ptr": "scale_ptr"}
    return tuple(names[given] for given in problem.unaligned if given in names)
