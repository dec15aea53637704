"""Puts the sample templates on the import path, and gives the tests a private kernel cache."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    """Gives the whole run one private cache, so that each kernel compiles once and the user's cache
    stays untouched."""
    root = tmp_path_factory.getbasetemp() / "tilewright-cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(root))
    return root
