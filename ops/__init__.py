"""Fused ops. An op has a schema, a fake implementation, checks, a reference and lowerings, in one
file.

Importing the package registers every op that one of its files declares. Each op is also an
attribute of the package and can be called directly: `tilewright.ops.linear_residual(x, weight,
residual, scale=0.5)`.
"""

import sys
from typing import Any

from tilewright.codegen.build.travel import load_kernels, pack_kernels
from tilewright.codegen.discovery import import_all
from tilewright.ops.checks import ArgumentError
from tilewright.ops.contract import all_ops
from tilewright.ops.formats.paged_cache import CacheWindow

# Modules that are named `lowering` or `tuning` are not imported here. Ops refer to their functions
# as "module:function", and the first call that needs such a function imports its module.
import_all(__name__, __path__, but_for=("lowering", "tuning"))

_BY_HAND = {op.name: op for op in all_ops() if op.namespace == "tilewright"}
__all__ = ["ArgumentError", "CacheWindow", "load_kernels", "pack_kernels", *_BY_HAND]


def __getattr__(name: str) -> Any:
    """Returns the op `name`. If the file that declares the op has a function of this name, returns
    that function; otherwise, returns the op's record."""
    if name not in _BY_HAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    op = _BY_HAND[name]
    return getattr(sys.modules[op.validate.__module__], name, op)
