"""The sample templates on the import path, and a cache of its own for every test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    """One cache for the whole run: kernels compile once, nothing of the user's is touched."""
    root = tmp_path_factory.getbasetemp() / "tilewright-cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(root))
    return root
