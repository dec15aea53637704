"""The `torch.compile` backend: from a Dynamo graph to a graph with fused ops."""

from tilewright.compiler.backend import lower, reports, tilewright
from tilewright.compiler.options import Options
from tilewright.compiler.report import GraphReport, Kernel, Lowered, Site
from tilewright.compiler.report.failures import StrictError

__all__ = [
    "GraphReport",
    "Kernel",
    "Lowered",
    "Options",
    "Site",
    "StrictError",
    "lower",
    "reports",
    "tilewright",
]
