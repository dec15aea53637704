"""Makes virtual environments with chosen releases."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_environment(python: str, folder: Path, *packages: str) -> None:
    """Makes a new environment that has this Python and these packages. Raises RuntimeError with
    pip's message."""
    _run(python, "-m", "venv", "--clear", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
    _run(*pip, "--disable-pip-version-check", *packages)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
