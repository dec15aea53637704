"""Modules that register something when they are imported, found in the folder that they lie in."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable


def import_all(package: str, path: Iterable[str], but_for: tuple[str, ...] = ()) -> None:
    """Imports every module below the package of this name and `__path__`, in order of their names.

    but_for: endings of names of modules that are left to those who want them.
    """
    for found in pkgutil.walk_packages(path, f"{package}."):
        if not found.name.endswith(but_for):
            importlib.import_module(found.name)
