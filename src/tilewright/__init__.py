"""A graph compiler for PyTorch inference: `torch.compile(model, backend="tilewright")`.

The names here are imported when they are first used, and torch with them: `import tilewright` alone
imports none. The folders beside this file are links to the folders at the top of the repository.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

#: The release. pyproject.toml reads it here.
__version__ = "0.2.0"

#: The module of each public name. `serving` is a module itself.
_MODULES = {
    "GraphReport": "compiler",
    "Lowered": "compiler",
    "Options": "compiler",
    "PagedCache": "tools.paged_cache",
    "StrictError": "compiler",
    "cache_argument": "compiler.model_cache",
    "declare": "compiler",
    "load_modelopt": "compiler",
    "lower": "compiler",
    "prepare": "compiler",
    "reports": "compiler",
    "serving": "compiler.serving",
    "undeclare": "compiler",
}

if TYPE_CHECKING:
    from tilewright.compiler import (
        GraphReport,
        Lowered,
        Options,
        StrictError,
        declare,
        load_modelopt,
        lower,
        prepare,
        reports,
        serving,
        undeclare,
    )
    from tilewright.compiler.model_cache import cache_argument
    from tilewright.tools.paged_cache import PagedCache
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            said = f"module {__name__!r} has no attribute {name!r}"
            # With the name and the module, Python's traceback adds the nearest name.
            raise AttributeError(said, name=name, obj=sys.modules[__name__])
        from tilewright.codegen.libraries import imported

        module = imported(f"{__name__}.{_MODULES[name]}", f"tilewright.{name}")
        return module if name == "serving" else getattr(module, name)


__all__ = [
    "GraphReport",
    "Lowered",
    "Options",
    "PagedCache",
    "StrictError",
    "__version__",
    "cache_argument",
    "declare",
    "load_modelopt",
    "lower",
    "prepare",
    "reports",
    "serving",
    "undeclare",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Named(logging.Handler):
    """Prints warnings with the library's name in programs that set up no logging. Python alone
    prints only the text, which does not say where it comes from."""

    def emit(self, record: logging.LogRecord) -> None:
        own = logging.getLogger("tilewright")
        others = [handler for handler in own.handlers if handler is not self]
        if not others and not (own.propagate and logging.getLogger().handlers):
            print(f"tilewright: {self.format(record)}", file=sys.stderr)


logging.getLogger("tilewright").addHandler(_Named(logging.WARNING))
