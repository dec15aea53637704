"""What the audits of all families share: a kernel, and what its machine code has to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target

# Warp specialisation keeps up to this many bytes of its own on the stack.
SPECIALISED_STACK_BYTES = 8
# tcgen05 wants this many rows; a shorter tile goes to the older tensor core.
MMA_ROWS = 64
SOFTMAX_REASON = "the softmax reads each block's scores and rescales the output"
SCALED_SUMS_REASON = "the sums of each group are scaled before they are added"
SHORT_TILE_REASON = "a few tokens: each weight is read once and hardly computed with"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class AuditCase:
    """A kernel, what to call it, and what its machine code has to show."""

    name: str
    spec: KernelSpec
    expectations: Expectations


def distinct(cases: Sequence[AuditCase]) -> list[AuditCase]:
    """The first case of each kernel."""
    first = {case.spec: case for case in reversed(cases)}
    return [case for case in cases if first[case.spec] is case]


Cases = Callable[[Target], list[AuditCase]]
#: (family, its function of cases), as their modules are imported.
AUDITED: list[tuple[str, Cases]] = []


def audited(family: str) -> Callable[[Cases], Cases]:
    """Registers a function as the cases of a family, on the chips that have its kernels."""

    def register(cases: Cases) -> Cases:
        AUDITED.append((family, cases))
        return cases

    return register
