"""The outcome of compiling a kernel and of auditing its machine code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewright.codegen.audit import Audit, Expectations, check, notes
from tilewright.codegen.build import Artifact, BuildError
from tilewright.codegen.targets import Target


@dataclass(frozen=True)
class Audited:
    """The outcome for one kernel.

    audit: the audit of its machine code; None if the kernel did not compile.
    error: the last lines of the compiler's output if it did not compile.
    problems: the rules that the machine code breaks, each as `rule: sentence`.
    notes: further remarks in the same form.
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
    """Compiles a kernel and audits it. A kernel that Triton rejects is an outcome and not an
    error."""
    try:
        audit = build().audit
    except BuildError as error:
        return Audited(None, error=str(error))
    problems, told = (tuple(of(audit, target, expected)) for of in (check, notes))
    return Audited(audit, problems, notes=told)
