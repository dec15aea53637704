"""Lists the kernels of every family, which are compiled with every supported release of Triton.

This module imports every module of its folder. The functions there that are decorated with
`audited` return the cases of a family.
"""

from __future__ import annotations

import importlib
import pkgutil

from tilewright.codegen.targets import Target
from tilewright.tools import audit
from tilewright.tools.audit.cases import AUDITED, AuditCase

for _module in pkgutil.iter_modules(audit.__path__):
    if f"{audit.__name__}.{_module.name}" != __name__:
        importlib.import_module(f"{audit.__name__}.{_module.name}")

FAMILIES = frozenset(family for family, _ in AUDITED)


def all_cases(target: Target) -> list[AuditCase]:
    """Returns the cases of the families that a chip has. Leaves out kernels with dtypes that the
    chip lacks."""
    known = (cases(target) for family, cases in AUDITED if family in target.families)
    return [case for cases in known for case in cases if _has_dtypes(case, target)]


def _has_dtypes(case: AuditCase, target: Target) -> bool:
    return target.has("fp8") or all("fp8e4nv" not in kind for _, kind in case.spec.signature)
