"""Experts that a library's own kernel computes: an operator that takes stacked weights of codes.

Hugging Face's `FP8Experts` (`integrations/finegrained_fp8.py`) call the hub's `finegrained-fp8` or
DeepGEMM: matmul_grouped(rows, weight [E, N, K] float8_e4m3fn, scales [E, N/128, K/128], offsets).
The graph has such a call, and not what it computes: how rows are quantised is the kernel's secret.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from tilewright.patterns.dataflow import Dataflow, Value
from tilewright.patterns.language import Miss, Reject, Stage, register_code

register_code("EXPERT_KERNEL", "the experts are computed by a library's kernel, a closed box")

_CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8)


@dataclass(frozen=True)
class ExpertKernels:
    """All such calls of a graph: they share one cause, so they get one Miss."""

    values: tuple[Value, ...]

    @property
    def node(self) -> fx.Node:
        return self.values[0].node

    def refuse(self, pattern: str) -> Reject:
        """The answer: EXPERT_KERNEL."""
        names = ", ".join(dict.fromkeys(v.op.removeprefix("opaque:") for v in self.values))
        message = f"{names} multiplies with stacked weights of codes"
        hint = (
            "in transformers load the model with FineGrainedFP8Config(dequantize=True), or write "
            "the dequantisation in PyTorch in front of torch._grouped_mm: that is fused"
        )
        nodes = tuple(v.node for v in self.values)
        return Reject(Miss(pattern, "EXPERT_KERNEL", Stage.ANCHORED, message, nodes, hint))


def find_expert_kernels(flow: Dataflow) -> ExpertKernels | None:
    """The unknown operators that take codes [E, N, K] and scales [E, ...] as they are stored."""
    found = tuple(v for v in flow.values if _is_foreign(v.op) and _takes_experts(v))
    return ExpertKernels(found) if found else None


def _is_foreign(op: str) -> bool:
    return op.startswith("opaque:") or ("::" in op and not op.startswith("tilewright::"))


def _takes_experts(value: Value) -> bool:
    stored = [v for v in value.operands if v.value.op in ("input", "constant")]
    codes = [v for v in stored if len(v.shape) == 3 and v.value.dtype in _CODES]
    scales = [v for v in stored if v.value.dtype.is_floating_point and v not in codes]
    return any(s.shape[:1] == c.shape[:1] and len(s.shape) == 3 for c in codes for s in scales)
