"""Compiles the kernels of a report in parallel, and checks the machine code of each kernel against
the rules of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from tilewright.codegen.audit import Expectations
from tilewright.codegen.targets import Target, get_target
from tilewright.compiler import Kernel
from tilewright.tools.audit.cases import (
    MMA_ROWS,
    SHORT_TILE_REASON,
    SOFTMAX_REASON,
    SPECIALISED_STACK_BYTES,
)
from tilewright.tools.audit.moe import ROW_SCALES_REASON, nvfp4_mma
from tilewright.tools.audit.outcome import Audited, outcome_of
from tilewright.tools.audit.qkv import fresh_sums_reason

WORKERS = 2


@dataclass(frozen=True)
class KernelAudit(Audited):
    """The outcome of compiling and auditing one kernel of a report."""

    kernel: Kernel = field(kw_only=True)

    def as_dict(self) -> dict[str, Any]:
        """Returns the outcome as JSON-ready data."""
        facts = None
        if self.audit is not None:
            facts = asdict(self.audit) | {"mma": self.audit.mma, "spills": self.audit.spills}
        told = {"problems": list(self.problems), "notes": list(self.notes)}
        return {"audit": facts, **told, "error": self.error or None}


def audit_kernels(
    kernels: Sequence[Kernel],
    target: str,
    *,
    workers: int = WORKERS,
    done: Callable[[], None] = lambda: None,
) -> list[KernelAudit]:
    """Cross-compiles every kernel for `target` and audits it. This needs no GPU.

    Each kernel compiles in a separate process, and `workers` processes run at a time. Kernels in
    the cache are not compiled again. `done` is called after each kernel. A kernel that does not
    compile is an outcome and not an error. Raises ValueError for an unknown target.
    """
    chip = get_target(target)

    def one(kernel: Kernel) -> KernelAudit:
        outcome = outcome_of(partial(kernel.build, chip.name), chip, expectations(kernel, chip))
        done()
        return KernelAudit(**vars(outcome), kernel=kernel)

    # The threads only wait: the compiler runs in the worker processes.
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, kernels))


def expectations(kernel: Kernel, target: Target) -> Expectations:
    """Returns the rules that follow from the spec of a kernel.

    A kernel that multiplies tiles must use the tensor cores that are meant for its dtype, unless
    its tiles are too short for them. If the chip's tensor cores support NVFP4, a product of two
    NVFP4 operands must be computed in NVFP4. A kernel that is warp-specialised, that unpacks codes,
    or that computes attention may use a little stack.
    """
    if "tl.dot" not in kernel.source:
        return Expectations()
    first = next(kind for _, kind in kernel.spec.signature if kind.startswith("*"))
    dtype = first.removeprefix("*")
    constants = dict(kernel.spec.constants)
    pairs, is_router = constants.get("BLOCK_P"), "WIDENED" in constants
    rows = constants["BLOCK_T"] if is_router else 2 * pairs if isinstance(pairs, int) else None
    short = isinstance(rows, int) and rows < MMA_ROWS
    attends = "MASK_KIND" in constants
    roomy = constants.get("WARP_SPECIALIZE") or "CODE_OFFSET" in constants or attends
    roomy = roomy or constants.get("FORMAT", "dense") != "dense"
    if "BLOCK_SCALED" in constants:
        dtype = nvfp4_mma(target)
    if constants.get("WIDENED"):
        dtype = "fp32"  # the dtype of a router's weight
    return Expectations(
        mma=dtype if dtype in dict(target.mma_opcodes) else None,
        legacy_mma_reason=SHORT_TILE_REASON if short else "",
        stack_bytes=SPECIALISED_STACK_BYTES if roomy else 0,
        row_scales_reason=ROW_SCALES_REASON if constants.get("SWAPPED") else "",
        fresh_sums_reason=SOFTMAX_REASON if attends else fresh_sums_reason(constants),
    )
