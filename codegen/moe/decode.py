"""Weights of a mixture dequantised before its GEMMs, those of all experts, into scratch memory.

Worth it where an expert has so many rows that its weights would be dequantised again and again. The
scratch has the size of the dense weights of a layer, of every call: beyond DECODED_BYTES it is not
done.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES
from tilewright.codegen.grouped.problem import TMA_BYTES, GroupedProblem
from tilewright.codegen.moe.problem import MoeProblem, down_problem, up_problem

# At most so much scratch memory for dequantised weights.
DECODED_BYTES = 4 * 2**30


def decodable(problem: MoeProblem) -> bool:
    """Whether there is something to dequantise, in the memory that is given to it, to rows that TMA
    can step through."""
    elements = (3 if problem.up else 2) * decoded_elements(problem)
    size = ELEMENT_BYTES[problem.dtype]
    fits = size * elements <= DECODED_BYTES and problem.hidden * size % TMA_BYTES == 0
    return problem.format != "dense" and not problem.coded_rows and fits


def decoded_elements(problem: MoeProblem) -> int:
    """Elements of one dequantised weight. gate, up and down follow each other without a gap."""
    return problem.num_experts * problem.hidden * problem.inner


def decoded_problem(problem: MoeProblem) -> MoeProblem:
    """The problem once its weights are dequantised."""
    gate_up = (problem.dtype, problem.inner, problem.hidden)
    return replace(
        problem,
        gate=problem.gate.dequantized(*gate_up),
        up=problem.up and problem.up.dequantized(*gate_up),
        down=problem.down.dequantized(problem.dtype, problem.hidden, problem.inner),
        interleaved=False,
        distance=decoded_elements(problem) if problem.up else 0,
        up_first=False,
    )


def decoded_weights(problem: MoeProblem) -> dict[str, GroupedProblem]:
    """What `dequantize_experts` is launched for: gate, up and down, each in a GEMM of its own."""
    made = {"gate": up_problem(problem, problem.gate)}
    if problem.up:
        made["up"] = up_problem(problem, problem.up)
    return made | {"down": down_problem(problem)}
