"""Defines audit cases. A case is a kernel with the rules that its machine code must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.contract import FusedOp

# A warp-specialised kernel may use up to this many bytes of stack.
SPECIALISED_STACK_BYTES = 8
# tcgen05 needs at least this many rows. A shorter tile uses the older tensor core instructions.
MMA_ROWS = 64
SOFTMAX_REASON = "the softmax reads each block's scores and rescales the output"
SCALED_SUMS_REASON = "the sums of each group are scaled before they are added"
SHORT_TILE_REASON = "a few tokens: each weight is read once and used in few operations"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns an empty tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class AuditCase:
    """A kernel, the name of the case, and the rules that its machine code must keep."""

    name: str
    spec: KernelSpec
    expectations: Expectations


#: The rules of a kernel for which no special rules exist: it must only keep within the limits of
#: the chip.
NOTHING = Expectations()


def planned(
    name: str,
    op: FusedOp,
    a: Any,
    target: Target,
    claims: Expectations | Callable[[KernelSpec], Expectations] = NOTHING,
) -> Iterator[AuditCase]:
    """Yields the cases of the kernels that one call launches.

    `name` may contain {kernel} and {reason}, which stand for the name of the kernel and the reason
    for the lowering. `claims` returns the rules that the machine code of a kernel must keep.
    """
    report = op.plan_for(a, target.name)
    for spec in report.specs:
        title = name.format(kernel=spec.kernel, reason=report.reason)
        yield AuditCase(title, spec, claims(spec) if callable(claims) else claims)


def distinct(cases: Sequence[AuditCase]) -> list[AuditCase]:
    """Returns the cases, and leaves out every case that has the same kernel as an earlier case."""
    first = {case.spec: case for case in reversed(cases)}
    return [case for case in cases if first[case.spec] is case]


Cases = Callable[[Target], list[AuditCase]]
#: Pairs (family, function that returns its cases), in the order in which modules are imported.
AUDITED: list[tuple[str, Cases]] = []


def audited(family: str) -> Callable[[Cases], Cases]:
    """Registers a function that returns the cases of a family. The function is called for each chip
    that has kernels of the family."""

    def register(cases: Cases) -> Cases:
        AUDITED.append((family, cases))
        return cases

    return register
