"""Imports the modules of a folder, so that each registers its definitions."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable


def import_all(package: str, path: Iterable[str], but_for: tuple[str, ...] = ()) -> None:
    """Imports every module below a package, in the order of their names.

    package: the name of the package. path: its `__path__`. but_for: modules whose names end in one
    of these endings are not imported.
    """
    for found in pkgutil.walk_packages(path, f"{package}."):
        if not found.name.endswith(but_for):
            importlib.import_module(found.name)
