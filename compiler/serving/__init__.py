"""Lets transformers generate at the GPU's pace, and its serving engine run by tilewright.

`defer_stop_check(model)` has `generate()` read one step late whether to stop. `enable(model)` has
continuous batching, `generate_batch()` and its managers, run by tilewright, with `BatchingConfig`
as its settings. `undefer_stop_check` and `disable` take them back. Needs transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewright.compiler.serving.engine import disable, enable
from tilewright.compiler.serving.stop_check import defer_stop_check, undefer_stop_check

if TYPE_CHECKING:
    from tilewright.compiler.serving.batching import BatchingConfig, compile_config

__all__ = [
    "BatchingConfig",
    "compile_config",
    "defer_stop_check",
    "disable",
    "enable",
    "undefer_stop_check",
]


def __getattr__(name: str) -> Any:
    """Imports what only releases of transformers with continuous batching have."""
    if name in ("BatchingConfig", "compile_config"):
        from tilewright.compiler.serving import batching

        return getattr(batching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
