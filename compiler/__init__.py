"""The `torch.compile` backend, which turns a Dynamo graph into a graph with fused ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# A module, and torch with it, is imported when one of its names is first used. Code that only reads
# a saved report therefore does not import torch.
_MODULES = {
    "GraphReport": "report",
    "Kernel": "report",
    "Lowered": "report",
    "Options": "options",
    "Site": "report",
    "StrictError": "report.failures",
    "declare": "rewrite.declared",
    "load_modelopt": "quantised.modelopt",
    "lower": "backend",
    "prepare": "quantised",
    "reports": "backend",
    "tilewright": "backend",
    "undeclare": "rewrite.declared",
}

if TYPE_CHECKING:
    from tilewright.compiler.backend import lower, reports, tilewright
    from tilewright.compiler.options import Options
    from tilewright.compiler.quantised import prepare
    from tilewright.compiler.quantised.modelopt import load_modelopt
    from tilewright.compiler.report import GraphReport, Kernel, Lowered, Site
    from tilewright.compiler.report.failures import StrictError
    from tilewright.compiler.rewrite.declared import declare, undeclare
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tilewright.codegen.libraries import imported

        return getattr(imported(f"{__name__}.{_MODULES[name]}", f"tilewright.{name}"), name)


__all__ = [
    "GraphReport",
    "Kernel",
    "Lowered",
    "Options",
    "Site",
    "StrictError",
    "declare",
    "load_modelopt",
    "lower",
    "prepare",
    "reports",
    "tilewright",
    "undeclare",
]
