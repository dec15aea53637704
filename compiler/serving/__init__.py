"""Makes transformers' `generate()` wait less for the GPU, and runs transformers' continuous
batching with tilewright's kernels.

`defer_stop_check(model)` makes `generate()` read one step late whether to stop;
`undefer_stop_check` undoes it. `enable(model)` makes tilewright run the steps of continuous
batching, both in `generate_batch()` and in managers; `disable` undoes it. `BatchingConfig` holds
the settings. Needs transformers.
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
    """Imports names that need a release of transformers with continuous batching."""
    if name in ("BatchingConfig", "compile_config"):
        from tilewright.compiler.serving import batching

        return getattr(batching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
