"""Imports the modules of a folder, which register something when they are imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable


def import_all(package: str, path: Iterable[str], but_for: tuple[str, ...] = ()) -> None:
    """Imports every module below the package of this name and `__path__`, in the order of names.

    but_for: modules whose names have one of these endings are not imported here.
    """
    for found in pkgutil.walk_packages(path, f"{package}."):
        if not found.name.endswith(but_for):
            importlib.import_module(found.name)
