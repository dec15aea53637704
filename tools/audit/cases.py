"""Cases of audits, in all families: a kernel, and what its machine code has to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.contract import FusedOp

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


#: Of a kernel that has nothing to show but that it keeps to the limits of the chip.
NOTHING = Expectations()


def planned(
    name: str,
    op: FusedOp,
    a: Any,
    target: Target,
    claims: Expectations | Callable[[KernelSpec], Expectations] = NOTHING,
) -> Iterator[AuditCase]:
    """The kernels of a call. name: may have {kernel} and {reason}, of the choice, in it. claims:
    what a kernel has to show."""
    report = op.plan_for(a, target.name)
    for spec in report.specs:
        title = name.format(kernel=spec.kernel, reason=report.reason)
        yield AuditCase(title, spec, claims(spec) if callable(claims) else claims)


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
