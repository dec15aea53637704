"""Imports modules that need a library which tilewright does not install."""

from __future__ import annotations

import importlib
from types import ModuleType

#: The libraries that only some functions and commands need.
OPTIONAL = ("peft", "transformers")


def imported(module: str, user: str) -> ModuleType:
    """Imports a module that may need an optional library.

    `user` is the function or command that needs the module. Raises ModuleNotFoundError with a
    message that names `user`, the missing library, and the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        said = f"{user} needs {error.name}, which is not installed: pip install {error.name}"
        raise ModuleNotFoundError(said, name=error.name) from error
