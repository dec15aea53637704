"""Outcomes of kernels that were compiled, and whose machine code was checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewright.codegen.audit import Audit, Expectations, check, notes
from tilewright.codegen.build import Artifact, BuildError
from tilewright.codegen.targets import Target


@dataclass(frozen=True)
class Audited:
    """The outcome for one kernel.

    audit: None where it did not compile; error then has the compiler's last words. problems: the
    rules that the machine code breaks, as `rule: sentence`. notes: what else is to know of it, in
    the same form.
    """

    audit: Audit | None
    problems: tuple[str, ...] = ()
    error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether the kernel compiles and breaks no rule."""
        return self.audit is not None and not self.problems


def outcome_of(build: Callable[[], Artifact], target: Target, expected: Expectations) -> Audited:
    """Builds a kernel and audits it; what Triton refuses is an outcome, not an error."""
    try:
        audit = build().audit
    except BuildError as error:
        return Audited(None, error=str(error))
    problems, told = (tuple(of(audit, target, expected)) for of in (check, notes))
    return Audited(audit, problems, notes=told)
