"""Makes transformers' `generate()` wait less for the GPU, and runs transformers' continuous
batching with tilewright's kernels.

`defer_stop_check(model)` makes `generate()` read one step late whether to stop;
`undefer_stop_check` undoes it. `enable(model)` makes tilewright run the steps of continuous
batching, both in `generate_batch()` and in managers; `disable` undoes it. `BatchingConfig` holds
the settings. Needs transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

#: The module of each name. Modules are imported when one of their names is first used, because they
#: need transformers, and some of them a release with continuous batching.
_MODULES = {
    "BatchingConfig": "batching",
    "compile_config": "batching",
    "defer_stop_check": "stop_check",
    "disable": "engine",
    "enable": "engine",
    "undefer_stop_check": "stop_check",
}

if TYPE_CHECKING:
    from tilewright.compiler.serving.batching import BatchingConfig, compile_config
    from tilewright.compiler.serving.engine import disable, enable
    from tilewright.compiler.serving.stop_check import defer_stop_check, undefer_stop_check
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tilewright.codegen.libraries import imported

        return getattr(imported(f"{__name__}.{_MODULES[name]}", f"tilewright.serving.{name}"), name)


__all__ = [
    "BatchingConfig",
    "compile_config",
    "defer_stop_check",
    "disable",
    "enable",
    "undefer_stop_check",
]
